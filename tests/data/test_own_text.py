"""A model writes its own calibration text in a trainer, once for a run and its resumptions."""

import shutil
from dataclasses import replace

import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file
from special_tokens import tokenizer_with

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.commands.lightning_cli import PruningCLI
from mrp_lightning.data import data_module, own_text
from mrp_lightning.data.sampling import Sampling, write
from mrp_lightning.errors import DataError, OptionError, TargetError
from mrp_lightning.records.block_result import BlockResult
from mrp_lightning.text.windows import Cutter

HALVES = "self: 0.5, stdlib: 0.5"


def data(**options) -> TextDataModule:
    defaults = {"calibration": "self", "num_samples": 5, "sequence_length": 24, "batch_size": 2}
    return TextDataModule(**{**defaults, **options})


def pruned(tiny_llama, save_dir=None, resume=True, **options):
    callback = MRPCallback(pattern="2:4", save_dir=save_dir, resume=resume)
    Trainer(**QUIET).predict(CausalLM(tiny_llama), datamodule=data(**options), callbacks=[callback])
    return callback.report


@pytest.fixture
def written(monkeypatch):
    """The batches of windows that are written."""
    batches = []

    def counted(model, sampling, windows, tell):
        batches.append(windows)
        return write(model, sampling, windows, tell)

    monkeypatch.setattr(own_text, "write", counted)
    return batches


def test_the_time_and_the_memory_of_writing_are_known_before(tiny_llama, monkeypatch, written):
    monkeypatch.setattr(own_text, "windows_at_once", lambda *_: 3)
    clock = iter([10.0, 17.0, 17.5])  # the first token waits for what is made once
    monkeypatch.setattr(own_text.time, "perf_counter", lambda: next(clock))
    module = CausalLM(tiny_llama)
    found = own_text.estimate_writing(module.model, Cutter(module.tokenizer, 24), 0, 8)
    assert found.seconds == 3 * 24 * 0.5  # in batches of 3, 3 and 2
    keys_and_values = 2 * 2 * 2 * 8 * 24 * 4  # … of blocks, heads, their size, tokens and bytes
    assert found.num_bytes == 3 * (keys_and_values + 6 * 2048 * 4)
    assert written == [range(3)]
    assert next(clock, None) is None


@pytest.fixture(scope="module")
def journal(tiny_llama, tmp_path_factory):
    """The journal of a run that ended before its first block was stored."""

    def stop(*_):
        raise ZeroDivisionError

    directory = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(BlockResult, "save", stop)
        pruned(tiny_llama, directory / "a")
    return directory / ".a.partial"


@pytest.fixture
def interrupted(journal, tmp_path):
    return shutil.copytree(journal, tmp_path / journal.name)


@pytest.fixture(scope="module")
def whole(tiny_llama):
    """The report of a run without a journal."""
    return pruned(tiny_llama)


def test_a_resumed_run_reads_the_windows_that_its_journal_keeps(
    tiny_llama, tmp_path, interrupted, whole, written, caplog
):
    assert whole.provenance["data"]["source"] == "the model's own text"
    assert sum(row.tokens for row in whole.layers) == 5 * 24 * len(whole.layers)
    (file,) = interrupted.glob("kept-text*")
    assert torch.equal(load_file(file)["text"], torch.cat(_loader(tiny_llama)))
    written.clear()
    caplog.clear()
    with caplog.at_level("INFO"):
        resumed = pruned(tiny_llama, tmp_path / "a")
    assert not written
    assert "own text" not in caplog.text
    assert [row.loss for row in resumed.layers] == [row.loss for row in whole.layers]
    assert not interrupted.exists()


@pytest.mark.parametrize("change", ["seed", "damage", "resume"])
def test_windows_of_another_sampling_or_a_damaged_file_are_not_read(
    tiny_llama, tmp_path, interrupted, whole, written, change
):
    if change == "damage":
        (file,) = interrupted.glob("kept-text*")
        file.write_bytes(file.read_bytes()[:-1])
    options = {"seed": 1} if change == "seed" else {}
    resumed = pruned(tiny_llama, tmp_path / "a", resume=change != "resume", **options)
    assert written
    expected = pruned(tiny_llama, **options) if options else whole
    assert [row.loss for row in resumed.layers] == [row.loss for row in expected.layers]


def test_all_that_decides_the_windows_is_in_their_name(tiny_llama):
    model, start = CausalLM(tiny_llama).model, torch.arange(3)
    one = Sampling(length=8, seed=0, prefix=start[:0], first=start)
    others = [replace(one, **{name: 9}) for name in ("length", "seed")]
    samplings = [one, *others, replace(one, first=start + 1), replace(one, prefix=start[1:])]
    names = {own_text._key(model, sampling, count) for sampling in samplings for count in (5, 6)}
    assert len(names) == 10


def _loader(tiny_llama, **options):
    """What a trainer without a directory reads."""
    seen = []

    class Keep(CausalLM):
        def predict_step(self, batch, batch_idx):
            seen.append(batch)

    Trainer(**QUIET).predict(Keep(tiny_llama), datamodule=data(**options))
    return seen


def test_a_long_window_is_made_of_short_pieces(tiny_llama, monkeypatch):
    pieces = torch.cat(_loader(tiny_llama, num_samples=15, sequence_length=8))
    monkeypatch.setattr(own_text, "_LONGEST", 10)
    windows = torch.cat(_loader(tiny_llama, num_samples=5, sequence_length=23))
    assert torch.equal(windows, pieces.reshape(5, 24)[:, :23])


def test_half_of_it_may_be_other_text(tiny_llama, tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("\n".join(f"value_{i} = {i * 7}" for i in range(90)))
    mixed = torch.cat(_loader(tiny_llama, calibration={"self": 0.5, str(text): 0.5}, num_samples=6))
    own = torch.cat(_loader(tiny_llama, num_samples=3))
    assert mixed.shape == (6, 24)
    assert {tuple(row) for row in own.tolist()} <= {tuple(row) for row in mixed.tolist()}


def test_a_model_without_a_tokenizer_begins_with_any_token(tiny_llama):
    model = CausalLM(tiny_llama)
    model.tokenizer = None
    Trainer(**QUIET).predict(model, datamodule=data())


def test_what_the_tokenizer_puts_before_a_text_begins_every_window(tiny_llama):
    windows = torch.cat(_loader(tiny_llama, tokenizer=tokenizer_with("[E] $A")))
    assert (windows[:, 0] == 0).all()
    assert len(windows[:, 1].unique()) > 1


def test_models_that_cannot_write_are_refused_before_work(tiny_llama, tmp_path, written):
    from transformers import BertConfig, BertModel

    bert = BertModel(BertConfig(vocab_size=50, hidden_size=16, num_attention_heads=2))
    with pytest.raises(TargetError, match="`calibration: self` .* BertModel has no head"):
        Trainer(**QUIET).predict(bert, datamodule=data())
    with pytest.raises(OptionError, match="`calibration: self` with `streaming`"):
        callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "a")
        model = CausalLM(tiny_llama, streaming=True)
        Trainer(**QUIET).predict(model, datamodule=data(), callbacks=[callback])
    with pytest.raises(DataError, match="is written by the model that a trainer runs"):
        data(tokenizer=str(tiny_llama)).calibration_windows()
    assert not written


def test_no_data_at_all_is_answered_with_the_models_own_text(tiny_llama, monkeypatch):
    with pytest.raises(DataError, match=r'datamodule=TextDataModule\(calibration="self"\)'):
        Trainer(**QUIET).predict(CausalLM(tiny_llama), callbacks=[MRPCallback(pattern="2:4")])
    said: list[str] = []
    monkeypatch.setattr(data_module, "rank_zero_info", said.append)
    TextDataModule(tokenizer=str(tiny_llama)).setup("predict")
    assert "`calibration: self`" in " ".join(said)


@pytest.mark.parametrize(
    ("in_file", "option", "calibration", "train_files"),
    [
        ("eval_files: [FILE]", "calibration=self", "self", False),
        ("eval_files: [FILE]", f"calibration={{{HALVES}}}", {"self": 0.5, "stdlib": 0.5}, False),
        ("calibration: self", "train_files=[FILE]", None, True),
        ("train_files: [FILE]", "calibration=self", "self", False),
        (
            "calibration: {self: 0.5, train_files: 0.5}",
            "train_files=[FILE]",
            {"self": 0.5, "train_files": 0.5},
            True,
        ),
    ],
)
def test_the_command_line_takes_the_text_that_is_given_last(
    tiny_llama, tmp_path, in_file, option, calibration, train_files
):
    file, config = tmp_path / "a.txt", tmp_path / "run.yaml"
    file.write_text("a")
    config.write_text(f"data: {{{in_file.replace('FILE', str(file))}}}\n")
    given = [f"--config={config}", f"--data.{option.replace('FILE', str(file))}"]
    made = PruningCLI([*given, f"--model.model={tiny_llama}"], run=False).datamodule
    assert made.calibration == calibration
    assert bool(made.train_files) == train_files
    assert bool(made.eval_files) == ("eval" in in_file)


def test_two_texts_at_one_place_are_refused(tiny_llama, tmp_path):
    (tmp_path / "a.txt").write_text("a")
    given = [f"--data.train_files=[{tmp_path / 'a.txt'}]", "--data.calibration=self"]
    with pytest.raises(OptionError, match="`data.train_files` and `data.calibration`: keep one"):
        PruningCLI([*given, f"--model.model={tiny_llama}"], run=False)
