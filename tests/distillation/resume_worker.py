"""A process of a training that is resumed: python resume_worker.py DENSE PRUNED TEXT DIRECTORY."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy
from worker import QUIET

from mrp_lightning import Distillation, DistillationText


class Batches(pl.Callback):
    """Keeps the batches that are trained on, and saves a checkpoint after the second."""

    def __init__(self, file: Path) -> None:
        self.file, self.read = file, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.read.append(batch.tolist())

    def on_train_batch_end(self, trainer, *_) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self.file)


def main() -> None:
    dense, pruned, text, directory = sys.argv[1:]
    torch.set_num_threads(1)
    file, runs = Path(directory, "half.ckpt"), []
    for checkpoint in (None, file):
        data = DistillationText(
            text,
            calibration="train_files",
            tokens=640,
            sequence_length=32,
            batch_size=2,
            tokenizer=dense,
        )
        batches = Batches(file)
        trainer = pl.Trainer(
            strategy=DDPStrategy(),
            max_epochs=1,
            limit_val_batches=0,
            callbacks=[batches],
            **QUIET | {"accelerator": "cpu", "devices": 2},
        )
        trainer.fit(Distillation(pruned, dense), datamodule=data, ckpt_path=checkpoint)
        runs.append(batches.read)
    whole, resumed = runs
    assert len(whole) == 5, whole
    assert resumed == whole[2:]


if __name__ == "__main__":
    main()
