"""Build a distribution of two packages: this folder, `mrp_sparse`, and `mrp_ground` next to it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLOOR = "mrp_ground"
SHIPPED = {".py", ".typed", ".cpp", ".h"}


class TwoPackages(BuildHookInterface):
    """Add the files of both packages to a wheel, and those of `mrp_ground` to an sdist.

    An sdist holds `mrp_ground` in itself. A checkout has it next to `mrp_sparse`, so that both run
    without an installation; an editable installation adds the checkout to Python's path.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Name the files, and their paths in the distribution.

        Args:
            version: "standard" or "editable".
            build_data: The results of all hooks.
        """
        if version == "editable":
            return
        root = Path(self.root)
        floor = root / FLOOR if (root / FLOOR).is_dir() else root.parent / FLOOR
        files = {path: f"{FLOOR}/{path.name}" for path in shipped(floor)}
        if self.target_name == "wheel":
            paths = [path.relative_to(root) for path in shipped(root)]
            files |= {
                root / path: f"mrp_sparse/{path.as_posix()}"
                for path in paths
                if path.parts[0] not in (FLOOR, Path(__file__).name)
            }
        build_data["force_include"] |= {str(path): target for path, target in files.items()}


def shipped(folder: Path) -> Iterator[Path]:
    """Yield the files of a package, in a stable order."""
    yield from (path for path in sorted(folder.rglob("*")) if path.suffix in SHIPPED)
