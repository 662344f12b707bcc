"""The colours of the page, and drawing a picture in them: once on light paper, once on dark."""

import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))

WIDTH = 4.2
"""Inches. The text of a picture of this width is readable on a phone."""


@dataclass(frozen=True)
class Palette:
    """Colours by role. Text has a contrast of 4.5 and more with the paper, lines 3 and more.

    Attributes:
        paper: Behind everything.
        surface: Behind what is set apart.
        rule: Of thin lines.
        muted: Of text of less weight.
        ink: Of text.
        accent: Of links and of the best values.
        caution: Of what weakens a result.
        series: One colour a method, in the order of `method_rank`.
        heat: The colours of the smallest and the largest value of a map.
        color_map: The name by which matplotlib knows the colours between these two.
    """

    paper: str
    surface: str
    rule: str
    muted: str
    ink: str
    accent: str
    caution: str
    series: tuple[str, ...]
    heat: tuple[str, str]
    color_map: str

    @property
    def variables(self) -> str:
        """The colours as CSS variables: `--paper`, `--series-0`."""
        plain = {role: color for role, color in vars(self).items() if str(color).startswith("#")}
        plain |= {f"series-{i}": color for i, color in enumerate(self.series)}
        return ";".join(f"--{role}:{color}" for role, color in plain.items())


# fmt: off
LIGHT = Palette(
    paper="#fdfdfb", surface="#f4f4f0", rule="#dddedb", muted="#5b646d", ink="#1c2024",
    accent="#0b6e75", caution="#96500a", heat=("#e2efed", "#06363b"),
    color_map="mrp-lightning-light",
    series=("#7b838c", "#a06d14", "#c04a2b", "#5d7822", "#0a6d74", "#5b50a4",
            "#ad3977", "#2d6db3", "#87583a", "#3b7d50", "#8a3dae", "#69692a"),
)
DARK = Palette(
    paper="#15181b", surface="#1e2226", rule="#343a40", muted="#a0a9b1", ink="#e7e9eb",
    accent="#53c6c9", caution="#e9b266", heat=("#20363a", "#a6ecea"),
    color_map="mrp-lightning-dark",
    series=("#9da6ae", "#d9a54a", "#f08c6c", "#a5c25c", "#52c5c8", "#a99ff1",
            "#e986b9", "#80b3ed", "#d0a285", "#80c897", "#d093eb", "#bebe70"),
)
# fmt: on

for _palette in (LIGHT, DARK):
    _between = LinearSegmentedColormap.from_list(_palette.color_map, _palette.heat)
    matplotlib.colormaps.register(_between)


@dataclass(frozen=True)
class Picture:
    """A picture of the page.

    Attributes:
        name: The name of its PNG file, without the ending; pictures of a page may share it.
        caption: What stands above it.
        alt: What it shows, in words and numbers, for those who cannot see it.
        light: SVG for light paper.
        dark: SVG for dark paper.
        png: The picture on light paper, for use elsewhere.
    """

    name: str
    caption: str
    alt: str
    light: bytes
    dark: bytes
    png: bytes


def render(name: str, caption: str, words: str, draw: Callable[[], Figure]) -> Picture:
    """Draw a picture in both colour schemes.

    Args:
        name: See `Picture`.
        caption: See `Picture`.
        words: What the picture shows, after its caption.
        draw: Draws it by the colours of `matplotlib.rcParams`, in which `C0` is the first series.
    """
    alt = f"{caption} {words}"
    with warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is still right in the SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        with matplotlib.rc_context(_style(DARK)):
            dark = _saved(draw(), format="svg", metadata=_NO_METADATA)
        with matplotlib.rc_context(_style(LIGHT)):
            figure = draw()
            light = _saved(figure, format="svg", metadata=_NO_METADATA)
            figure.set_layout_engine("none")  # it is laid out now, and laying out takes longest
            png = _saved(figure, format="png", dpi=200, metadata={"Title": alt})
    return Picture(name, caption, alt, light, dark, png)


def _style(palette: Palette) -> Any:
    return {
        "font.family": ["sans-serif"],
        "font.size": 9,
        "text.parse_math": False,  # names may hold anything
        "text.color": palette.ink,
        "axes.prop_cycle": cycler(color=palette.series),
        "axes.edgecolor": palette.rule,
        "axes.labelcolor": palette.muted,
        "axes.labelsize": 9,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
        "axes.grid": True,
        "grid.color": palette.rule,
        "grid.linewidth": 0.6,
        "xtick.color": palette.rule,
        "xtick.labelcolor": palette.muted,
        "ytick.color": palette.rule,
        "ytick.labelcolor": palette.muted,
        "ytick.major.size": 0,
        "hatch.linewidth": 0.7,
        "image.cmap": palette.color_map,
        "figure.facecolor": palette.paper,
        "axes.facecolor": palette.paper,
        "svg.fonttype": "none",
        "svg.hashsalt": "mrp-lightning",  # the same runs give the same page
    }


def _saved(figure: Figure, **options: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, **options)
    return buffer.getvalue()
