"""Prefill and decode of a whole model: the same weights dense and sparse, taking turns."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from export.speed.options import SpeedOptions
from export.speed.timing import REPEATS, Timing, captured, graphed, microseconds, take_turns
from mrp_lightning.errors import first_line
from mrp_sparse.upstream import attention_of

SPARE = 16
"""Further places in the cache, for the steps of the warm-up."""
MASKLESS = "sdpa_without_mask"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)  # and no function that makes masks


@dataclass(frozen=True)
class ModelTime:
    """The time of one way to run one side of a comparison, or the reason why there is none.

    Attributes:
        phase: `prefill` (a forward of the prompt) or `decode` (one token after it).
        side: `dense` or `sparse`.
        way: `eager` or `compiled`; both are captured in a CUDA graph.
        tokens: Number of prompt tokens of each sequence.
        timing: Time of one forward.
        compile_seconds: Time of compiling and capturing, 0 for eager.
    """

    phase: str
    side: str
    way: str
    batch_size: int
    tokens: int
    timing: Timing | None
    compile_seconds: float = 0.0
    failure: str | None = None


class Decoder:
    """Greedy decoding into a static cache, one captured step a token.

    A step reads nothing back to the host, so that it can be captured: it is given the attention
    mask of all places, from which OPT would else make one of the length it has reached.

    The model is in evaluation mode, the prompt is (batch, length), there are at most `new_tokens`
    steps between two rewinds, and `forward` is the model, compiled or not.
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
        places = length + new_tokens + SPARE
        self.cache = StaticCache(config=model.config, max_cache_len=places)
        self.mask = prompt.new_ones(len(prompt), places)
        positions = torch.arange(length, device=prompt.device).expand_as(prompt)
        logits = self._logits(model, prompt, positions)
        self.token = logits[:, -1:].argmax(-1)
        self.position = torch.full_like(self.token, length)
        self._start = [(tensor, tensor.clone()) for tensor in self._counters()]

    def step(self) -> None:
        """Replace `token` by the next one."""
        logits = self._logits(self.forward, self.token, self.position)
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.add_(1)

    def rewind(self) -> None:
        """Go back to the end of the prompt."""
        for tensor, value in self._start:
            tensor.copy_(value)

    def _logits(self, forward: Callable[..., Any], tokens: Tensor, positions: Tensor) -> Tensor:
        return forward(
            tokens,
            attention_mask=self.mask,
            past_key_values=self.cache,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
        ).logits

    def _counters(self) -> list[Tensor]:
        counters = [self.token, self.position]
        for layer in self.cache.layers:
            integers = [v for v in vars(layer).values() if isinstance(v, Tensor)]
            counters += [v for v in integers if not v.is_floating_point()]
        return counters


@contextmanager
def without_masks(*models: PreTrainedModel) -> Iterator[None]:
    """Within it, models that attend to all tokens before use SDPA's own causal attention.

    A prompt without padding needs no mask. transformers makes one all the same while a CUDA graph
    is captured, and with a mask SDPA is several times slower than what `generate` runs. Models with
    sliding windows, or without SDPA, stay as they are.
    """
    changed = [model for model in models if _attends_to_all(model)]
    for model in changed:
        model.set_attn_implementation(MASKLESS)
    try:
        yield
    finally:
        for model in changed:
            model.set_attn_implementation("sdpa")


def _attends_to_all(model: PreTrainedModel) -> bool:
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    windowed = getattr(config, "sliding_window", None) is not None
    return attention_of(config) == "sdpa" and kinds == {"full_attention"} and not windowed


@torch.no_grad()
def time_models(
    dense: PreTrainedModel, sparse: PreTrainedModel, options: SpeedOptions
) -> Iterator[list[ModelTime]]:
    """Time prefill and decode of the same weights, dense and on a back-end, on a CUDA device.

    For each batch size and phase all ways of both sides are given.
    """
    sides = {"dense": dense, "sparse": sparse}
    for batch_size in options.batch_sizes:
        ids = torch.randint(dense.config.vocab_size, (batch_size, options.prompt_tokens))
        for phase in options.phases:
            yield _compare(sides, phase, ids.to(dense.device), options)


def _compare(
    sides: Mapping[str, PreTrainedModel], phase: str, prompt: Tensor, options: SpeedOptions
) -> list[ModelTime]:
    """Time all ways of all sides in turns. One that fails does not keep others from running."""
    torch.compiler.reset()  # once: code that is forgotten takes its kernels out of captured graphs
    modes: dict[str, str | None] = {"eager": None}
    if options.compile_mode is not None:
        modes["compiled"] = options.compile_mode
    runs: dict[str, Callable[[], float]] = {}
    compile_seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    ways = {f"{side} {way}": (side, way) for side in sides for way in modes}
    for name, (side, way) in ways.items():
        start = time.perf_counter()
        try:
            runs[name] = _contestant(sides[side], phase, prompt, options.new_tokens, modes[way])
        except Exception as error:
            failures[name] = first_line(error)
        compile_seconds[name] = 0.0 if modes[way] is None else time.perf_counter() - start
    try:
        timings = take_turns(runs, REPEATS)
    except Exception as error:
        timings, failures = {}, dict.fromkeys(runs, first_line(error)) | failures
    return [
        ModelTime(
            phase=phase,
            side=side,
            way=way,
            batch_size=prompt.shape[0],
            tokens=prompt.shape[1],
            timing=timings.get(name),
            compile_seconds=compile_seconds[name],
            failure=failures.get(name),
        )
        for name, (side, way) in ways.items()
    ]


def _contestant(
    model: PreTrainedModel, phase: str, prompt: Tensor, new_tokens: int, mode: str | None
) -> Callable[[], float]:
    """A function that runs once and gives microseconds a forward."""
    forward: Callable[..., Any] = model
    if mode is not None:
        # The graph is captured here, for all contestants alike.
        forward = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
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
    """The logits (batch, 1, vocabulary) of the last token."""
    return forward(prompt, use_cache=False, logits_to_keep=1).logits
