"""An interrupted run goes on where it was, and ends with the bits of an uninterrupted one."""

import json
from typing import Any

import pytest
import torch
from torch import nn

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.pruning.journal import Journal, journal_path
from mrp_lightning.pruning.tuning import BlockTuning


class Killed(BaseException):
    """Stands for the end of the process: nothing of ours catches it."""


@pytest.fixture
def prune(llama, loader, quiet, tmp_path):
    """Prune a fresh model of four blocks into `out`, and die after some of them."""

    def run(
        survives: int | None = None, *, module: nn.Module | None = None, **arguments: Any
    ) -> tuple[nn.Module, MRPCallback]:
        module = llama(num_hidden_layers=4) if module is None else module
        options = {"sparsity": 0.5, "save_dir": tmp_path / "out"} | arguments
        callback = MRPCallback(**options)
        write, written = Journal.write, []

        def write_and_die(self: Journal, step: int, record: Any) -> None:
            write(self, step, record)
            written.append(step)
            if len(written) == survives:
                raise Killed

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "write", write_and_die)
            if survives is None:
                Trainer(**quiet).predict(CausalLM(module), loader, callbacks=[callback])
            else:
                with pytest.raises(Killed):
                    Trainer(**quiet).predict(CausalLM(module), loader, callbacks=[callback])
        return module, callback

    return run


def assert_same_bits(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), name


TUNING = BlockTuning(epochs=1, learning_rate=1e-3, batch_size=2)


@pytest.mark.parametrize(
    ("survives", "arguments"),
    [
        (1, {}),
        (3, {"target": "dense", "tuning": TUNING, "allocation": "dlp"}),
        (4, {"tuning": TUNING}),  # all but the final write
        (2, {"true_sequential": True, "offload": True, "method": "MM", "sparsity": None,
             "pattern": "2:4", "target": "dense"}),
        (5, {"targets": ["mlp", "lm_head"]}),  # a step beyond the blocks
    ],
)  # fmt: skip
def test_an_interrupted_run_ends_with_the_same_bits(survives, arguments, prune, tmp_path):
    whole, reference = prune(**arguments, save_dir=None)
    prune(survives, **arguments)
    assert journal_path(tmp_path / "out").is_dir()
    resumed, callback = prune(**arguments)
    assert_same_bits(resumed, whole)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]

    stored = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert stored["totals"]["resumed_blocks"] == survives
    times = ("seconds",)

    def rows(found: Any) -> list[dict[str, Any]]:
        return [{k: v for k, v in row.to_dict().items() if k not in times} for row in found]

    assert rows(callback.report.layers) == rows(reference.report.layers)
    assert rows(callback.report.blocks) == rows(reference.report.blocks)
    assert "resumed_blocks" not in reference.report.totals
