"""The layers of runs as one table, and where in a model each layer stands, read from its name."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import pandas as pd

from mrp_lightning.experiments.runs import Run
from mrp_lightning.records.rows import LayerReport


class Block(NamedTuple):
    """One of the repeated blocks, such as `("model.layers", 3)`; `("", None)` is none of them."""

    stack: str
    number: int | None

    def __str__(self) -> str:
        return "(none)" if self.number is None else f"{self.stack}.{self.number}"


OUTSIDE = Block("", None)


class Place(NamedTuple):
    """The block of a layer, and its name in the block; further numbers in that are `*`."""

    block: Block
    kind: str


def place(name: str) -> Place:
    """The first number in a name is that of the block: `model.layers.3.mlp.up_proj`."""
    parts = name.split(".")
    number = next((i for i, p in enumerate(parts) if p.isdecimal() and len(p) < 10), None)
    if number is None:
        return Place(OUTSIDE, name)
    kind = ["*" if part.isdecimal() else part for part in parts[number + 1 :]]
    block = Block(".".join(parts[:number]), int(parts[number]))
    return Place(block, ".".join(kind) or "(the block itself)")


def in_order(blocks: Iterable[Block]) -> list[Block]:
    """Blocks stack by stack, as the stacks first appear, and what is outside of them at the end."""
    found = dict.fromkeys(blocks)
    stacks = list(dict.fromkeys(block.stack for block in found if block != OUTSIDE))
    inside = sorted(
        (block for block in found if block != OUTSIDE),
        key=lambda block: (stacks.index(block.stack), block.number),
    )
    return [*inside, *([OUTSIDE] if OUTSIDE in found else [])]


def short_kinds(kinds: Sequence[str]) -> dict[str, str]:
    """Each kind by the fewest last parts of its name that no other kind ends with."""
    short = {}
    for kind in kinds:
        parts = kind.split(".")
        endings = (".".join(parts[i:]) for i in reversed(range(len(parts))))
        others = [other for other in kinds if other != kind]
        short[kind] = next(
            (end for end in endings if not any(f".{o}".endswith(f".{end}") for o in others)), kind
        )
    return short


def layer_table(runs: Sequence[Run], blocks: Sequence[Block]) -> pd.DataFrame:
    """A row for each layer of each run.

    Returns:
        The attributes of `LayerReport`; `run`, the index of the run; `block`, the index of the
        layer's block; and `kind`.
    """
    index = {block: i for i, block in enumerate(blocks)}

    def rows() -> Iterator[dict[str, Any]]:
        for number, run in enumerate(runs):
            for layer in run.layers:
                at = place(layer.name)
                where = {"run": number, "block": index[at.block], "kind": at.kind}
                yield vars(layer) | where

    columns = [*(field.name for field in fields(LayerReport)), "run", "block", "kind"]
    return pd.DataFrame(list(rows()), columns=columns)
