"""What is said of a pruning while it runs, where nobody sees a bar."""

import re
import sys
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from quiet import QUIET
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.loop import progress
from mrp_lightning.pruning.job import Progress
from mrp_lightning.records.block_result import BlockResult, LayerResult
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.text import windows
from mrp_lightning.text.windows import tokenize

TRAINER = {key: value for key, value in QUIET.items() if key != "enable_progress_bar"}


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [message for message in caplog.messages if message.startswith("block ")]


@pytest.mark.parametrize(("shown", "terminal"), [(True, True), (True, False), (False, True)])
def test_each_block_is_a_line_unless_a_bar_is_seen(
    shown, terminal, build, batches, caplog, monkeypatch
):
    caplog.set_level("INFO")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    bar = [RichProgressBar()] if shown else []
    trainer = Trainer(callbacks=bar, enable_progress_bar=shown, **TRAINER)
    callback = MRPCallback(pattern="2:4", targets=["layers.0", "layers.1"])
    trainer.predict(build("llama"), DataLoader(batches, batch_size=None), callbacks=callback)
    blocks = len({row.name.split(".")[2] for row in callback.report.pruned})
    assert blocks == 2
    assert len(logged(caplog)) == (0 if shown and terminal else blocks)
    if not shown:
        first = logged(caplog)[0]
        rows = [row for row in callback.report.pruned if ".layers.0." in f".{row.name}"]
        mean = sum(row.relative_loss for row in rows) / len(rows)
        assert f" · relative loss {mean:.3g} · " in first
        assert first.startswith("block 1/3 ")
        assert first.endswith(" left")


@pytest.fixture
def clock(caplog, monkeypatch) -> SimpleNamespace:
    """The time, as a test sets it."""
    caplog.set_level("INFO")
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def listener_of(blocks: int, *loggers) -> progress.PruningProgress:
    trainer = SimpleNamespace(progress_bar_callback=None, loggers=loggers, is_global_zero=True)
    return progress.PruningProgress(blocks, torch.device("cpu"), progress.ProgressReporter(trainer))


def test_the_rest_is_estimated_from_the_blocks_so_far(clock, caplog):
    listener = listener_of(30)
    row = LayerReport(name="layer", shape=(1, 1), relative_loss=0.0123)
    listener.block(BlockResult("block", (LayerResult(row),)))
    for k, now, rows in ((2, 141.0, [row]), (14, 1300.0, []), (29, 100.0 + 3 * 3600, [row])):
        clock.now = now
        listener.finished(k, rows, resumed=False)
    assert logged(caplog) == [
        "block 3/30 · relative loss 0.0123 · 41 s, about 6 min left",
        "block 15/30 · 20 min, about 20 min left",
        "block 30/30 · relative loss 0.0123 · 3.0 h",
    ]


def test_blocks_from_a_journal_do_not_count_for_the_estimate(clock, caplog):
    listener = listener_of(10)
    for k, now in enumerate((1.0, 2.0, 12.0, 22.0)):
        clock.now = 100.0 + now
        listener.finished(k, [], resumed=k < 2)
    clock.now = 152.0  # half a minute without a line
    listener.progress(Progress(5, 10, "q_proj"))
    assert logged(caplog) == [
        "block 1/10 · from the journal",
        "block 2/10 · from the journal",
        "block 3/10 · 12 s, about 70 s left",
        "block 4/10 · 22 s, about 60 s left",
        "block 5/10 · q_proj · about 30 s left · 52 s",
    ]


def test_each_walk_is_estimated_from_its_own_blocks(clock, caplog):
    listener = listener_of(4)
    for k in range(2):
        clock.now += 10.0
        listener.finished(k, [], resumed=False)
    listener.started("whole model")
    clock.now += 40.0
    listener.progress(Progress(3, 4, "q_proj"))
    listener.finished(2, [], resumed=False)
    assert logged(caplog) == [
        "block 1/4 · 10 s, about 30 s left",
        "block 2/4 · 20 s, about 20 s left",
        "block 3/4 · q_proj · 60 s",
        "block 3/4 · 60 s, about 40 s left",
    ]


def test_a_long_block_is_a_line_every_half_minute(clock, caplog):
    listener = listener_of(3)
    for k, now in enumerate((29.0, 31.0, 40.0, 60.9, 61.0)):
        clock.now = 100.0 + now
        listener.progress(Progress(1, 3, f"step {k}"))
    clock.now = 180.0
    listener.finished(0, [], resumed=False)
    for k, now in enumerate((109.0, 110.0)):
        clock.now = 100.0 + now
        listener.progress(Progress(2, 3, f"step {k}"))
    assert logged(caplog) == [
        "block 1/3 · step 1 · 31 s",
        "block 1/3 · step 4 · 61 s",
        "block 1/3 · 80 s, about 3 min left",
        "block 2/3 · step 1 · about 2 min left · 2 min",
    ]


def test_the_bar_says_where_a_solve_is(build, batches, monkeypatch):
    seen: list[str] = []
    monkeypatch.setattr(progress.ProgressReporter, "log_seldom", lambda _, text: seen.append(text))
    monkeypatch.setattr(progress, "_BAR_SECONDS", 0)
    callback = MRPCallback(pattern="2:4", block_size=16, targets="layers.1.mlp.down_proj")
    loader = DataLoader(batches, batch_size=None)
    Trainer(enable_progress_bar=False, **TRAINER).predict(
        build("llama"), loader, callbacks=callback
    )
    (row,) = callback.report.pruned
    solving = [text.split(", ")[1].split(" · ")[0] for text in seen if "down_proj, " in text]
    columns = [text for text in solving if text.startswith("columns ")]
    assert columns == [f"columns {k}/{row.shape[1]}" for k in range(16, row.shape[1], 16)]
    iterations = [text for text in solving if text.startswith("iteration ")]
    assert iterations == [f"iteration {k + 1}" for k in range(len(iterations))]
    assert 0 < len(iterations) <= row.iterations
    first = next(k for k, text in enumerate(seen) if "down_proj" in text)
    assert "down_proj ·" in seen[first] or seen[first].endswith("down_proj")  # before it is solved


@pytest.mark.parametrize(("shown", "terminal"), [(True, True), (True, False), (False, True)])
def test_batches_are_told_where_no_bar_is_seen(
    shown, terminal, tiny_llama, tmp_path, caplog, monkeypatch
):
    caplog.set_level("INFO")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 60)
    text = [tmp_path / "text.txt"]
    data = TextDataModule(train_files=text, eval_files=text, sequence_length=64)
    bar = [TQDMProgressBar()] if shown else []
    trainer = Trainer(callbacks=bar, enable_progress_bar=shown, max_epochs=1, **TRAINER)
    model = CausalLM(str(tiny_llama))
    later = count(10.0, 10.0)  # ten seconds at each look
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(later))
    for run in (trainer.fit, trainer.validate, trainer.test):
        run(model, datamodule=data)
    said = [m for m in caplog.messages if m.startswith(("training: ", "validating: ", "testing: "))]
    if shown and terminal:
        assert not said
        return
    total = len(data.test_dataloader())
    assert f"testing: batch 1/{total} · 10 s" in said
    assert f"testing: batch 4/{total} · 40 s" in said  # half a minute later, none between
    # The clock of `fit` goes on in its own validation.
    assert said.count(f"validating: batch 1/{total} · 10 s") == 1
    # Windows of 64 tokens; the clock gives the rest of the steps ten seconds or more each.
    line = rf"training: epoch 1, batch 1/{total}, [^·]*\d · 64 tokens · about \d+ (s|min) left · "
    assert any(re.match(line, message) for message in said)


def test_a_long_text_is_announced(tiny_llama, caplog, monkeypatch):
    caplog.set_level("INFO")
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    tokenize(tokenizer, "x = 1\n" * 100)
    assert not caplog.messages
    monkeypatch.setattr(windows, "_MANY_CHARACTERS", 500)
    tokenize(tokenizer, "x = 1\n" * 100)
    assert [m for m in caplog.messages if m.startswith("Tokenizing ")]


def test_layers_are_logged_each_once_with_its_place():
    logged = []
    rows = [LayerReport(name=str(i), shape=(1, 1), loss=float(i)) for i in range(100)]
    logger = SimpleNamespace(
        log_metrics=lambda metrics, step: logged.append((step, metrics.get("prune_layer/loss"))),
        save=lambda: None,
    )
    listener = listener_of(2, logger)
    dense = LayerReport(name="router", shape=(1, 1), skipped="it routes tokens")
    for k, of_block in enumerate((rows[:40], rows[40:])):
        listener.block(BlockResult(str(k), tuple(map(LayerResult, [dense, *of_block]))))
        listener.finished(k, of_block, resumed=False)
    assert [entry for entry in logged if entry[1] is not None] == [(i, i) for i in range(100)]


@pytest.mark.parametrize(
    ("task", "brief"),
    [
        ("model.layers.11.mlp.down_proj, columns 8192/11008", "down_proj"),
        ("transformer.h.3.attn.c_attn", "c_attn"),
        ("model.layers.0, inputs 31/32", "inputs 31/32"),
        ("model.layers.3.mlp.experts.17.up_proj, iteration 4", "up_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_text_of_the_bar_fits_80_columns(task, brief, monkeypatch):
    shown: list[str] = []
    monkeypatch.setattr(progress.ProgressReporter, "show", lambda _, done, text: shown.append(text))
    listener_of(32).progress(Progress(12, 32, task))
    assert shown == [f"block 12/32 · {brief}"]
    assert len(shown[0]) <= 28
