from collections import namedtuple
from dataclasses import InitVar, dataclass
from typing import Any

import pytest
import torch

from mrp_lightning.calibration.walk_choice import kind, one_of_each_kind

IDS, FLOATS = torch.ones(2, 5, dtype=torch.long), torch.ones(2, 5)


@dataclass
class Step:
    args: tuple[Any, ...]
    width: InitVar[int] = 0


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "same",
    [
        (IDS, IDS[:1, :3]),
        ({"ids": IDS, "n": 1}, {"n": 2, "ids": IDS[:, :1]}),
        ([FLOATS, FLOATS], [FLOATS[:1]]),
        (Step(({"ids": IDS}, 0)), Step(({"ids": IDS[:1]}, 7))),
        ({"attention_mask": IDS}, {"attention_mask": IDS[:1]}),
        (Pair(IDS, "a"), Pair(IDS[:1], "b")),
    ],
)
def test_batches_of_one_kind(same):
    assert kind(same[0]) == kind(same[1])


@pytest.mark.parametrize(
    "other",
    [
        (IDS, FLOATS),
        (FLOATS, FLOATS[0]),
        ({"ids": IDS}, {"ids": IDS, "image": FLOATS}),
        ({"ids": IDS, "image": None}, {"ids": IDS, "image": FLOATS}),
        ([FLOATS], []),
        (Step(({"ids": IDS}, 0)), Step(({"ids": None}, 0))),
        (Pair(IDS, None), Pair(IDS, FLOATS)),
        ({"attention_mask": IDS}, {"attention_mask": IDS.tril()}),
    ],
)
def test_batches_of_two_kinds(other):
    assert kind(other[0]) != kind(other[1])
    assert one_of_each_kind([other[0], other[0], other[1], other[0]]) == list(other)
