"""What `test` finds is kept in evaluation.json, beside what is there."""

import pytest
import torch
from lightning.pytorch import LightningModule
from torch.nn.functional import one_hot
from torch.utils.data import DataLoader

from callbacks import SaveEvaluation
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.callbacks.saving import continuation
from mrp_lightning.errors import FormatError
from mrp_lightning.records import evaluation as records


def test_results_of_several_runs_come_together(llama, quiet, windows, tmp_path):
    lm = CausalLM(llama())
    trainer = Trainer(**quiet, callbacks=SaveEvaluation(str(tmp_path / "run")))
    trainer.test(lm, {"c4": DataLoader(windows), "ptb": DataLoader(windows[:3])}, verbose=False)
    first = lm.evaluation
    trainer.test(lm, {"ptb": DataLoader(windows[3:])}, verbose=False)
    found = records.read(tmp_path / "run").perplexity
    assert found == {"c4": first["c4"], "ptb": lm.evaluation["ptb"]}
    assert found["ptb"]["windows"] == 5
    assert found["c4"]["tokens"] == 8 * 15


def test_nothing_is_written_by_a_rehearsal_or_by_other_loops(llama, quiet, windows, tmp_path):
    lm, loader = CausalLM(llama()), DataLoader(windows)
    save = SaveEvaluation(str(tmp_path / "run"))
    Trainer(**quiet, callbacks=save, fast_dev_run=True).test(lm, loader, verbose=False)
    Trainer(**quiet, callbacks=save).validate(lm, loader, verbose=False)
    Trainer(**quiet, callbacks=save).predict(lm, loader)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_recorded_is_refused_before_the_work(llama, quiet, windows, tmp_path):
    class Other(LightningModule):
        def test_step(self, batch, batch_idx):
            raise AssertionError("tested")

    trainer = Trainer(**quiet, callbacks=SaveEvaluation(str(tmp_path)))
    with pytest.raises(TypeError, match="`SaveEvaluation` needs a CausalLM. Got Other"):
        trainer.test(Other(), DataLoader(windows), verbose=False)
    (tmp_path / records.NAME).write_text("not JSON")
    lm = CausalLM(llama())
    with pytest.raises(FormatError, match="is not JSON"):
        trainer.test(lm, DataLoader(windows), verbose=False)
    file = tmp_path / records.NAME
    with pytest.raises(FileExistsError, match="`save_dir` .*: expected a directory"):
        Trainer(**quiet, callbacks=SaveEvaluation(file)).test(lm, DataLoader(windows))
    assert lm.evaluation == {}


def test_what_a_model_writes_is_its_greedy_continuation(tiny_llama, quiet, tmp_path):
    lm = CausalLM(str(tiny_llama))
    ids = lm.tokenizer("import os\nimport sys\n\ndef main(argv):\n" * 9)["input_ids"][:72]
    window = torch.tensor(ids)
    loaders = {"code": DataLoader([window]), "short": DataLoader([window[:20]])}
    Trainer(**quiet, callbacks=SaveEvaluation(tmp_path)).test(lm, loaders, verbose=False)
    found = records.read(tmp_path).continuations
    for text, most in {"code": 32, "short": 10}.items():
        prompt, said = found[text]["prompt"], found[text]["continuation"]
        length, code = len(loaders[text].dataset[0]), lm.tokenizer.decode(window)
        (start,) = [n for n in range(most + 1) if lm.tokenizer.decode(window[:n]) == prompt]
        assert most - 4 < start <= most
        assert not code[len(prompt) - 1 : len(prompt) + 1].isalnum()  # between two words
        every = lm.model.generate(window[None, :start], max_length=length, do_sample=False)[0]
        whole = lm.tokenizer.decode(every).removeprefix(prompt)
        assert said
        assert whole.startswith(said)
        assert said == whole or not whole[len(said) - 1 : len(said) + 1].isalnum()
    lm.tokenizer = None
    Trainer(**quiet, callbacks=SaveEvaluation(tmp_path / "b")).test(lm, loaders, verbose=False)
    assert records.read(tmp_path / "b").continuations == {}


def test_a_prompt_that_ends_within_a_character_stands_once(tiny_llama):
    tokenizer = CausalLM(str(tiny_llama)).tokenizer
    ids = torch.tensor(tokenizer("naïve café, Zürich, Ελληνικά, " * 40)["input_ids"])
    windows = ids[:640].view(8, 80)  # of which some cut a character

    def truth(window):
        return lambda seen: one_hot(window[seen.shape[1]], len(tokenizer))[None, None].float()

    found = [continuation(truth(window), tokenizer, window) for window in windows]
    for window, parts in zip(windows, found, strict=True):
        whole, said = tokenizer.decode(window), parts["prompt"] + parts["continuation"]
        assert whole.startswith(said)
        assert " " not in whole.removeprefix(said).strip()  # but for the last word
    prompts = [parts["prompt"] for parts in found]
    assert prompts != [tokenizer.decode(window[:32]) for window in windows]


@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_window_of_few_tokens_is_continued_as_far_as_it_goes(length, tiny_llama):
    lm = CausalLM(str(tiny_llama))
    window = torch.tensor(lm.tokenizer("a b")["input_ids"][:length], dtype=torch.long)
    found = continuation(lambda ids: lm.model(ids).logits, lm.tokenizer, window)
    assert found["prompt"] == lm.tokenizer.decode(window[:1], skip_special_tokens=True)
    assert bool(found["continuation"]) <= (length == 2)
