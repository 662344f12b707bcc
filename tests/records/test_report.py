import json
import os
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mrp_lightning.errors import FormatError
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import (
    BlockReport,
    GridReport,
    LayerReport,
    TargetReport,
    ZerosReport,
)

numbers = st.none() | st.floats(0, 1e30)
counts = st.none() | st.integers(0, 2**53)
sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
KINDS = {
    "name": st.text(),
    "shape": sizes,
    "sparsity": st.none() | st.floats(0, 1),
    "method": st.none() | st.text(),
    **dict.fromkeys(("skipped", "fallback_mask", "block"), st.none() | st.text(min_size=1)),
    **dict.fromkeys(("iterations", "tokens", "dead_inputs", "peak_memory"), counts),
    "grid": st.none() | st.builds(GridReport, bits=st.integers(1, 8), grid_loss=numbers),
    "target": st.none() | st.builds(TargetReport, loss=numbers, own=st.none() | st.text()),
    "zeros": st.none() | st.builds(ZerosReport, before=st.floats(0, 1), had_pattern=st.booleans()),
}
rows = st.builds(LayerReport, **{f.name: KINDS.get(f.name, numbers) for f in fields(LayerReport)})
config = st.fixed_dictionaries(
    {"method": st.text(), "sparsity": st.none(), "pattern": st.just("2:4")},
    optional={"targets": st.none() | st.lists(st.text()), "walk": st.text()},
)
reports = st.builds(
    PruningReport,
    config=config,
    layers=st.lists(rows, max_size=4),
    seconds=st.floats(0, 1e9),
    cpu_seconds=st.none() | st.floats(0, 1e9),
    peak_rss=counts,
    complete=st.booleans(),
    versions=st.dictionaries(st.text(), st.text()),
    blocks=st.lists(
        st.builds(BlockReport, name=st.text(), sparsity=numbers, epoch=counts, error_after=numbers),
        max_size=2,
    ),
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@given(report=reports)
def test_what_is_saved_is_loaded(report, directory):
    report.layers = [replace(row, block="m.0") for row in report.layers]
    report.blocks = [replace(row, name="m.0") for row in report.blocks if report.layers]
    path = report.save(directory)
    loaded = PruningReport.load(path)
    assert loaded == report
    assert loaded.totals == report.totals
    assert loaded.to_dict() == json.loads(path.read_text())


def stored(**layer):
    """The least content of a report."""
    return {
        "format_version": 1,
        "layers": [{"name": "blocks.0.up", "shape": [4, 8], **layer}],
        "totals": {
            "seconds": 3,
            "complete": False,
        },
        "versions": {"torch": "2.11.0"},
        "config": {"method": "SM", "sparsity": 0.5, "walk": "inject"},
    }


def load(content, directory):
    path = directory / "pruning_report.json"
    path.write_text(json.dumps(content))
    return PruningReport.load(path)


def test_a_report_is_read_as_it_is_stored(tmp_path):
    content = stored(loss=2, relative_loss=0.25, sparsity=0.5, grid={"bits": 4})
    report = load(content, tmp_path)
    (row,) = report.layers
    assert (row.name, row.shape, row.loss, row.grid.bits) == ("blocks.0.up", (4, 8), 2, 4)
    assert (report.seconds, report.complete) == (3, False)
    assert (report.versions, report.config) == (content["versions"], content["config"])
    totals = report.totals
    assert (totals["layers"], totals["weights"], totals["removed"]) == (1, 32, 16)
    assert (totals["sparsity"], totals["relative_loss"]) == (0.5, 0.25)


@pytest.mark.parametrize("section", ["layers", "totals", "versions", "config"])
def test_a_report_without_a_section_is_refused(section, tmp_path):
    content = stored()
    del content[section]
    with pytest.raises(FormatError, match=f"lacks `{section}`. Delete it, or prune again"):
        load(content, tmp_path)


def test_all_problems_of_a_damaged_report_are_listed(tmp_path):
    content = stored(loss="big", tokens=True, iterations=1.5, skipped=3, zeros=7)
    content["layers"] += [7, {"shape": [3]}, {"name": "a", "shape": [0.5, 2]}]
    content["layers"] += [{"name": "b", "shape": [3]}, {"name": "c", "shape": [2, 0]}]
    content["totals"] |= {"seconds": "long", "complete": 1, "cpu_seconds": "long"}
    del content["config"]["method"]
    content["blocks"] = [{"name": "blocks.0", "epoch": "last"}, 3]
    content["versions"]["cuda"] = 12.8
    with pytest.raises(FormatError) as caught:
        load(content, tmp_path)
    first, *listed = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path / 'pruning_report.json'} is not as mrp-lightning writes it")
    assert first.endswith("Delete it, or prune again.")
    assert sorted(line.strip() for line in listed) == sorted(
        [
            "`config`: `method` is missing, or is no string",
            "`seconds` is 'long', expected a valid number",
            "`cpu_seconds` is 'long', expected a valid number",
            "`complete` is 1, expected a valid boolean",
            "`versions.cuda` is 12.8, expected a valid string",
            "`layers[0].loss` is 'big', expected a valid number",
            "`layers[0].tokens` is True, expected a valid integer",
            "`layers[0].iterations` is 1.5, expected a valid integer",
            "`layers[0].skipped` is 3, expected a valid string",
            "`layers[0].zeros` is 7, expected an object",
            "`layers[1]` is 7, expected an object",
            "`layers[2].name` is missing",
            "`layers[3].shape[0]` is 0.5, expected a valid integer",
            "`layers[4]`: the `shape` of b is [3], expected (rows, columns)",
            "`layers[5]`: the `shape` of c is [2, 0], expected (rows, columns)",
            "`blocks[0].epoch` is 'last', expected a valid integer",
            "`blocks[1]` is 3, expected an object",
        ]
    )


def test_a_pattern_that_does_not_exist_is_a_problem(tmp_path):
    content = stored()
    content["config"] = {"method": "SM", "pattern": "2"}
    with pytest.raises(FormatError, match="`config`: `pattern` must be a string such as"):
        load(content, tmp_path)


def test_a_row_has_the_keys_that_readers_rely_on():
    grid = GridReport(bits=4)
    row = LayerReport(name="a", shape=(2, 4), grid=grid).to_dict()
    fixed = "name shape method sparsity loss relative_loss damping iterations gap seconds tokens"
    assert list(row)[:13] == [*fixed.split(), "dead_inputs", "skipped"]
    assert row["shape"] == [2, 4]
    assert row["grid"] == {"bits": 4, "zeros_loss": None, "grid_loss": None}


@pytest.mark.parametrize("text", ["{", "\udcff", "[]", '{"format_version": 2}'])
def test_what_is_no_report_of_this_format_is_refused(tmp_path, text):
    path = tmp_path / "pruning_report.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FormatError, match=r"pruning_report.json( is not JSON|: `format_version`)"):
        PruningReport.load(path)


def test_a_report_that_is_not_there_is_said_to_be_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="pruning_report.json"):
        PruningReport.load(tmp_path / "pruning_report.json")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pruning_report.json")
    with pytest.raises(FormatError, match=r"pruning_report\.json is no file\. Move it away"):
        PruningReport.load(tmp_path / "pruning_report.json")


def test_it_is_shown_as_a_table():
    rows = [
        LayerReport(
            name=f"model.layers.{i}.self_attn.q_proj",
            shape=(8192, 28672),
            method="SM",
            sparsity=0.5,
            loss=0.1,
            relative_loss=0.00111 * i,
            seconds=1.25,
        )
        for i in (79, 80)
    ]
    rows += [
        LayerReport.left_dense(f"model.layers.{i}.fused", (100, 32), "not supported yet")
        for i in range(2)
    ]
    report = PruningReport({"method": "SM", "pattern": "2:4"}, rows, seconds=3.0)
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.split("│")] for line in lines if "│" in line]
    assert cells == [
        ["model.layers.79.self_attn.q_proj", "8192 × 28672", "50.0%", "0.0877", "1.2"],
        ["model.layers.80.self_attn.q_proj", "8192 × 28672", "50.0%", "0.0888", "1.2"],
        ["2 layers", "469,762,048", "50.0%", "0.0882", "3.0"],
    ]
    assert lines[-2:] == ["Left dense:", "  model.layers.*.fused (2 layers): not supported yet"]
