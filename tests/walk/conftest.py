from collections.abc import Callable

import families
import pytest
import torch
from torch import Tensor, nn


@pytest.fixture
def build() -> Callable[[str], nn.Module]:
    """A tiny random model of a family, the same one on every call."""
    return families.build


@pytest.fixture
def batches() -> list[dict[str, Tensor]]:
    """Batches of several lengths: padded on the left, on the right, and not at all."""
    generator = torch.Generator().manual_seed(2)
    made = []
    for length in (12, 9, 16):
        ids = torch.randint(3, 64, (2, length), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    made[0]["attention_mask"][0, :5] = 0
    made[1]["attention_mask"][1, 6:] = 0
    return made
