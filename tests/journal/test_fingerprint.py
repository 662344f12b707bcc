"""What a journal knows of the calibration data, and what the walk keeps of it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from quiet import QUIET
from slow_pruning import killed_after
from torch import Tensor, nn
from torch.utils.data import DataLoader

from callbacks import MRPCallback
from mrp_lightning import Trainer
from mrp_lightning.errors import JournalError
from mrp_lightning.journal.manifest import digest_of, together
from mrp_lightning.loop.calibration_data import Step


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Graph:
    """As a batch of torch_geometric: an object with tensors, which moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.itself = x, self

    def to(self, device: Any) -> "Graph":
        return Graph(self.x.to(device))


class InSlots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


MADE: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Slotted,
    "object": Graph,
    "slots": InSlots,
    "array": lambda x: x.numpy(),
    "objects": lambda x: np.array([None, x.tolist()], dtype=object),
    "bytes": lambda x: x.numpy().tobytes(),
    "nested": lambda x: {"a": [("b", Graph(x))]},
}


def digest(batch: Any) -> str:
    return digest_of([Step((batch, 0), {})])


@pytest.mark.parametrize("kind", MADE)
def test_batches_of_any_kind_are_told_apart(kind):
    one, same, other = (MADE[kind](torch.full((2, 3), value)) for value in (1.0, 1.0, 2.0))
    assert digest(one) == digest(same)
    assert digest(one).startswith("sha256:")
    assert digest(one) != digest(other)


def test_what_cannot_be_compared_never_is_the_same():
    batch = {"x": torch.ones(2), "open": (i for i in range(3))}
    assert digest(batch) != digest(batch)
    message = "the batches cannot be compared: TypeError: cannot pickle 'generator' object"
    assert message in digest(batch)
    known = digest(torch.ones(2))
    assert "generator" in together([known, digest(batch)])
    assert together([known]) == known
    assert together([known, known]) != known


@pytest.mark.parametrize("kind", ["object", "array"])
def test_objects_and_arrays_are_copied(kind):
    batch = {"held": [MADE[kind](torch.ones(2))]}
    with torch.inference_mode():
        batch["moved"] = Graph(torch.ones(2))
    copy = Step((batch,), {}).to(torch.device("cpu")).batch
    (held,) = copy["held"]
    ours = held.x if kind == "object" else held
    ours += 1
    (original,) = batch["held"]
    assert (original.x if kind == "object" else original).tolist() == [1, 1]
    assert not copy["moved"].x.is_inference()


class Own(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.x
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("make", [Slotted, Graph])
def test_a_run_with_other_batches_does_not_go_on(make, tmp_path):
    def prune(value: float) -> MRPCallback:
        callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
        x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)) + value
        loader = DataLoader([make(x)], batch_size=1, collate_fn=lambda batch: batch[0])
        Trainer(**QUIET).predict(Own(), loader, callbacks=[callback])
        return callback

    with killed_after(1):
        prune(0.0)
    with pytest.raises(JournalError, match="`calibration data` differ"):
        prune(1.0)
    assert prune(0.0).report.resumed_blocks == 1
