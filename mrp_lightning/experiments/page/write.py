"""Writing the page and its figures, each in one step."""

import shutil
from pathlib import Path

from mrp_lightning.experiments.page.page import GENERATOR, Page
from mrp_lightning.files import save_directory, save_text


def check_out(out: Path, *, overwrite: bool = False) -> None:
    """Refuse to replace what this command did not write.

    Raises:
        FileExistsError: `out` is a directory, or a file that is no report; or its figures would
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
    figures = figures_directory(out)
    if figures.exists() and not figures.is_dir():
        raise FileExistsError(f"`--out`: {figures} is to hold the figures, but is a file.")
    other = [f.name for f in figures.iterdir() if f.suffix != ".png"] if figures.exists() else []
    if other:
        raise FileExistsError(
            f"`--out`: {figures} is to hold the figures, but holds {', '.join(sorted(other)[:5])}. "
            "Name another file, or allow the directory to be replaced with --overwrite."
        )


def figures_directory(out: Path) -> Path:
    """Where the PNG files of a page are."""
    return out.with_name(f"{out.stem}-figures")


def write_page(page: Page, out: Path, *, overwrite: bool = False) -> None:
    """Write a page and, beside it, its figures as PNG files.

    Raises:
        FileExistsError: See `check_out`.
    """
    check_out(out, overwrite=overwrite)
    figures = figures_directory(out)
    if page.drawings:
        with save_directory(figures, overwrite=True, argument="--out") as staging:
            for drawing in page.drawings:
                (staging / f"{drawing.name}.png").write_bytes(drawing.png)
    elif figures.exists():
        shutil.rmtree(figures)
    save_text(out, page.html)
