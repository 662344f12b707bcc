"""Names of files, models and layers reach the terminal as they are, whatever rich would read."""

import ast
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from rich.table import Table

from mrp_lightning.loop.progress import ProgressReporter
from mrp_lightning.terminal import Console

ROOT = Path(__file__).parents[2]
PACKAGES = ("mrp_lightning", "mrp_sparse", "mrp_ground", "callbacks", "export")

TAKE_STRINGS_AS_THE_CONSOLE_DOES = {
    "rich.table.Table",
    "rich.markdown.Markdown",
    "rich.markup.escape",
    *(f"rich.progress.{name}" for name in ("Progress", "TextColumn", "BarColumn")),
    *(f"rich.progress.{name}" for name in ("MofNCompleteColumn", "TimeRemainingColumn")),
}
"""Names of rich that may be imported. Others, such as `Panel` and `print`, read markup."""
SWITCHES = {"markup", "emoji", "highlight"}


def ways_around(path: Path) -> Iterator[str]:
    """Lines of a file that could print a string as markup."""
    source, is_console = path.read_text(), path.name == "terminal.py"
    if not re.search("rich|markup|emoji|highlight", source):
        return  # parsing all files takes seconds
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call):
            given = {word.arg: ast.unparse(word.value) for word in node.keywords}
            called = ast.unparse(node.func)
            if any(given.get(name, "False") != "False" for name in SWITCHES):
                yield f"{path.name}:{node.lineno}: {called} reads markup"
            if called.endswith("TextColumn") and given.get("markup") != "False":
                yield f"{path.name}:{node.lineno}: {called} reads markup by default"
            if called == "Progress" and "console" not in given:
                yield f"{path.name}:{node.lineno}: {called} makes a console of its own"
            if called == "rich.add_task" or (called == "rich.update" and "description" in given):
                text = given.get("description") or ast.unparse(node.args[0])
                if not text.startswith("escape("):
                    yield f"{path.name}:{node.lineno}: the bar is Lightning's, which reads markup"
        for name in names:
            is_rich = name == "rich" or name.startswith("rich.")
            if is_rich and not is_console and name not in TAKE_STRINGS_AS_THE_CONSOLE_DOES:
                yield f"{path.name}:{node.lineno}: imports {name}"


def test_nothing_prints_past_the_console():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    assert not [line for path in files for line in ways_around(path)]


@pytest.mark.parametrize(
    "line",
    [
        "from rich.console import Console",
        "from rich import print",
        "import rich",
        "from rich.panel import Panel",
        "console.print(name, markup=True)",
        "console.print(name, highlight=is_on)",
        "from rich.progress import TextColumn\nTextColumn('{task.description}')",
        "from rich.progress import Progress\nProgress(column)",
        "rich.add_task(name, total=3)",
        "rich.update(task, description=text)",
    ],
)
def test_a_way_around_would_be_noticed(line, tmp_path):
    path = tmp_path / "module.py"
    path.write_text(line)
    assert [*ways_around(path)]


@pytest.mark.parametrize(
    "name", ["résultat [x] %d", "b[/r] x", "[bold]a[/]", ":smile: 12", "a\\[b"]
)
def test_names_are_printed_as_they_are(name):
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    stream = io.StringIO()
    console = Console(file=stream, width=80)
    console.print(name)
    console.print(table)
    assert stream.getvalue().count(name) == 4


def test_lightnings_bar_shows_the_name_of_a_layer_as_it_is(capsys):
    bar = RichProgressBar()
    trainer = Trainer(accelerator="cpu", logger=False, callbacks=[bar])
    bar.on_predict_start(trainer, LightningModule())
    reporter = ProgressReporter(trainer)
    with reporter.bar(2, "pruning [x]"):
        bar.progress.refresh()
        reporter.show(1, "experts[/0]")
        bar.progress.refresh()
    bar.teardown(trainer, LightningModule(), "predict")
    assert "experts[/0]" in capsys.readouterr().out
