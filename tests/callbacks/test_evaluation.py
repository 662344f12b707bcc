"""What `test` finds is kept in evaluation.json, beside what is there."""

import pytest
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from callbacks import SaveEvaluation
from mrp_lightning import CausalLM, Trainer
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
