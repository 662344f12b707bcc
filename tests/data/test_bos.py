"""What the tokenizer puts before a text stands before every window, and counts for nothing."""

import json
from zlib import crc32

import pytest
import torch
from quiet import QUIET
from special_tokens import tokenizer_with

from callbacks import MRPCallback, SaveEvaluation
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.errors import DataError, OptionError

TEXT = "\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(120))


@pytest.fixture
def data(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)

    def make(template: str, **options) -> TextDataModule:
        options = {"num_samples": 20, "sequence_length": 16, **options}
        texts = [str(tmp_path / "text.txt")] * 2
        made = TextDataModule(*texts, tokenizer=tokenizer_with(template), **options)
        made.setup("test")
        return made

    return make


@pytest.mark.parametrize(("template", "prefix"), [("[E] $A", [0]), ("[E] [E] $A [E]", [0, 0])])
def test_it_stands_before_every_window(data, template, prefix):
    made, size = data(template), 16 - len(prefix)
    bare = tokenizer_with(template)(TEXT, add_special_tokens=False).input_ids
    evaluated = made.windows("test").ids.tolist()
    assert len(evaluated) == len(bare) // size
    for number, window in enumerate(evaluated):
        assert window == prefix + bare[number * size : (number + 1) * size]
    endless = "".join(f" {token}" for token in made.tokenizer(TEXT + "\n\n" + TEXT).input_ids)
    for window in made.calibration_windows().tolist():
        assert window[: len(prefix)] == prefix
        assert len(window) == 16
        assert 0 not in window[len(prefix) :]
        if "\n\n" not in made.tokenizer.decode(window):
            assert "".join(f" {token}" for token in window[len(prefix) :]) in endless
    (batch,) = list(data(template, batch_size=1000).train_dataloader())
    assert (batch["input_ids"][:, : len(prefix)] == 0).all()
    assert batch["input_ids"].shape[1] == 16


@pytest.mark.parametrize("template", ["$A", "$A [E]"])
def test_without_one_both_ways_are_the_same(data, template):
    window, text = (data(template, bos=bos) for bos in ("window", "text"))
    assert window.bos == data(template).bos
    assert torch.equal(window.calibration_windows(), text.calibration_windows())
    assert torch.equal(window.windows("test").ids, text.windows("test").ids)
    assert all(isinstance(batch, torch.Tensor) for batch in window.test_dataloader())


def test_text_puts_it_once_before_the_text(data):
    evaluated = data("[E] $A", bos="text").windows("test").ids
    assert evaluated[0, 0] == 0
    assert (evaluated == 0).sum() == 1


def test_text_puts_it_before_each_document_to_train_on(tmp_path):
    documents = [f"value_{number} = {number}\n" * 9 for number in range(5)]
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(document)
    tokenizer = tokenizer_with("[E] $A")
    made = TextDataModule(tmp_path, tokenizer=tokenizer, sequence_length=16, bos="text")
    stream = [token for text in documents for token in tokenizer(text + "\n\n").input_ids]
    assert stream.count(0) == 5
    windows = made.train_dataloader().dataset.ids.flatten().tolist()
    assert windows == stream[: len(windows)]
    assert len(stream) - len(windows) < 16


def test_it_is_not_counted_in_perplexity(data, tiny_llama, tmp_path, caplog):
    lm, length = CausalLM(tiny_llama), 16
    made = data("[E] [E] $A", batch_size=3)
    save = SaveEvaluation(str(tmp_path / "run"))
    with caplog.at_level("INFO"):
        Trainer(**QUIET, callbacks=save).test(lm, datamodule=made, verbose=False)
    losses = []
    for window in made.windows("test").ids:
        logits = lm.model(window[None]).logits[0].double()
        for position in range(3, length):  # from 0 and 1 nothing is predicted, nor token 2
            losses.append(-logits[position - 1].log_softmax(-1)[window[position]])
    found = lm.evaluation["text"]
    assert found["loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-6)
    assert found["tokens"] == len(losses)
    assert (found["context"], found["prefix"]) == (length, 2)
    recorded = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert recorded["perplexity"]["text"]["prefix"] == 2
    tokens = made.windows("test").ids.numpy().tobytes()
    assert recorded["perplexity"]["text"]["checksum"] == crc32(tokens)
    said = f"{found['windows']} windows, BOS before each, {len(losses):,} predicted tokens)"
    assert said in caplog.text

    batch = next(iter(made.test_dataloader()))
    loss, count = lm.loss(batch)
    assert count == 3 * (length - 3)
    assert float(loss) == pytest.approx(float(torch.stack(losses[:count]).mean()), rel=1e-5)


def test_that_there_is_none_is_said_too_and_kept_in_a_report(data, tiny_llama, caplog):
    lm, made, trainer = (
        CausalLM(tiny_llama),
        data("$A", bos="text", num_samples=2),
        Trainer(**QUIET),
    )
    with caplog.at_level("INFO"):
        trainer.test(lm, datamodule=made, verbose=False)
        assert lm.evaluation["text"]["prefix"] == 0
        assert "windows, no BOS before each, " in caplog.text
        caplog.clear()
        trainer.test(lm, made.windows("test").ids[:, None], verbose=False)
    assert "prefix" not in lm.evaluation["text"]
    assert "BOS" not in caplog.text
    trainer.predict(lm, datamodule=made, callbacks=[callback := MRPCallback(pattern="2:4")])
    assert callback.report.provenance["data"]["bos"] == "text"


def test_the_default_is_the_papers_protocol_for_the_papers_texts():
    assert TextDataModule(calibration="c4").bos == "text"
    assert TextDataModule(calibration="c4", bos="window").bos == "window"
    assert TextDataModule(evaluation=["ptb"]).bos == "text"
    assert TextDataModule(__file__).bos == TextDataModule().bos == "window"
    with pytest.raises(OptionError, match=r"`bos`: expected text or window. Got 'none'"):
        TextDataModule(bos="none")


def test_windows_that_hold_nothing_else_are_refused(data):
    for windows in (data("[E] [E] $A", sequence_length=3), data("[E] $A", sequence_length=2)):
        with pytest.raises(DataError, match=r"`sequence_length`: of \d tokens \d are what"):
            windows.calibration_windows()


def test_published_texts_may_have_it_too(corpora_dir):
    options = {"calibration": "c4", "num_samples": 4, "sequence_length": 12}
    options |= {"corpora_dir": str(corpora_dir), "tokenizer": tokenizer_with("[E] $A")}
    text, window = (
        TextDataModule(**options, bos=bos).calibration_windows() for bos in ("text", "window")
    )
    assert text.shape == window.shape == (4, 12)
    assert (window[:, 0] == 0).all()
    assert (window[:, 1:] != 0).all()
    assert (text[:, 0] != 0).any()
