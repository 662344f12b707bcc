"""The site: it builds strictly, all its links lead somewhere, and the API is whole."""

import inspect
import re
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material", reason="the site needs the extra `docs`")
pytest.importorskip("mkdocstrings", reason="the site needs the extra `docs`")

import callbacks
import export
import mrp_lightning
from mrp_lightning.pruning.settings import Settings

ROOT = Path(__file__).parents[2]
MODULES = {"mrp_lightning": mrp_lightning, "mrp_lightning.callbacks": callbacks, "export": export}
CELL = {"align", "style", "colspan", "rowspan"}
"""Attributes of a table's cell; names in braces within a cell would become others, and be lost."""


class Page(HTMLParser):
    """The links, the anchors and the attributes of table cells of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = {"", "__top"}
        self.cells: list[set[str]] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {key: str(value) for key, value in attrs if value}
        self.links += [values[key] for key in ("href", "src") if key in values]
        self.anchors |= {values[key] for key in ("id", "name") if key in values}
        self.cells += [{key for key, _ in attrs}] * (tag in ("td", "th"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 15
    return pages


def test_every_link_leads_somewhere(site, pages):
    def is_lost(path: Path, link: str) -> bool:
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            return False
        to = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        to = to / "index.html" if to.is_dir() else to
        return not to.exists() or (to in pages and unquote(parts.fragment) not in pages[to].anchors)

    lost = [(path, link) for path, page in pages.items() for link in page.links]
    assert not [(path, link) for path, link in lost if is_lost(path, link)]


def test_no_cell_loses_its_content_to_attributes(pages):
    cells = [cell for page in pages.values() for cell in page.cells]
    assert len(cells) > 300
    assert not [cell - CELL for cell in cells if cell - CELL]


def test_nothing_is_fetched_from_elsewhere(pages):
    """The site works without a network: scripts, styles, fonts and pictures are its own."""
    fetched = (
        r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*|<link[^>]*rel="stylesheet"[^>]*//'
    )
    assert not [path for path in pages if re.search(fetched, path.read_text("utf-8"))]


def test_the_page_of_the_callback_lists_all_arguments(site):
    page = (site / "api-calibration" / "index.html").read_text("utf-8")
    words = set(re.findall(r"\w+", unescape(re.sub("<[^>]*>", "", page))))
    assert set(inspect.signature(Settings).parameters) <= words


def test_every_public_name_has_one_entry(site, pages):
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    public = [(package, name) for package, module in MODULES.items() for name in module.__all__]
    is_error = {name for _, name in public if name.endswith(("Error", "Warning"))}
    for package, name in public:
        home = getattr(MODULES[package], name).__module__ if name in is_error else package
        assert f"{home}.{name}" in anchors
    page = (site / "api" / "index.html").read_text("utf-8")
    listed = re.findall(r'href="\.\./api-[\w-]+/#[\w.]+"><code>(\w+)</code>', page)
    assert sorted(listed) == sorted({name for _, name in public} - is_error)
