"""A matplotlib figure as inline SVG that follows the page's colours and font, and as PNG."""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure

from mrp_lightning.experiments.page.palette import ROLES, light

WIDTH = 4.2
"""Inches. The text of a figure of this width is readable on a phone."""

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,  # names may hold anything
    "text.color": light("ink"),
    "axes.edgecolor": light("rule"),
    "axes.labelcolor": light("muted"),
    "axes.labelsize": 9,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.grid": True,
    "grid.color": light("rule"),
    "grid.linewidth": 0.6,
    "xtick.color": light("rule"),
    "xtick.labelcolor": light("muted"),
    "ytick.color": light("rule"),
    "ytick.labelcolor": light("muted"),
    "ytick.major.size": 0,
    "hatch.linewidth": 0.7,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "svg.fonttype": "none",
    "svg.hashsalt": "mrp-lightning",  # the same runs give the same page
}
_ROLE_OF = {tone.light: role for role, tone in ROLES.items()}


@dataclass(frozen=True)
class Drawing:
    """A figure of the page.

    Attributes:
        name: Of the PNG file, without its ending.
        caption: Below the figure.
        alt: What it shows, in words and numbers, for those who cannot see it.
        svg: Inline SVG.
        png: The same on light paper.
    """

    name: str
    caption: str
    alt: str
    svg: str
    png: bytes


@contextmanager
def style() -> Iterator[None]:
    """Draw in the page's style."""
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # A name in a script that matplotlib's font lacks is still right in the SVG.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def finish(figure: Figure, name: str, caption: str, alt: str) -> Drawing:
    """Render a figure. Call it within `style()`."""
    svg, png = io.BytesIO(), io.BytesIO()
    figure.savefig(svg, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # it is laid out now, and laying out takes longest
    figure.savefig(png, format="png", dpi=200, facecolor=light("paper"), metadata={"Title": alt})
    return Drawing(name, caption, alt, _inline(svg.getvalue(), name, alt), png.getvalue())


def _inline(content: bytes, name: str, alt: str) -> str:
    """The SVG without what a page has already, and with ids that no other figure has."""
    root = ElementTree.fromstring(content)
    for element in root.iter():
        for child in list(element):
            if child.tag.endswith(("}metadata", "}style")):
                element.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {
            key.rpartition("}")[2]: _attribute(key.rpartition("}")[2], value, name)
            for key, value in element.attrib.items()
        }
    box = root.attrib["viewBox"]
    root.attrib = {"viewBox": box, "role": "img", "aria-label": alt}
    return ElementTree.tostring(root, encoding="unicode")


def _attribute(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value[1:]}"
    value = value.replace("url(#", f"url(#{name}-")
    if key == "style":
        value = re.sub(r"font: ([\d.]+px)[^;]*", r"font-size: \1", value)
        value = re.sub(r"#[0-9a-f]{6}\b", _variable, value)
    return value


def _variable(match: re.Match[str]) -> str:
    role = _ROLE_OF.get(match[0])
    return f"var(--{role})" if role else match[0]
