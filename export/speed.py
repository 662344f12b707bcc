"""The measured speed of a packed model beside the same weights stored dense, on a CUDA device.

Both sides are captured as CUDA graphs, which leave out the host's time, and take turns, so that
drifting clock rates affect both alike.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mrp_ground.upstream import attention_of
from mrp_lightning.errors import first_line
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_sparse.packed_linear import Sparse24Linear

_WARM_UP = 3
"""Number of calls before a capture, and of replays before a measurement."""
_SPARE = 16
"""Additional positions in the cache, for the steps of the warm-up."""
_MASKLESS = "sdpa_without_mask"
AttentionInterface.register(_MASKLESS, sdpa_attention_forward)  # and no function that makes masks


@dataclass(frozen=True)
class Timing:
    """Median, 20th and 80th percentile of the rounds, in microseconds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Speed:
    """The times of one phase with dense and with packed weights, or the reason of its `failure`.

    Attributes:
        phase: `decode` (a token after the prompt) or `prefill` (a forward of the prompt).
        sequences: Number of sequences at a time.
        prompt: Number of tokens of each prompt.
    """

    phase: str
    sequences: int
    prompt: int
    dense: Timing | None = None
    packed: Timing | None = None
    failure: str | None = None


COLUMNS = ("phase", "sequences", "prompt", "dense ms", "packed ms", "20–80%", "× dense")


def rows(speeds: Sequence[Speed]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a table with `COLUMNS`."""
    for speed in speeds:
        case = speed.phase, str(speed.sequences), str(speed.prompt)
        if speed.dense is None or speed.packed is None:
            yield (*case, f"not measured: {speed.failure}", "", "", "")
            continue
        dense, packed = speed.dense.median / 1e3, speed.packed.median / 1e3
        spread = f"{speed.packed.low / 1e3:.3f}–{speed.packed.high / 1e3:.3f}"
        yield (*case, f"{dense:.3f}", f"{packed:.3f}", spread, f"{dense / packed:.2f}")


@torch.no_grad()
def measure(
    dense: PreTrainedModel,
    packed: PreTrainedModel,
    *,
    batch_sizes: Sequence[int] = (1, 8, 32),
    prompt_tokens: int = 128,
    prefill_tokens: int = 2048,
    new_tokens: int = 32,
    rounds: int = 10,
    compiled: bool = False,
) -> Iterator[Speed]:
    """Time decoding and prefill of two models on one CUDA device, and yield each result.

    Prefill comes last, after cuSPARSELt's layout of the packed 2:4 layers was built, which takes
    another 0.5625 of their dense bytes.

    Args:
        dense: The model with dense weights, in evaluation mode.
        packed: The same model with packed weights.
        batch_sizes: Numbers of sequences that are decoded at a time.
        prompt_tokens: Length of the prompt before the decoded tokens.
        prefill_tokens: Length of the prompt of the prefill, of one sequence. Both lengths are cut
            to the positions of the model.
        new_tokens: Number of decoded tokens of one round.
        rounds: Number of rounds, at least two.
        compiled: Whether `torch.compile` compiles both models.
    """
    sides = {"dense": dense, "packed": packed}
    most = (longest_sequence(dense.config) or 2**31) - new_tokens - _SPARE
    vocabulary = dense.config.get_text_config().vocab_size
    cases = [("decode", size, prompt_tokens) for size in batch_sizes]
    for phase, size, length in [*cases, ("prefill", 1, prefill_tokens)]:
        prompt = torch.randint(vocabulary, (size, max(1, min(length, most))), device=dense.device)
        case = phase, size, prompt.shape[1]
        try:
            if phase == "prefill":
                for layer in packed.modules():
                    if isinstance(layer, Sparse24Linear):
                        layer.compress()
            # Both are prepared before either is timed, so that the rounds interleave them.
            timed = {
                name: _contestant(model, phase, prompt, new_tokens, compiled)
                for name, model in sides.items()
            }
            timings = take_turns(timed, rounds)
        except Exception as error:  # such as out of memory at this size
            yield Speed(*case, failure=first_line(error))
        else:
            yield Speed(*case, timings["dense"], timings["packed"])


def _contestant(
    model: PreTrainedModel, phase: str, prompt: Tensor, new_tokens: int, compiled: bool
) -> Callable[[], float]:
    """Return a function that runs a prefill, or `new_tokens` steps: it returns µs for one."""
    # Compiled code is captured like eager code, so that only the kernels differ.
    forward: Callable[..., Any] = torch.compile(model, dynamic=False) if compiled else model
    if phase == "prefill":
        with without_masks(model):
            return graphed([lambda: prefill(forward, prompt)])
    decoder = Decoder(model, prompt, new_tokens, forward)
    graph = captured([decoder.step])

    def replay() -> None:
        for _ in range(new_tokens):
            graph.replay()

    def once() -> float:
        decoder.rewind()
        return microseconds(replay) / new_tokens

    return once


def prefill(forward: Callable[..., Any], prompt: Tensor) -> Tensor:
    """Return the logits (batch, 1, vocabulary) of the last token."""
    logits: Tensor = forward(prompt, use_cache=False, logits_to_keep=1).logits
    return logits


class Decoder:
    """Greedy decoding with a static cache, one step a token, which a CUDA graph can capture.

    A captured step must not synchronise with the host. Therefore it gets the attention mask of all
    positions: without it, OPT would build one of the present length.

    Args:
        model: The model, in evaluation mode.
        prompt: Token ids, (batch, length).
        new_tokens: The largest number of steps between two rewinds.
        forward: The model for the steps, compiled or not; `None` for `model`, which always reads
            the prompt.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        new_tokens: int,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.forward = model if forward is None else forward
        length = prompt.shape[1]
        positions = length + new_tokens + _SPARE
        self.cache = StaticCache(config=model.config, max_cache_len=positions)
        self.mask = prompt.new_ones(len(prompt), positions)
        indices = torch.arange(length, device=prompt.device).expand_as(prompt)
        logits = self._logits(model, prompt, indices)
        self.token = logits[:, -1:].argmax(-1)
        self.position = torch.full_like(self.token, length)
        # A captured graph holds addresses, so that rewinding has to copy into the same tensors.
        # Keys and values need no copy, since the steps overwrite them in order.
        counters = [self.token, self.position]
        for layer in self.cache.layers:
            tensors = [value for value in vars(layer).values() if isinstance(value, Tensor)]
            counters += [tensor for tensor in tensors if not tensor.is_floating_point()]
        self._start = [(tensor, tensor.clone()) for tensor in counters]

    def step(self) -> None:
        """Replace `token` (batch, 1) by the likeliest next one, in place."""
        logits = self._logits(self.forward, self.token, self.position)
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.add_(1)

    def rewind(self) -> None:
        """Reset the cache, `token` and `position` to the end of the prompt."""
        for tensor, value in self._start:
            tensor.copy_(value)

    def _logits(self, forward: Callable[..., Any], tokens: Tensor, positions: Tensor) -> Tensor:
        output = forward(
            tokens,
            attention_mask=self.mask,
            past_key_values=self.cache,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits
        return logits


@contextmanager
def without_masks(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with full attention run SDPA's own causal attention in this context.

    A prompt without padding needs no mask. While a CUDA graph is captured, transformers makes one
    anyway, and with a mask SDPA is several times slower than in `generate`. Models with sliding
    windows, or without SDPA, are not affected.
    """
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None
    if attention_of(config) != "sdpa" or kinds != {"full_attention"} or windowed:
        yield
        return
    model.set_attn_implementation(_MASKLESS)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def take_turns(measured: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, Timing]:
    """Measure each contestant once a round.

    Each function in `measured` runs its contestant once, and returns microseconds. `rounds` is at
    least two.
    """
    microseconds_of: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(rounds):
        for name, once in measured.items():
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
