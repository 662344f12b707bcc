"""A process of a trainer that distils: python worker.py DENSE PRUNED OUT STRATEGY DEVICES."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from callbacks import KeepSparsity
from mrp_lightning import Distillation

QUIET: dict[str, Any] = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Shares(pl.LightningDataModule):
    """The same windows in each step, whatever the number of processes."""

    def train_dataloader(self) -> DataLoader:
        windows = torch.randint(3, 2000, (16, 24), generator=torch.Generator().manual_seed(0))
        rank, size = self.trainer.global_rank, self.trainer.world_size
        return DataLoader(windows[rank::size], batch_size=4 // size)


def main() -> None:
    dense, pruned, out, strategy, devices = sys.argv[1:]
    torch.set_num_threads(1)
    module = Distillation(
        pruned, dense, dtype="float64", teacher_dtype="float64", learning_rate=1e-3, warmup_steps=2
    )
    strategies: dict[str, Any] = {
        "one": "auto",
        "ddp": DDPStrategy(),
        "fsdp2": ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    }
    trainer = pl.Trainer(
        strategy=strategies[strategy],
        max_steps=4,
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        callbacks=[KeepSparsity()],
        **QUIET | {"accelerator": "cpu", "devices": int(devices)},
    )
    trainer.fit(module, datamodule=Shares())
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone().contiguous()
        for name, p in module.model.named_parameters()
    }
    if trainer.is_global_zero:
        save_file(weights, Path(out))


if __name__ == "__main__":
    main()
