"""Experts whose matrices are stacked in one parameter: how they are run, and how they are helped.

Each expert is pruned with the Hessian of the tokens that are routed to it. A block's Hessians take
4·experts·(hidden² + intermediate²) bytes on its device (Mixtral-8x7B: 7.1 GB), and one more of each
kind for all tokens. What exceeds `HESSIAN_BYTES` is done in portions of whole experts, at the price
of a pass over the block each.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from mrp_lightning.solver.hessian import HessianAccumulator
from mrp_lightning.targets.layers import Expert, Layer
from mrp_lightning.upstream.transformers_names import EXPERTS

TOKENS_PER_COLUMN = 1.0
"""The number of tokens for each of its input features that an expert needs to be pruned by its own
Hessian alone. With fewer than one, that Hessian is singular but for the damping."""

HESSIAN_BYTES = 16 * 2**30
"""The bytes of experts' Hessians that are held at a time."""


@contextmanager
def one_by_one(experts: Sequence[Expert]) -> Iterator[None]:
    """Run stacked experts by their class's own loop over experts, in which products can be seen.

    transformers replaces that loop by grouped products, which differ from it by rounding.
    """
    configs: dict[int, Any] = {id(e.module): e.module.config for e in experts}
    with ExitStack() as stack:
        for config in {id(config): config for config in configs.values()}.values():
            stack.callback(setattr, config, EXPERTS, getattr(config, EXPERTS))
            setattr(config, EXPERTS, "eager")
        yield


def blend(own: HessianAccumulator, pool: HessianAccumulator) -> tuple[Tensor, float]:
    """The Hessian of one expert (columns, columns), made up to enough tokens with that of all.

    With n tokens of its own, of the m = `TOKENS_PER_COLUMN`·columns that it needs, an expert gets

        s = max(0, 1 − n / m),  H = (1 − s)·H_own + s·H_pool

    as if the missing m − n tokens were like those of an average expert. Returns H and s.
    """
    s = max(0.0, 1 - own.num_tokens / (TOKENS_PER_COLUMN * own.columns))
    if s == 0:
        return own.hessian(), 0.0
    hessian = pool.hessian().mul_(s)
    if own.num_tokens:
        hessian.add_(own.hessian(), alpha=1 - s)
    return hessian, s


def portions(layers: Sequence[Layer]) -> list[list[Layer]]:
    """Divide layers into what is calibrated in one pass: all, or some experts at a time.

    Experts stand side by side, and before nothing else of their block that is calibrated: pruning
    some leaves the inputs of the others as they are. Only the pool then sees the inner activations
    of experts that are pruned already. The rest comes last, as it may stand before the experts.
    """
    experts: dict[tuple[int, int], list[Layer]] = {}
    for layer in layers:
        if isinstance(layer, Expert):
            experts.setdefault((id(layer.module), layer.index), []).append(layer)
    rest = [layer for layer in layers if not isinstance(layer, Expert)]
    parts: list[list[Layer]] = []
    free = 0
    for expert in experts.values():
        size = sum(4 * layer.columns**2 for layer in expert)
        if size > free or not parts:
            parts.append([])
            free = HESSIAN_BYTES
        parts[-1] += expert
        free -= size
    if len(parts) <= 1:
        return [list(layers)]
    return [*parts, *([rest] if rest else [])]
