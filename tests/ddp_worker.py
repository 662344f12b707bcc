"""One of two processes of a trainer: prunes, tests, and writes down what it found.

torchrun … ddp_worker.py MODEL TEXT OUT --die     # on two nodes; one is killed in a second run
torchrun … ddp_worker.py MODEL TEXT OUT --resume  # which goes on here
"""

import argparse
import hashlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from quiet import QUIET

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule
from mrp_lightning.pruning.block import LayerSolver

PRUNE: dict[str, Any] = {"sparsity": 0.5, "allocation": "output", "target": "dense", "tuning": True}
PRUNE |= {"head_grid": "q5_0"}


def data(text: str) -> TextDataModule:
    """Seven calibration windows, so that one process gets more than the other."""
    return TextDataModule(
        train_files=[text], eval_files=[text], num_samples=7, sequence_length=32, batch_size=2
    )


def bits(model: torch.nn.Module) -> str:
    weights = b"".join(p.detach().cpu().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(weights).hexdigest()


def die_in_block_1() -> None:
    """Let process 0 be killed when it comes to the second block, after the dry run."""
    prune = LayerSolver.prune

    def killed(self, block):
        is_dry_run = block.job.settings.target == "own"
        if block.k == 1 and not is_dry_run and block.job.processes.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return prune(self, block)

    LayerSolver.prune = killed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("out", type=Path)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--die", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = {"num_nodes": options.nodes, "devices": 2 // options.nodes}
    shape |= {"accelerator": options.accelerator}

    def prune(name):
        model = CausalLM(options.model)
        callback = MRPCallback(**PRUNE, save_dir=options.out / name)
        trainer = pl.Trainer(strategy="ddp", callbacks=[callback], **QUIET | shape)
        trainer.predict(model, datamodule=data(options.text))
        return trainer, model, callback.report

    name = "second" if options.resume else "first"
    trainer, model, report = prune(name)
    found = {"bits": bits(model), "report": report.to_dict()}
    if not options.resume:
        trainer.test(model, datamodule=data(options.text), verbose=False)
        found["evaluation"] = model.evaluation
        try:
            prune("first")
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}"
    file = options.out / f"{name}-{trainer.global_rank}.json"
    file.write_text(json.dumps(found))
    if options.die:
        die_in_block_1()
        prune("second")


if __name__ == "__main__":
    main()
