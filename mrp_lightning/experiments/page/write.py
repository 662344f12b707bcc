"""Writing the page and its pictures, each in one step."""

import shutil
from pathlib import Path

from mrp_lightning.experiments.page.page import GENERATOR, Page
from mrp_lightning.files import save_directory, save_text


def check_out(out: Path, *, overwrite: bool = False) -> None:
    """Refuse to replace what this command did not write.

    Raises:
        FileExistsError: `out` is a directory, or a file that is no report; or its pictures would
            replace a directory with other files.
    """
    if out.is_dir():
        raise FileExistsError(f"`--out`: expected a file, but {out} is a directory.")
    if overwrite:
        return
    if out.exists() and GENERATOR not in out.read_bytes()[:2000].decode("utf-8", "replace"):
        raise FileExistsError(
            f"`--out`: {out} exists and is no report. Name another file, or allow it to be "
            "replaced with --overwrite."
        )
    pictures = pictures_directory(out)
    if pictures.exists() and not pictures.is_dir():
        raise FileExistsError(f"`--out`: {pictures} is to hold the pictures, but is a file.")
    other = [f.name for f in pictures.iterdir() if f.suffix != ".png"] if pictures.exists() else []
    if other:
        raise FileExistsError(
            f"`--out`: {pictures} is to hold the pictures, but holds "
            f"{', '.join(sorted(other)[:5])}. Name another file, or allow the directory to be "
            "replaced with --overwrite."
        )


def pictures_directory(out: Path) -> Path:
    """Where the PNG files of a page are."""
    return out.with_name(f"{out.stem}-figures")


def write_page(page: Page, out: Path, *, overwrite: bool = False) -> None:
    """Write a page and, beside it, its pictures as PNG files.

    Raises:
        FileExistsError: See `check_out`.
    """
    check_out(out, overwrite=overwrite)
    pictures = pictures_directory(out)
    if page.pictures:
        with save_directory(pictures, overwrite=True, argument="--out", ours=["*.png"]) as staging:
            for name, picture in page.pictures.items():
                (staging / f"{name}.png").write_bytes(picture.png)
    elif pictures.exists():
        shutil.rmtree(pictures)
    save_text(out, page.html)
