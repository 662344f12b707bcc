"""The site: it builds strictly, all its links lead somewhere, and questions are near."""

import inspect
import json
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

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
NAMES = {
    "mrp_lightning": mrp_lightning,
    "mrp_lightning.callbacks": callbacks,
    "export": export,
}
SCREENS = 1.5
LINES = 40
"""Lines of a hundred letters on a screen of 1280 × 800."""


class Page(HTMLParser):
    """The links and the anchors of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [str(found[key]) for key in ("href", "src") if found.get(key)]
        self.anchors |= {str(found[key]) for key in ("id", "name") if found.get(key)}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert built.returncode == 0, built.stdout + built.stderr
    return out


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    found = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(found) > 15
    return found


def test_every_link_leads_somewhere(site, pages):
    lost = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            to = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            to = to / "index.html" if to.is_dir() else to
            known = pages.get(to)
            if not to.exists() or (
                known
                and parts.fragment
                and parts.fragment != "__top"
                and unquote(parts.fragment) not in known.anchors
            ):
                lost.append((path.relative_to(site).as_posix(), link))
    assert not lost


ATTRIBUTES = {"align", "style", "colspan", "rowspan"}
"""What a cell of a table may have; names in braces would become others, and be lost."""


class Cells(HTMLParser):
    """The number of the cells of tables, and their attributes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.number = 0
        self.attributes: set[str] = set()
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("td", "th"):
            self.number += 1
            self.attributes |= {name for name, _ in attrs}


def test_no_cell_loses_its_content_to_attributes(pages):
    cells = {path.parent.name: Cells(path) for path in pages}
    assert sum(page.number for page in cells.values()) > 500
    lost = {name: page.attributes - ATTRIBUTES for name, page in cells.items()}
    assert not {name: attributes for name, attributes in lost.items() if attributes}


@pytest.mark.parametrize("word", ["quantize", "quantise", "limitations", "license", "install"])
def test_words_of_readers_are_in_the_search(site, word):
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    assert [entry["location"] for entry in index["docs"] if word in entry["text"].lower()]


def test_the_page_of_the_callback_lists_all_arguments(site):
    from mrp_lightning.pruning.settings import Settings

    page = (site / "api-calibration" / "index.html").read_text("utf-8")
    text = unescape(re.sub("<[^>]*>", "", page))
    for name in inspect.signature(Settings).parameters:
        assert re.search(rf"\b{name}\b", text), name


def test_nothing_is_fetched_from_elsewhere(site, pages):
    """The site works without a network: scripts, styles, fonts and pictures are its own."""
    fetched = (
        r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*|<link[^>]*rel="stylesheet"[^>]*//'
    )
    assert not [path for path in pages if re.search(fetched, path.read_text("utf-8"))]


def test_every_public_name_has_an_entry(pages):
    anchors = {anchor for page in pages.values() for anchor in page.anchors}
    missing = []
    for package, module in NAMES.items():
        for name in module.__all__:
            thing = getattr(module, name)
            is_error = isinstance(thing, type) and issubclass(thing, BaseException)
            entry = f"{thing.__module__}.{name}" if is_error else f"{package}.{name}"
            missing += [] if entry in anchors else [entry]
    assert not missing


def test_the_api_lists_each_public_name_once(site):
    page = (site / "api" / "index.html").read_text("utf-8")
    listed = re.findall(r'href="\.\./api-[\w-]+/#[\w.]+"><code>(\w+)</code>', page)
    public = {name for module in NAMES.values() for name in module.__all__}
    errors = {name for name in public if name.endswith(("Error", "Warning"))}
    assert sorted(listed) == sorted(public - errors)


def questions() -> list[tuple[str, str]]:
    rows = re.findall(r"^\| (.+?) \| .+? \| \[.+?\]\((.+?)\) \|$", QUESTIONS, flags=re.M)
    return [(question, link) for question, link in rows if question != "question"]


QUESTIONS = (DOCS / "questions.md").read_text("utf-8")


def test_twenty_questions_are_two_clicks_or_one_search_away(site, pages):
    asked = questions()
    assert len(asked) >= 20
    assert len({link for _, link in asked}) > 15
    home, listed = pages[site / "index.html"], pages[site / "questions" / "index.html"]
    assert any(link.startswith("questions/") for link in home.links)
    for _, link in asked:
        page, _, anchor = link.partition("#")
        target = f"../{page.removesuffix('.md')}/" + (f"#{anchor}" if anchor else "")
        assert target in listed.links
    index = json.loads((site / "search" / "search_index.json").read_text("utf-8"))
    searched = unescape(re.sub("<[^>]*>", "", " ".join(entry["text"] for entry in index["docs"])))
    assert not [question for question, _ in asked if question.replace("`", "") not in searched]


def plain_runs(text: str) -> list[float]:
    """How many lines of a hundred letters stand between tables and pictures of a page."""
    runs, is_code = [0.0], False
    for line in re.sub(r"<details.*?</details>", "", text, flags=re.S).splitlines():
        if line.startswith("```"):
            is_code = not is_code
        if not is_code and line.startswith(("|", "![")):
            runs.append(0.0)
        elif line.startswith("#") and not is_code:
            runs[-1] += 2.5
        else:
            runs[-1] += 1 if is_code else len(line) / 100 if line.strip() else 0.6
    return runs


@pytest.mark.parametrize("page", sorted(p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")))
def test_no_page_is_long_without_a_picture_or_a_table(page):
    text = (DOCS / page).read_text("utf-8")
    parts = text.split("\n## ") if page == "api.md" else [text]  # as docs/api_pages.py cuts it
    assert max(run for part in parts for run in plain_runs(part)) < SCREENS * LINES
