"""A page as its reader gets it: text, tables, links, pictures."""

import base64
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

VOID = {"meta", "link", "wbr", "br", "img", "source"}
LINKS = ("src", "href", "srcset", "poster", "action", "xlink:href")


@dataclass
class Table:
    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)
    scopes: list[str | None] = field(default_factory=list)

    def row(self, head: str, group: str = "") -> list[str]:
        """The cells of a row; `group` is the last row of one cell above it."""
        current = ""
        for row in self.rows[1:]:
            if len(row) == 1:
                current = row[0]
            elif row[0] == head and current == group:
                return row[1:]
        raise AssertionError(f"no row {head!r} in {group!r}: {self.rows}")


@dataclass
class Picture:
    alt: str
    svg: str


def _svg(url: str | None) -> str:
    kind, _, content = str(url).partition(",")
    assert kind == "data:image/svg+xml;base64", kind
    return base64.b64decode(content).decode()


class HtmlPage(HTMLParser):
    """Parses a page; fails if tags are not closed in order."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tables: list[Table] = []
        self.links: list[str] = []
        self.styles: list[str] = []
        self.ids: list[str] = []
        self.pictures: list[Picture] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.source = path.read_text("utf-8")
        self.feed(self.source)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append(tag)
        self.attributes |= found.keys()
        self.links += [found[key] or "" for key in LINKS if key in found]
        self.styles += [found["style"] or ""] if "style" in found else []
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag == "img":
            self.pictures.append(Picture(found["alt"] or "", _svg(found["src"])))
        if tag == "table":
            self.tables.append(Table())
        if tag == "tr":
            self.tables[-1].rows.append([])
        if tag in ("th", "td"):
            self.tables[-1].rows[-1].append("")
        if tag == "th":
            self.tables[-1].scopes.append(found.get("scope"))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            self.styles.append(data)
            return
        self.text += data
        if "caption" in self._open:
            self.tables[-1].caption += data
        elif "th" in self._open or "td" in self._open:
            self.tables[-1].rows[-1][-1] += data

    def table(self, caption: str) -> Table:
        (found,) = (table for table in self.tables if table.caption.startswith(caption))
        return found
