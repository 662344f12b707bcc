"""A hook of mkdocs: the README as the first page, pages of the API, and of the measurements.

The API is written in one file, in the order in which data flows. One page of all its names would be
too long to read: each section of api.md becomes a page, and api.md their table of contents.
"""

import re
from pathlib import Path
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

SOURCE = "api.md"
ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "lab/results"


class Section(NamedTuple):
    """A section of api.md.

    Attributes:
        title: Its heading.
        text: Everything below the heading.
    """

    title: str
    text: str

    @property
    def page(self) -> str:
        """The name of its page, next to api.md, so that relative links remain valid."""
        words = re.findall(r"\w+", self.title.lower())
        return f"api-{'-'.join(words)}.md"

    @property
    def content(self) -> str:
        """The Markdown of its page, with each heading one level higher."""
        raised = re.sub(r"^#(?=#)", "", self.text, flags=re.M)
        return f"# {self.title}\n{raised}"

    @property
    def row(self) -> str:
        """Its row in the table of contents: the page; its first paragraph and public names."""
        summary = " ".join(self.text.strip().partition("\n\n")[0].split())
        names = re.findall(r"^::: (\w+(?:\.callbacks)?\.(\w+))$", self.text, flags=re.M)
        links = ", ".join(f"[`{name}`][{path}]" for path, name in names if name != "errors")
        return f"| [{self.title}]({self.page}) | {'<br>'.join(filter(None, (summary, links)))} |"


def first_page() -> str:
    """Return the README with links within the site; files that are not in it have none."""
    text = (ROOT / "README.md").read_text("utf-8")
    text = text.replace("](docs/", "](").replace("](lab/results/", "](results/")
    return re.sub(r"(?<!!)\[([^]]+)\]\([A-Z]+\.md\)", r"\1", text)


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the first page, those of measurements and of api.md's sections; list these in api.md."""
    files.append(File.generated(config, "index.md", content=first_page()))
    for path in RESULTS.rglob("*.*"):
        page = Path("results", path.relative_to(RESULTS)).as_posix()
        if path.suffix == ".md":
            content = path.read_text("utf-8").replace("](../../docs/", "](../")
            # Of HTML within Markdown, mkdocs leaves the addresses as they are.
            content = re.sub(r'(src|srcset)="(?=[\w-]+\.svg")', r'\1="../', content)
            files.append(File.generated(config, page, content=content))
        elif path.suffix in (".csv", ".svg"):
            files.append(File.generated(config, page, abs_src_path=str(path)))
    source = files.get_file_from_path(SOURCE)
    if source is None:
        raise FileNotFoundError(f"docs/{SOURCE} is missing: the pages of the API are cut from it.")
    introduction, *parts = re.split(r"^## ", source.content_string, flags=re.M)
    sections = [Section(*part.split("\n", 1)) for part in parts]
    table = ["| page | content |", "| --- | --- |", *(section.row for section in sections)]
    source.content_string = introduction + "\n".join(table) + "\n"
    for section in sections:
        files.append(File.generated(config, section.page, content=section.content))


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Link the names of measurements, which are files of the repository, to their pages."""
    up = "../" * page.file.src_uri.count("/")

    def link(name: re.Match[str]) -> str:
        return f"[{name[0]}]({up}results/{name[1]}.md)"

    return re.sub(r"(?<!\[)`lab/results/([\w-]+)\.md`", link, markdown)
