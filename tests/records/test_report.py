import json
import os
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrp_lightning.errors import FormatError
from mrp_lightning.records.report import BlockReport, LayerReport, PruningReport

numbers = st.none() | st.floats(0, 1e30)
counts = st.none() | st.integers(0, 2**53)
sizes = st.tuples(st.integers(1, 9), st.integers(1, 9))
KINDS = {
    "name": st.text(),
    "shape": sizes,
    "sparsity": st.none() | st.floats(0, 1),
    "method": st.none() | st.text(),
    **dict.fromkeys(
        ("skipped", "own_target", "fallback_mask", "block"), st.none() | st.text(min_size=1)
    ),
    "already_pruned": st.booleans(),
    **dict.fromkeys(
        ("iterations", "tokens", "dead_inputs", "peak_memory", "swaps", "bits"), counts
    ),
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


@settings(deadline=None)
@given(report=reports)
def test_what_is_saved_is_loaded(report, directory):
    if any(row.block for row in report.layers):
        report.blocks = [replace(row, name=report.layers[0].block or "") for row in report.blocks]
        report.layers = [replace(row, block=report.layers[0].block or "") for row in report.layers]
    path = report.save(directory)
    loaded = PruningReport.load(path)
    assert loaded == report
    assert loaded.totals == report.totals
    assert loaded.to_dict() == json.loads(path.read_text())


def stored(**layer):
    """The content of a report as the first version wrote it."""
    return {
        "format_version": 1,
        "layers": [{"name": "blocks.0.up", "shape": [4, 8], **layer}],
        "totals": {
            "layers": 1,
            "skipped": 0,
            "weights": 32,
            "removed": 16,
            "sparsity": 0.5,
            "relative_loss": 0.25,
            "seconds": 3,
        },
        "versions": {"torch": "2.11.0"},
        "config": {"method": "SM", "sparsity": 0.5, "of_an_older_version": [1, "a"]},
    }


def load(content, directory):
    path = directory / "pruning_report.json"
    path.write_text(json.dumps(content))
    return PruningReport.load(path)


def test_an_older_report_is_read_as_it_is_stored(tmp_path):
    content = stored(loss=2, of_an_older_version=True)
    report = load(content, tmp_path)
    assert report.layers == [LayerReport(name="blocks.0.up", shape=(4, 8), loss=2)]
    assert (report.seconds, report.complete) == (3, False)
    for section in ("totals", "versions", "config"):
        assert getattr(report, section) == content[section]


def test_all_problems_of_a_damaged_report_are_listed(tmp_path):
    content = stored(loss="big", tokens=True, iterations=1.5, skipped=3, already_pruned=None)
    content["layers"] += [7, {"shape": [3]}, {"name": "a", "shape": [0.5, 2]}]
    content["layers"] += [{"name": "b", "shape": [3]}, {"name": "c", "shape": [2, 0]}]
    content["totals"] |= {"seconds": "long", "complete": 1, "cpu_seconds": "long"}
    del content["totals"]["weights"], content["config"]["method"]
    content["blocks"] = [{"name": "blocks.0", "epoch": "last"}, 3]
    content["versions"]["cuda"] = 12.8
    with pytest.raises(FormatError) as caught:
        load(content, tmp_path)
    first, *listed = str(caught.value).splitlines()
    assert first.startswith(f"{tmp_path / 'pruning_report.json'} is not as mrp-lightning writes it")
    assert first.endswith("Delete it, or prune again.")
    assert sorted(line.strip() for line in listed) == sorted(
        [
            "`config.method` is missing",
            "`totals.weights` is missing",
            "`totals.seconds` is 'long', expected a valid number",
            "`totals.cpu_seconds` is 'long', expected a valid number",
            "`totals.complete` is 1, expected a valid boolean",
            "`versions.cuda` is 12.8, expected a valid string",
            "`layers[0].loss` is 'big', expected a valid number",
            "`layers[0].tokens` is True, expected a valid integer",
            "`layers[0].iterations` is 1.5, expected a valid integer",
            "`layers[0].skipped` is 3, expected a valid string",
            "`layers[0].already_pruned` is None, expected a valid boolean",
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


def test_rows_leave_out_what_they_have_nothing_to_say_of():
    row = LayerReport(name="a", shape=(2, 4)).to_dict()
    assert list(row) == [f.name for f in fields(LayerReport)][:13]
    assert row["shape"] == [2, 4]
    assert BlockReport(name="a", epoch=0).to_dict() == {"name": "a", "epoch": 0}


@pytest.mark.parametrize("text", ["{", "\udcff", "[]", '{"format_version": 2}'])
def test_what_is_no_report_of_this_format_is_refused(tmp_path, text):
    path = tmp_path / "pruning_report.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(FormatError, match=r"pruning_report.json( is not JSON|: `format_version`)"):
        PruningReport.load(path)


def test_a_report_that_is_not_there_is_said_to_be_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="pruning_report.json"):
        PruningReport.load(tmp_path / "pruning_report.json")


def test_blocks_that_no_layer_is_in_are_refused(directory):
    rows = [LayerReport(name="m.0.up", shape=(2, 4), block="m.0")]
    config = {"method": "SM", "pattern": "2:4"}
    for name in ("m.0", "x"):
        path = PruningReport(config, rows, blocks=[BlockReport(name=name)]).save(directory)
        if name == "m.0":
            assert PruningReport.load(path).blocks[0].name == name
    with pytest.raises(FormatError, match=r"`blocks` names blocks that no layer is in: 'x'"):
        PruningReport.load(path)


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
