"""Directories of somebody, and those that we wrote."""

from pathlib import Path

from mrp_lightning.storage.files import MANIFEST, write_manifest

OURS = ("config.json", "model-00001-of-00002.safetensors", "tokenizer.json", "evaluation.json")


def put(directory: Path, *names: str) -> None:
    """Files of somebody."""
    for name in names:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text("precious")


def make(directory: Path, *names: str) -> None:
    """A directory that we wrote."""
    put(directory, *names)
    write_manifest(directory)


def content(directory: Path) -> list[str]:
    """The names of all that is there but for manifests."""
    found = (p.relative_to(directory).as_posix() for p in directory.rglob("*"))
    return sorted(name for name in found if Path(name).name != MANIFEST)
