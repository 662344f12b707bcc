"""A hook of mkdocs: each section of api.md becomes a page, and api.md their table of contents.

The API is written in one file, in the order in which data flows. One page of all its names would be
too long to read.
"""

import re
from typing import NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

SOURCE = "api.md"


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


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Replace api.md by its introduction and a table, and add a page for each section."""
    source = files.get_file_from_path(SOURCE)
    if source is None:
        raise FileNotFoundError(f"docs/{SOURCE} is missing: the pages of the API are cut from it.")
    introduction, *parts = re.split(r"^## ", source.content_string, flags=re.M)
    sections = [Section(*part.split("\n", 1)) for part in parts]
    table = ["| page | content |", "| --- | --- |", *(section.row for section in sections)]
    source.content_string = introduction + "\n".join(table) + "\n"
    for section in sections:
        files.append(File.generated(config, section.page, content=section.content))
