"""Time every kernel on a layer's shape on a CUDA device."""

import functools
import logging
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from mrp_lightning.errors import first_line
from mrp_sparse.formats.sparse24 import GROUP, pack
from mrp_sparse.kernels import cusparselt
from mrp_sparse.kernels.candidates import (
    KERNELS,
    SOME_TOKENS,
    Call,
    Kernel,
    PackedWeight,
    compress,
    why_not_compressible,
)
from mrp_sparse.kernels.dispatch import STORED_DENSE, Failure, Measurement
from mrp_sparse.kernels.operator import MAX_ERROR_RATIO

COLD_BYTES = 512 * 2**20
"""Total bytes of the weights that calls rotate over: several times the size of any L2 cache."""
_WARM_UP = 3
"""Number of calls before a capture, and of replays before a measurement."""


@dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of the repeats, in microseconds."""

    median: float
    low: float
    high: float


def copies(weight_bytes: int) -> int:
    """Return the number of weights of a size to rotate over, so that none stays in the L2 cache."""
    # In a model, every layer's weight is evicted by the others before its next use. A single weight
    # that stays in the cache would be read far faster than in any model.
    return max(2, -(-COLD_BYTES // weight_bytes))


def take_turns(measure: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Timing]:
    """Measure each contestant once a round, so that drifting clock rates affect all alike.

    Each function in `measure` runs its contestant once, and returns microseconds. `repeats` is the
    number of rounds, at least two.
    """
    microseconds_of: dict[str, list[float]] = {name: [] for name in measure}
    for _ in range(repeats):
        for name, once in measure.items():
            microseconds_of[name].append(once())
    timings = {}
    for name, values in microseconds_of.items():
        # Quintiles and the median are insensitive to single slow rounds, which a mean is not.
        low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
        timings[name] = Timing(statistics.median(values), low, high)
    return timings


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Warm up the calls, and capture them in one CUDA graph.

    A graph excludes host time: eager cuSPARSELt spends more time planning on the host than
    computing.
    """
    # CUDA graphs require a warm-up on a stream other than the default one.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UP):  # compiles and allocates before the capture
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graphed(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """Return a function that replays the calls as a CUDA graph, and returns microseconds a call."""
    kept = list(calls)
    graph = captured(kept)
    for _ in range(_WARM_UP):
        graph.replay()

    def once() -> float:
        # Keeps `calls` alive: the graph holds no references, and compiled kernels would be
        # unloaded.
        return microseconds(graph.replay) / len(kept)

    return once


def microseconds(call: Callable[[], object]) -> float:
    """Return the device time of the work that `call` starts on the current stream, and await it."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    # Events are on the device's own clock and stream, so that the host's time of launching is not
    # counted.
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


log = logging.getLogger(__name__)
QUICK = 5
"""The number of rounds that compare the configurations of one kernel."""
REPEATS = 20
"""The number of rounds that compare kernels."""
_BUCKETS = (16, 64, SOME_TOKENS)
"""Upper ends of ranges of tokens that share one configuration of a Triton kernel."""
Config = dict[str, int]
Once = Callable[[], float]
"""A function that runs a kernel once, and returns microseconds."""
_Winners = dict[tuple[str, int], Config]
"""The fastest configuration, by kernel and range of tokens."""


def random_24(
    out_features: int, in_features: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return normal weights of variance 1/in, with the two smallest of every four removed."""
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

    A kernel's configurations are compared in a few rounds, and the best one is timed in `repeats`
    rounds. Yields the measurements and the failures for each number of tokens.
    """
    with torch.cuda.device(device):
        # All kernels rotate over equally many weights. The packed ones are smaller, but still 0.56
        # of `COLD_BYTES` together, more than a cache holds.
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
        winners: _Winners = {}
        for count in tokens:
            x = torch.randn(count, in_features, dtype=dtype, device=device)
            call = replace(call, tokens=count, compressed=uncompressed is None)
            yield _Contest(call, x, dense, packed, uncompressed, winners).run(repeats)


@dataclass(frozen=True)
class _Contest:
    """The kernels that are compared at one number of tokens, with their configurations.

    `uncompressed` is the reason why the weights lack cuSPARSELt's layout, or `None`. `runs` and
    `configs` are those of the kernels that take part, and `reasons` explains why others are left
    out. All numbers of tokens share `winners`.
    """

    call: Call
    x: Tensor
    dense: Sequence[Tensor]
    packed: Sequence[PackedWeight]
    uncompressed: str | None
    winners: _Winners
    runs: dict[str, Once] = field(default_factory=dict)
    configs: dict[str, Config] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def run(self, repeats: int) -> tuple[list[Measurement], list[Failure]]:
        """Time all kernels in turns, and return the measurements and the failures."""
        try:
            stored = [functools.partial(F.linear, self.x, weight) for weight in self.dense]
            self.runs[STORED_DENSE], self.configs[STORED_DENSE] = graphed(stored), {}
            for name, kernel in KERNELS.items():
                uncompressed = self.uncompressed if name == "cusparselt" else None
                if reason := uncompressed or kernel.refuse(self.call) or self._enter(name, kernel):
                    self.reasons[name] = reason
            timings = take_turns(self.runs, repeats)
        except Exception as error:  # such as out of memory at this size
            log.warning("%s could not be measured: %s", self.call, error)
            timings = {}
            self.reasons[STORED_DENSE] = first_line(error)
        dtype = str(self.call.dtype).removeprefix("torch.")
        problem = self.call.out_features, self.call.in_features, dtype, self.call.tokens
        measured = [
            Measurement(*problem, name, self.configs[name], t.median, t.low, t.high)
            for name, t in timings.items()
        ]
        return measured, [Failure(*problem, name, why) for name, why in self.reasons.items()]

    def _enter(self, name: str, kernel: Kernel) -> str | None:
        """Add a kernel's fastest correct configuration, or return why there is none."""
        best: tuple[float, Config, Once] | None = None
        reasons = []
        try:
            configs = self._configs(name, kernel)
        except Exception as error:
            return first_line(error)
        for config in configs:
            multiply = functools.partial(kernel.multiply, **config)
            try:
                # Correctness comes before speed: a configuration that computes something else may
                # well be fast.
                if fault := why_wrong(
                    multiply(self.x, self.packed[0], None), self.x, self.dense[0]
                ):
                    reasons.append(fault)
                    continue
                calls = [functools.partial(multiply, self.x, w, None) for w in self.packed]
                once = graphed(calls)
                median = take_turns({name: once}, QUICK)[name].median
            except Exception as error:  # such as too little shared memory, or an unsupported shape
                # GPUs with 99 KiB of shared memory (sm_86, 89, 120) cannot run some configurations.
                skipped = type(error).__name__ == "OutOfResources"
                level = logging.DEBUG if skipped else logging.WARNING
                log.log(level, "%s %s failed on this device: %s", name, config, error)
                reasons.append(first_line(error))
                continue
            if best is None or median < best[0]:
                best = median, config, once
        if best is None:
            return f"all {len(configs)} configurations failed: {reasons[0]}"
        _, self.configs[name], self.runs[name] = best
        self.winners[name, self._bucket] = self.configs[name]
        return None

    @property
    def _bucket(self) -> int:
        tokens = self.call.tokens
        return next((limit for limit in _BUCKETS if tokens <= limit), tokens)

    def _configs(self, name: str, kernel: Kernel) -> list[Config]:
        """Return the configurations to time: an earlier winner, else all; cuSPARSELt searches."""
        if name != "cusparselt":
            winner = self.winners.get((name, self._bucket))
            return [dict(config) for config in kernel.configs] if winner is None else [winner]
        compressed = self.packed[0].compressed
        assert compressed is not None
        try:
            searched = cusparselt.search(self.x, compressed)
        except RuntimeError as error:
            log.warning("cuSPARSELt's search failed, its default algorithm is measured: %s", error)
            return [cusparselt.DEFAULT]
        if searched == cusparselt.DEFAULT:
            return [searched]
        # The search times each algorithm only a few times, so its winner competes with the default.
        return [cusparselt.DEFAULT, searched]


def why_wrong(y: Tensor, x: Tensor, dense: Tensor) -> str | None:
    """Return how y differs from x Wᵀ of the weight `dense`, `None` if it is exact enough."""
    exact = x.float() @ dense.float().T
    if y.shape != exact.shape:
        return f"wrong result: its shape is {tuple(y.shape)}, not {tuple(exact.shape)}"
    error = float((y - exact).norm() / exact.norm())
    # The limit is relative to the dense product's own rounding, which depends on dtype and shape:
    # no absolute tolerance fits all of them.
    allowed = MAX_ERROR_RATIO * float((F.linear(x, dense) - exact).norm() / exact.norm())
    if error <= allowed:
        return None
    return f"wrong result: its relative error is {error:.1e}, the limit {allowed:.1e}"
