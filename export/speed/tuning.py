"""Measure every kernel on a layer's shape: the rows of the measured table.

A kernel that is refused, that fails, or that computes something else is left out with its reason,
and does not keep the others from being measured.
"""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from export.errors import first_line
from export.kernels import cusparselt
from export.kernels.candidates import (
    KERNELS,
    SOME_TOKENS,
    Call,
    PackedWeight,
    compress,
    why_not_compressible,
)
from export.kernels.kernel_times import STORED_DENSE, Failure, Measurement
from export.kernels.operator import MAX_ERROR_RATIO
from export.packed.sparse24_format import GROUP, pack
from export.speed.timing import copies, graphed, take_turns

log = logging.getLogger(__name__)
QUICK = 5
"""Rounds in which the configurations of one kernel are compared."""
REPEATS = 20
"""Rounds in which the kernels are compared."""
BUCKETS = (16, 64, SOME_TOKENS)
"""Numbers of tokens up to which one search for a configuration of a Triton kernel is enough."""
Config = dict[str, int]
Once = Callable[[], float]
"""Runs a contestant and gives microseconds."""
Winners = dict[tuple[str, int], Config]
"""The fastest configuration, by kernel and bucket."""


def random_24(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Normal weights of variance 1/in, with the two smallest of every four removed."""
    weight = torch.randn(out_features, in_features, dtype=dtype, device=device) / in_features**0.5
    groups = weight.unflatten(1, (-1, GROUP))
    smallest = groups.abs().topk(GROUP // 2, dim=-1, largest=False).indices
    return groups.scatter(-1, smallest, 0).flatten(1)


@torch.no_grad()
def measure(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: Iterable[int],
    repeats: int = REPEATS,
) -> Iterator[tuple[list[Measurement], list[Failure]]]:
    """Time all kernels against the same pruned weight stored dense, with CUDA graphs.

    A kernel's configurations are compared in a short round, and its best one enters the long one.

    Args:
        out_features: Rows of the weight.
        in_features: Columns of the weight.
        dtype: Dtype of weight and input.
        device: A CUDA device.
        tokens: Numbers of tokens to measure at.
        repeats: Rounds of the final measurement.

    Yields:
        What was measured for each number of tokens, and what could not be.
    """
    with torch.cuda.device(device):
        number = copies(out_features * in_features * dtype.itemsize)
        dense = [random_24(out_features, in_features, dtype, device) for _ in range(number)]
        packed = [PackedWeight(*pack(weight)) for weight in dense]
        call = Call(1, out_features, in_features, dtype, device)
        uncompressed = why_not_compressible(call)
        if uncompressed is None:
            try:
                packed = [PackedWeight(w.values, w.meta, compress(*w[:2])) for w in packed]
            except RuntimeError as error:
                uncompressed = f"compression failed: {first_line(error)}"
        winners: Winners = {}
        for count in tokens:
            x = torch.randn(count, in_features, dtype=dtype, device=device)
            call = replace(call, tokens=count, compressed=uncompressed is None)
            yield _contest(call, x, dense, packed, uncompressed, winners, repeats)


@dataclass
class _Contestants:
    """What is timed in turns, with its configuration, and what is not."""

    runs: dict[str, Once]
    configs: dict[str, Config]
    reasons: dict[str, str]


def _contest(
    call: Call,
    x: Tensor,
    dense: Sequence[Tensor],
    packed: Sequence[PackedWeight],
    uncompressed: str | None,
    winners: Winners,
    repeats: int,
) -> tuple[list[Measurement], list[Failure]]:
    entered = _Contestants({}, {}, {})
    try:
        entered.runs[STORED_DENSE] = graphed([functools.partial(F.linear, x, w) for w in dense])
        entered.configs[STORED_DENSE] = {}
        for name, kernel in KERNELS.items():
            reason = (uncompressed if name == "cusparselt" else None) or kernel.refuse(call)
            if reason is None:
                _enter(entered, name, x, dense[0], packed, winners)
            else:
                entered.reasons[name] = reason
        timings = take_turns(entered.runs, repeats)
    except Exception as error:  # out of memory at this size; smaller ones are measured already
        log.warning("%s could not be measured: %s", call, error)
        timings, entered.reasons = {}, entered.reasons | {STORED_DENSE: first_line(error)}
    dtype = str(call.dtype).removeprefix("torch.")
    problem = call.out_features, call.in_features, dtype, call.tokens
    measured = [
        Measurement(*problem, name, entered.configs[name], t.median, t.low, t.high)
        for name, t in timings.items()
    ]
    return measured, [Failure(*problem, name, why) for name, why in entered.reasons.items()]


def _enter(
    entered: _Contestants,
    name: str,
    x: Tensor,
    dense: Tensor,
    packed: Sequence[PackedWeight],
    winners: Winners,
) -> None:
    """Let the fastest configuration of a kernel that computes the right thing take part."""
    best: tuple[float, Config, Once] | None = None
    reasons = []
    try:
        configs = _configs(name, x, packed[0], winners)
    except Exception as error:
        entered.reasons[name] = first_line(error)
        return
    for config in configs:
        multiply = functools.partial(KERNELS[name].multiply, **config)
        try:
            if reason := why_wrong(multiply(x, packed[0], None), x, dense):
                reasons.append(reason)
                continue
            once = graphed([functools.partial(multiply, x, weight, None) for weight in packed])
            median = take_turns({name: once}, QUICK)[name].median
        except Exception as error:  # too much shared memory, or a shape that the library refuses
            log.warning("%s %s failed on this device: %s", name, config, error)
            reasons.append(first_line(error))
            continue
        if best is None or median < best[0]:
            best = median, config, once
    if best is None:
        entered.reasons[name] = f"all {len(configs)} configurations failed: {reasons[0]}"
    else:
        entered.configs[name], entered.runs[name] = best[1:]
        winners[name, _bucket(x.shape[0])] = best[1]


def why_wrong(y: Tensor, x: Tensor, dense: Tensor) -> str | None:
    """How a kernel's result differs from the product, if it is less exact than the dense one."""
    exact = x.float() @ dense.float().T
    if y.shape != exact.shape:
        return f"wrong result: its shape is {tuple(y.shape)}, not {tuple(exact.shape)}"
    found = float((y - exact).norm() / exact.norm())
    allowed = MAX_ERROR_RATIO * float((F.linear(x, dense) - exact).norm() / exact.norm())
    if found <= allowed:
        return None
    return f"wrong result: its relative error is {found:.1e}, the limit {allowed:.1e}"


def _bucket(tokens: int) -> int:
    return next((limit for limit in BUCKETS if tokens <= limit), tokens)


def _configs(name: str, x: Tensor, weight: PackedWeight, winners: Winners) -> list[Config]:
    """What to try for a kernel: what won for a similar number of tokens, else everything."""
    if name != "cusparselt":
        winner = winners.get((name, _bucket(x.shape[0])))
        return [dict(config) for config in KERNELS[name].configs] if winner is None else [winner]
    assert weight.compressed is not None
    default = cusparselt.Algorithm()
    try:
        searched = cusparselt.search(x, weight.compressed, None)
    except RuntimeError as error:
        log.warning("cuSPARSELt's search failed, its default algorithm is measured: %s", error)
        searched = default
    # The search times each algorithm a few times only, so its winner has to prove itself.
    return [asdict(algorithm) for algorithm in dict.fromkeys((default, searched))]
