"""Build a distribution of two packages: this folder, `mrp_sparse`, and `mrp_ground` next to it.

A wheel has the compiled kernels in place of their sources, and is of one kind of machine. They need
torch's headers, and so no build isolation. Where they cannot be built, the wheel has the sources,
from which the first product builds them in the same way.
"""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FLOOR = "mrp_ground"
SHIPPED = {".py", ".typed", ".cpp", ".h"}
SOURCES = {".cpp", ".h"}


class TwoPackages(BuildHookInterface):
    """Add the files of both packages to a wheel, and those of `mrp_ground` to an sdist.

    An sdist holds `mrp_ground` in itself. A checkout has it next to `mrp_sparse`, so that both run
    without an installation; an editable installation adds the checkout to Python's path.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files, and their paths in the distribution, to `build_data`.

        Args:
            version: "standard" or "editable"; an editable wheel gets no files, only built kernels.
            build_data: The results of all hooks. Its "force_include" is extended; for a wheel with
                kernels "tag" and "pure_python" are set.
        """
        root = Path(self.root)
        floor = root / FLOOR if (root / FLOOR).is_dir() else root.parent / FLOOR
        files = {path: f"{FLOOR}/{path.name}" for path in shipped(floor)}
        if self.target_name == "wheel":
            kernels = self.kernels(root)
            if version == "editable":
                return
            paths = list(shipped(root))
            if kernels is not None:
                library, build_data["tag"] = kernels
                build_data["pure_python"] = False
                paths = [library, *(path for path in paths if path.suffix not in SOURCES)]
            files |= {
                path: f"mrp_sparse/{path.relative_to(root).as_posix()}"
                for path in paths
                if path.relative_to(root).parts[0] not in (FLOOR, Path(__file__).name)
            }
        build_data["force_include"] |= {str(path): target for path, target in files.items()}

    def kernels(self, root: Path) -> tuple[Path, str] | None:
        """Return the library of compiled kernels, built if needed, and the tag of its machines.

        If the library cannot be built, display a warning and return `None`.
        """
        library = module(root / "kernels" / "library.py")
        try:
            return library.build(), library.tag()
        except library.BuildError as error:
            self.app.display_warning(
                f"The kernels of mrp-sparse for CPUs are not compiled now: {error}. The first "
                "product tries again. To compile them now, install g++ and torch, and build "
                "without isolation (pip install --no-build-isolation)."
            )
            return None


def module(path: Path) -> Any:
    """Load a module from its file: its package is not installed yet."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def shipped(folder: Path) -> Iterator[Path]:
    """Yield the files under a folder whose suffix is in `SHIPPED`, sorted by path."""
    yield from (path for path in sorted(folder.rglob("*")) if path.suffix in SHIPPED)
