"""Measure every kernel on a layer's shape: the rows of the measured table."""

import functools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch import Tensor

from export.backends import cusparselt, forms
from export.backends.kernels import FORM, KERNELS, Call, prepare
from export.backends.table import STORED_DENSE, Measurement
from export.backends.timing import copies, graphed, take_turns
from export.format import GROUP, pack

log = logging.getLogger(__name__)
QUICK = 5
REPEATS = 20
Config = dict[str, int]
Packed = list[tuple[Tensor, Tensor]]


def random_24(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Normal weights of variance 1/in, with the two smallest of every four removed."""
    weight = torch.randn(out_features, in_features, dtype=dtype, device=device) / in_features**0.5
    groups = weight.unflatten(1, (-1, GROUP))
    smallest = groups.abs().topk(GROUP // 2, dim=-1, largest=False).indices
    return groups.scatter(-1, smallest, 0).flatten(1)


def usable_kernels(call: Call) -> tuple[list[str], dict[str, str]]:
    """The kernels that take a call, and for the others the reason why not."""
    reasons = {name: kernel.refuse(call) for name, kernel in KERNELS.items()}
    refused = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in KERNELS if name not in refused], refused


@torch.no_grad()
def measure(
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: Iterable[int],
    repeats: int = REPEATS,
) -> list[Measurement]:
    """Time all kernels against the same pruned weight stored dense, with CUDA graphs.

    A kernel's configurations are compared in a short round, and its best one enters the long one.

    Args:
        out_features: Rows of the weight.
        in_features: Columns of the weight.
        dtype: Of weight and input.
        device: A CUDA device.
        tokens: Numbers of tokens.
        repeats: Rounds of the final measurement.
    """
    with torch.cuda.device(device):
        number = copies(out_features * in_features * dtype.itemsize)
        dense = [random_24(out_features, in_features, dtype, device) for _ in range(number)]
        packed = [pack(weight) for weight in dense]
        for values, meta in packed:
            prepare(values, meta)  # a refusal comes up again, with its reason, in usable_kernels
        found = []
        for count in tokens:
            x = torch.randn(count, in_features, dtype=dtype, device=device)
            call = Call(count, out_features, in_features, dtype, device)
            found += _contest(call, x, dense, packed, repeats)
        for values, _ in packed:
            forms.drop(values)
    return found


def _contest(
    call: Call, x: Tensor, dense: Sequence[Tensor], packed: Packed, repeats: int
) -> list[Measurement]:
    names, refused = usable_kernels(call)
    for name, reason in refused.items():
        log.info("%s is not measured at %d tokens: %s", name, call.tokens, reason)

    runs = {STORED_DENSE: graphed([functools.partial(F.linear, x, weight) for weight in dense])}
    configs: dict[str, Config] = {STORED_DENSE: {}}
    for name in names:
        best = _best_config(name, x, packed)
        if best is not None:
            configs[name], runs[name] = best
    name_of_dtype = str(call.dtype).removeprefix("torch.")
    return [
        Measurement(
            call.out_features,
            call.in_features,
            name_of_dtype,
            call.tokens,
            name,
            configs[name],
            timing.median,
            timing.low,
            timing.high,
        )
        for name, timing in take_turns(runs, repeats).items()
    ]


def _best_config(name: str, x: Tensor, packed: Packed) -> tuple[Config, Callable[[], float]] | None:
    """The fastest configuration of a kernel; None where it fails in all of them."""
    run = KERNELS[name].run
    best: tuple[float, Config, Callable[[], float]] | None = None
    for config in _candidates(name, x, packed):
        try:
            once = graphed([functools.partial(run, x, *p, None, **config) for p in packed])
        except Exception as error:  # too much shared memory, or a shape that the library refuses
            log.warning("%s %s failed on this device: %s", name, config, error)
            continue
        median = take_turns({name: once}, QUICK)[name].median
        if best is None or median < best[0]:
            best = median, config, once
    return best and best[1:]


def _candidates(name: str, x: Tensor, packed: Packed) -> list[Config]:
    if name != "cusparselt":
        return [dict(config) for config in KERNELS[name].configs]
    compressed = forms.find(packed[0][0], FORM)
    assert compressed is not None
    default = cusparselt.Algorithm()
    try:
        searched = cusparselt.search(x, compressed, None)
    except RuntimeError as error:
        log.warning("cuSPARSELt's search failed, its default algorithm is measured: %s", error)
        searched = default
    # The search times each algorithm a few times only, so its winner has to prove itself.
    return [asdict(algorithm) for algorithm in dict.fromkeys((default, searched))]
