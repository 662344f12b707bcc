"""How a time is taken on a CUDA device: replayed graphs, cold weights, contestants in turns."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

COLD_BYTES = 512 * 2**20
"""Bytes of the weights that are read one after the other: several times any L2 cache."""
WARM_UP = 3
"""Number of calls before a capture, and of replays before a measurement."""


@dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of the repeats, in microseconds."""

    median: float
    low: float
    high: float


def copies(weight_bytes: int) -> int:
    """Number of weights of a size to rotate over, so that none is found in the cache."""
    return max(2, -(-COLD_BYTES // weight_bytes))


def take_turns(measure: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Timing]:
    """Measure each contestant once a round, so that a drifting clock meets all of them alike.

    Each contestant runs once and returns microseconds. There are at least two rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in measure}
    for _ in range(repeats):
        for name, once in measure.items():
            times[name].append(once())
    timings = {}
    for name, values in times.items():
        low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
        timings[name] = Timing(statistics.median(values), low, high)
    return timings


def captured(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Run the calls until they are warm, and capture them in one CUDA graph.

    Host time is not in it: eager cuSPARSELt spends more time planning on the host than computing.
    """
    # CUDA graphs ask that the warm-up runs on another stream than the default one.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):  # compiles, allocates and fills caches outside the capture
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def graphed(calls: Sequence[Callable[[], object]]) -> Callable[[], float]:
    """Capture the calls in one CUDA graph; the result replays it and gives microseconds a call."""
    kept = list(calls)
    graph = captured(kept)
    for _ in range(WARM_UP):
        graph.replay()

    def once() -> float:
        # The graph holds no references: compiled kernels are unloaded when their code is forgotten.
        return microseconds(graph.replay) / len(kept)

    return once


def microseconds(call: Callable[[], object]) -> float:
    """Device time of what `call` starts on the current stream."""
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
