"""The journal by itself: what it keeps, what it refuses, and what it makes again."""

import hashlib
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from slow_pruning import Dying, Killed, prune_model

from mrp_lightning.calibration import walk_choice
from mrp_lightning.errors import FormatError, JournalError, SaveError
from mrp_lightning.journal.journal import Journal, journal_path
from mrp_lightning.journal.manifest import differences
from mrp_lightning.records.block_result import BlockResult, LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.storage.outputs import save_directory

PRINT = {"method": "SM", "sparsity": 0.5}
ROW = LayerReport(name="a", shape=(2, 4), loss=0.1, relative_loss=float("nan"), seconds=1 / 3)


@pytest.mark.parametrize(
    ("family", "rerun", "target"),
    [
        *(("llama", True, "dense"), ("mixtral", False, "dense"), ("bart", False, "own")),
    ],
)
@torch.no_grad()
def test_any_walk_goes_on_with_the_same_bits(
    family, rerun, target, build, batches, tmp_path, monkeypatch
):
    if rerun:
        monkeypatch.setattr(walk_choice, "SELF_TEST_TOLERANCE", -1.0)
    if family == "bart":
        for batch in batches:
            batch["decoder_input_ids"] = batch["input_ids"].flip(0)
    options = {"beyond": {"target": target}, "method": "SS"}
    whole, resumed = build(family), build(family)
    expected = prune_model(whole, batches, **options)
    assert expected.config["walk"] == ("rerun" if rerun else "inject")
    with pytest.raises(Killed), Dying.open(tmp_path / "out", PRINT) as journal:
        prune_model(build(family), batches, journal=journal, **options)
    with Journal.open(tmp_path / "out", PRINT) as journal:
        report = prune_model(resumed, batches, journal=journal, **options)
    assert report.resumed_blocks == 2
    assert [row.name for row in report.layers] == [row.name for row in expected.layers]
    assert [row.loss for row in report.layers] == [row.loss for row in expected.layers]
    for (name, a), b in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.fixture
def three(tmp_path):
    """A journal of three blocks, closed."""
    with Journal.open(tmp_path / "out", PRINT) as journal:
        for step in range(3):
            journal.write(step, result_of(step))
    return journal_path(tmp_path / "out")


def result_of(step, scale=1.0):
    weights = {"a.weight": torch.arange(8.0).view(2, 4) * scale + step}
    return BlockResult(f"block.{step}", (LayerResult(ROW),), None, weights)


def test_keeps_every_bit(tmp_path):
    weights = {
        "a.weight": torch.tensor([[float("nan"), -0.0], [1e-45, 3.0]]),
        "b.weight": torch.randn(3, 4).to(torch.bfloat16).T,  # strided
        "c.weight": torch.randn(2, 3, 4, dtype=torch.float64)[1],  # part of a larger one
    }
    with Journal.open(tmp_path / "out", PRINT) as journal:
        journal.write(4, BlockResult("block.4", (LayerResult(ROW),), None, weights))
    with Journal.open(tmp_path / "out", PRINT) as journal:
        assert journal.read(3) is None
        found = journal.read(4)
    assert found.name == "block.4"
    assert repr(found.rows) == repr([ROW])
    assert found.weights.keys() == weights.keys()
    for name, weight in weights.items():
        kept = found.weights[name]
        assert kept.dtype is weight.dtype
        assert torch.equal(kept.view(torch.uint8), weight.contiguous().view(torch.uint8))


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place % len(data)] ^= 16
    path.write_bytes(data)


DAMAGES = {
    "flipped": lambda path: flip(path, -3),
    "header": lambda path: flip(path, 2),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "empty": lambda path: path.write_bytes(b""),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_shard_is_made_again(damage, three, tmp_path, caplog):
    damage(three / "block-00001.safetensors")
    with Journal.open(tmp_path / "out", PRINT) as journal:
        assert "block-00001.safetensors is damaged" in caplog.text
        assert [step in journal for step in range(4)] == [True, False, True, False]
        assert journal.read(1) is None
        journal.write(1, result_of(1))  # with the same bits: what follows stays
        assert [step in journal for step in range(4)] == [True, True, True, False]
        assert journal.read(1).weights["a.weight"][0, 1] == 2.0


def test_what_follows_a_block_that_came_out_otherwise_is_made_again(three, tmp_path, caplog):
    (three / "block-00001.safetensors").unlink()
    with Journal.open(tmp_path / "out", PRINT) as journal:
        journal.write(1, result_of(1, scale=2.0))
        assert [step in journal for step in range(3)] == [True, True, False]
        assert "pruned again" in caplog.messages[-1]
    with Journal.open(tmp_path / "out", PRINT) as journal:
        assert [step in journal for step in range(3)] == [True, True, False]


@pytest.mark.parametrize("text", [None, "", "[" * 5000, '{"name": 1}', '{"name": "a"'])
def test_a_result_that_is_no_json_is_refused_in_words(text, tmp_path):
    """Of a whole file without a checksum, as `report` reads those of an unfinished run."""
    file = tmp_path / "block-00000.safetensors"
    save_file({"weight": torch.ones(1)}, file, None if text is None else {"record": text})
    with pytest.raises(FormatError, match=r"block-00000.*is not as mrp-lightning writes it"):
        BlockResult.load(file)


@pytest.mark.parametrize("place", [20, 200, -3])
def test_a_damaged_manifest_is_refused(place, three, tmp_path):
    flip(three / "manifest.json", place)
    with pytest.raises(JournalError, match=r"manifest\.json is .*(?i:set `resume: false`)"):
        Journal.open(tmp_path / "out", PRINT)
    with Journal.open(tmp_path / "out", PRINT, resume=False) as journal:
        assert 0 not in journal


def test_a_manifest_that_lacks_a_key_is_refused_in_words(three, tmp_path):
    """Its checksum is right, as where another program wrote it."""
    content = json.loads((three / "manifest.json").read_text())
    del content["sha256"], content["shards"]["1"]["weights"], content["seconds"]
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (three / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(JournalError) as caught:
        Journal.open(tmp_path / "out", PRINT)
    assert "`seconds` is missing" in str(caught.value)
    assert "`shards.1.weights` is missing" in str(caught.value)
    assert "set `resume: false`" in str(caught.value).casefold()
    (three / "manifest.json").write_text(json.dumps(content | {"format_version": 7}))
    with pytest.raises(JournalError, match="`format_version` is 7, but this version.* reads 1"):
        Journal.open(tmp_path / "out", PRINT)


def test_a_shard_with_other_layers_is_refused():
    result = BlockResult("0", (LayerResult(ROW),))
    with pytest.raises(JournalError, match="pruned layers that the block `0` does not have: a"):
        result.restore([], lambda layer: None)


def test_names_all_differences():
    before = {"method": "SM", "weights": "sha256:12", "gone": 1, "same": None}
    now = {"method": "SS", "weights": "sha256:34", "new": [2], "same": None}
    assert differences(before, now) == [
        '`method` was "SM", is "SS"',
        "`weights` differ",
        "`gone` was 1, is null",
        "`new` was null, is [2]",
    ]
    before = {"method": "SM", "offload": False, "callbacks.0.resume": True}
    now = {"method": "SM", "offload": True, "callbacks.0.resume": False, "bits": None}
    assert differences(before, now) == []


def test_one_process_at_a_time(tmp_path):
    with Journal.open(tmp_path / "out", PRINT):
        for resume in (True, False):
            with pytest.raises(JournalError, match="Another process"):
                Journal.open(tmp_path / "out", PRINT, resume=resume)
    first = Journal.open(tmp_path / "out", PRINT)
    first.close()
    with Journal.open(tmp_path / "out", PRINT):
        first.remove()
        assert (journal_path(tmp_path / "out") / "manifest.json").is_file()
    first.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_block_that_cannot_be_kept_says_so(three, tmp_path, monkeypatch):
    with Journal.open(tmp_path / "out", PRINT) as journal:
        (three / "block-00003.safetensors.partial").mkdir()  # in the way
        with pytest.raises(SaveError, match=r"block\.3 is pruned, but could not be kept.*goes on"):
            journal.write(3, result_of(3))
        assert 3 not in journal
    (three / "block-00003.safetensors.partial").rmdir()
    with Journal.open(tmp_path / "out", PRINT) as journal:
        assert [step in journal for step in range(4)] == [True, True, True, False]


def test_the_journal_of_a_similar_name_is_left_alone(tmp_path):
    Journal.open(tmp_path / "opt-1.3b", PRINT).close()
    with save_directory(tmp_path / "opt-1"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [".opt-1.3b.partial", "opt-1"]


@torch.no_grad()
def test_blocks_after_one_that_came_out_otherwise_see_what_it_gives(build, batches, tmp_path):
    options = {"beyond": {"target": "dense"}, "method": "SS"}
    whole, resumed = build("llama"), build("llama")
    prune_model(whole, batches, **options)
    with Journal.open(tmp_path / "out", PRINT) as journal:
        prune_model(build("llama"), batches, journal=journal, **options)
        before = journal.manifest.shards[1]
        journal.manifest.shards[1] = replace(before, weights="sha256:of another machine")
        journal.manifest.save(journal.path)
        (journal.path / before.file).unlink()
    with Journal.open(tmp_path / "out", PRINT) as journal:
        report = prune_model(resumed, batches, journal=journal, **options)
    assert report.resumed_blocks == 1
    for (name, a), b in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("resume", [True, False])
def test_files_of_others_in_the_journal_stay(resume, three, tmp_path, caplog):
    """Names that are no journal's; and the target of a link."""
    (three / "block-notes.safetensors").write_text("mine")
    (three / "block-00005.safetensors.partial").touch()
    (three / ".tmpAb3xYz").touch()  # as safetensors leaves it when it is killed
    (tmp_path / "precious").write_text("mine")
    (three / "block-00004.safetensors").symlink_to(tmp_path / "precious")
    with Journal.open(tmp_path / "out", PRINT, resume=resume) as journal:
        assert len(journal.manifest.shards) == (3 if resume else 0)
        journal.write(4, result_of(4))
        journal.remove()
    assert (tmp_path / "precious").read_text() == "mine"
    assert [x.name for x in three.iterdir() if x.name != ".lock"] == ["block-notes.safetensors"]
    assert "block-notes.safetensors is not ours, and stays in" in caplog.text


def test_a_block_whose_manifest_was_not_written_is_ours(three, tmp_path):
    (three / "manifest.json").unlink()
    with Journal.open(tmp_path / "out", PRINT) as journal:
        assert not journal.manifest.shards
    assert not list(three.glob("block-*"))


def test_values_are_computed_once_and_kept_to_the_bit(tmp_path):
    value = {"a": torch.tensor(1 / 3, dtype=torch.float64), "b": torch.randn(4, 6).T}
    with Journal.open(tmp_path / "out", PRINT) as journal:
        assert journal.kept("survey", lambda: value) is value
    with Journal.open(tmp_path / "out", PRINT) as journal:
        kept = journal.kept("survey", pytest.fail)
        assert journal.kept("other", dict) == {}
        assert journal.kept("other", pytest.fail) == {}
        journal.remove()
    assert kept.keys() == value.keys()
    assert all(
        torch.equal(kept[name], x) and kept[name].dtype is x.dtype for name, x in value.items()
    )
    assert list(tmp_path.iterdir()) == []
