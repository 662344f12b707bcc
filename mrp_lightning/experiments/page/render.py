"""The templates of pages, HTML and Markdown."""

import base64
import re
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape
from markupsafe import Markup


def render(template: str, **content: Any) -> str:
    """Fill a template of this directory; what it shows as HTML is escaped."""
    environment = Environment(
        loader=FunctionLoader(read_template),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        trim_blocks=template.endswith(".md"),
        lstrip_blocks=template.endswith(".md"),
    )
    environment.filters["base64"] = lambda content: base64.b64encode(content).decode()
    environment.filters["breakable"] = _breakable
    environment.filters["cell"] = _cell
    environment.filters["fence"] = _fence
    return environment.get_template(template).render(**content)


def read_template(name: str) -> str:
    """The text of a file of this directory."""
    return resources.files(__package__).joinpath(name).read_text("utf-8")


def _breakable(name: str) -> Markup:
    """A name that may be broken after its dots."""
    return Markup(".<wbr>").join(name.split("."))


def _cell(text: str) -> str:
    """A text as the cell of a table in Markdown."""
    return text.replace("|", "\\|").replace("\n", " ")


def _fence(text: str) -> str:
    """A block of code in Markdown, which may hold anything."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}text\n{text}\n{fence}"
