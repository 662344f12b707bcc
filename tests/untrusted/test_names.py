"""Names and texts from elsewhere are shown as they are, and mean nothing to what shows them."""

import json
from html.parser import HTMLParser

import pytest

from mrp_lightning.errors import FormatError
from mrp_lightning.experiments.runs import find_runs
from mrp_lightning.records.model_card import in_markdown
from mrp_lightning.storage.json_files import read_json

NAME = "</td><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>$x_{\\foo$\x1b[31m"
LAYER = {
    **{"name": "model.layers.0.up", "shape": [16, 16], "method": "SM", "sparsity": 0.5},
    **{"loss": 1.0, "relative_loss": 0.1, "damping": 0.1, "iterations": 3, "gap": 1e-7},
    **{"seconds": 1.0, "tokens": 64, "dead_inputs": 0, "skipped": None},
}
TOTALS = {
    **{"layers": 1, "skipped": 0, "weights": 256, "removed": 128, "sparsity": 0.5},
    **{"relative_loss": 0.1, "seconds": 3.0, "complete": True},
}
SCORES = {"perplexity": 5.0, "context": 10, "windows": 3, "tokens": 30}


class Tags(HTMLParser):
    """The tags of a page, and its text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts, self.handlers, self.text = 0, 0, ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.scripts += tag == "script"
        self.handlers += any(name.startswith("on") for name, _ in attrs)

    def handle_data(self, data):
        self.text += data


def test_a_page_runs_nothing(tmp_path):
    pytest.importorskip("jinja2", reason="needs the extra `report`")
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    from mrp_lightning.experiments.page import make_page

    directory = tmp_path / "runs" / NAME.replace("/", "_")
    directory.mkdir(parents=True)
    skipped = LAYER | {"name": NAME, "skipped": NAME, "sparsity": None, "relative_loss": None}
    report = {
        **{"format_version": 1, "layers": [LAYER | {"name": f"model.layers.0.{NAME}"}, skipped]},
        **{"totals": TOTALS, "versions": {NAME: NAME}},
        "config": {"method": "SM", "pattern": "2:4", "sparsity": None, NAME: NAME},
    }
    evaluation = {
        **{"format_version": 1, "perplexity": {NAME: SCORES}, "zeroshot": {NAME: {NAME: 0.5}}},
        "model": NAME,
        "versions": {NAME: NAME},
    }
    (directory / "pruning_report.json").write_text(json.dumps(report))
    (directory / "evaluation.json").write_text(json.dumps(evaluation))
    page = Tags(make_page(find_runs(tmp_path / "runs"), NAME, NAME, command=NAME))
    assert page.scripts == page.handlers == 0
    assert page.text.count("<script>alert(1)</script>") > 10


def test_a_card_gets_no_markup_from_a_name():
    name = "a|b\n## Heading\n![x](http://x) <script>alert(1)</script> `code`"
    assert in_markdown(name) == (
        "a\\|b ## Heading \\!\\[x\\](http://x) &lt;script&gt;alert(1)&lt;/script&gt; \\`code\\`"
    )


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, '{"a": NaN}', '{"a": 1e999}', '{"a": 1%s}' % ("0" * 400), '{"a": "\\ud800"}'],
    ids=["deep", "nan", "infinite", "beyond floats", "half a pair"],
)
def test_what_json_files_cannot_hold(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(FormatError, match=r"a\.json is not JSON .* Delete it, or prune again"):
        read_json(tmp_path / "a.json", "prune again")


def test_a_report_without_layers_has_a_page(tmp_path):
    pytest.importorskip("jinja2", reason="needs the extra `report`")
    pytest.importorskip("matplotlib", reason="needs the extra `report`")
    from mrp_lightning.experiments.page import make_page

    for name in ("none", "9" * 5000):
        directory = tmp_path / name[:9] / "run"
        directory.mkdir(parents=True)
        layers = [] if name == "none" else [LAYER | {"name": f"a.{name}.b"}]
        report = {"format_version": 1, "layers": layers, "totals": TOTALS, "versions": {}}
        report["config"] = {"method": "SM", "pattern": "2:4", "sparsity": None}
        (directory / "pruning_report.json").write_text(json.dumps(report))
        assert "Pruning report" in make_page(find_runs(directory), "x")
