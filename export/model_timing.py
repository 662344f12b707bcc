"""Prefill and decode of a whole model: the same weights dense and sparse, taking turns.

All contestants replay CUDA graphs. Each side runs as captured eager code and as captured code of
`torch.compile`; its faster way counts, and both are reported.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from export.backends.timing import Timing, captured, graphed, microseconds, take_turns
from export.backends.tuning import REPEATS
from mrp_lightning.errors import OptionError

SPARE = 16
"""Places in the cache for the steps of the warm-up."""


@dataclass(frozen=True)
class ModelTime:
    """One way to run one side of a comparison.

    Attributes:
        phase: `prefill` (a forward of the prompt) or `decode` (one token after it).
        side: `dense` or `sparse`.
        way: `eager` or `compiled`; both are captured in a CUDA graph.
        tokens: Prompt tokens of each sequence.
        timing: Of one forward; `None` where it failed.
        compile_seconds: Of the first call, 0 for eager.
        failure: The reason where there is no timing.
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

    Args:
        model: A causal language model in evaluation mode.
        prompt: Token ids (batch, length).
        new_tokens: Steps between two rewinds.
        forward: The model, compiled or not.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        prompt: Tensor,
        new_tokens: int,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        self.forward = forward or model
        length = prompt.shape[1]
        self.cache = StaticCache(config=model.config, max_cache_len=length + new_tokens + SPARE)
        positions = torch.arange(length, device=prompt.device).expand_as(prompt)
        logits = model(
            prompt, past_key_values=self.cache, position_ids=positions, use_cache=True
        ).logits
        self.token = logits[:, -1:].argmax(-1)
        self.position = torch.full_like(self.token, length)
        self._start = [(tensor, tensor.clone()) for tensor in self._counters()]

    def step(self) -> None:
        """Replace `token` by the next one."""
        logits = self.forward(
            self.token,
            past_key_values=self.cache,
            position_ids=self.position,
            use_cache=True,
        ).logits
        self.token.copy_(logits[:, -1:].argmax(-1))
        self.position.add_(1)

    def rewind(self) -> None:
        """Go back to the end of the prompt."""
        for tensor, value in self._start:
            tensor.copy_(value)

    def _counters(self) -> list[Tensor]:
        counters = [self.token, self.position]
        for layer in self.cache.layers:
            integers = [v for v in vars(layer).values() if isinstance(v, Tensor)]
            counters += [v for v in integers if not v.is_floating_point()]
        return counters


@torch.no_grad()
def time_models(
    dense: PreTrainedModel,
    sparse: PreTrainedModel,
    *,
    batch_sizes: Sequence[int] = (1,),
    prompt_tokens: int = 2048,
    new_tokens: int = 128,
    compile_mode: str | None = "default",
    phases: Sequence[str] = ("prefill", "decode"),
    repeats: int = REPEATS,
) -> list[ModelTime]:
    """Time prefill and decode of both models, on the CUDA device where they are.

    Args:
        dense: The pruned weights as ordinary matrices.
        sparse: The same weights on a back-end.
        batch_sizes: Sequences at a time.
        prompt_tokens: Length of each prompt.
        new_tokens: Decode steps of one repeat.
        compile_mode: For `torch.compile`; `None` leaves the compiled contestants out.
        phases: Which of the two to time.
        repeats: Rounds.
    """
    if dense.device.type != "cuda":
        raise OptionError(f"Speed is measured on CUDA devices; the model is on {dense.device}.")
    found = []
    ways = ["eager"] if compile_mode is None else ["eager", "compiled"]
    for batch_size in batch_sizes:
        ids = torch.randint(dense.config.vocab_size, (batch_size, prompt_tokens))
        prompt = ids.to(dense.device)
        for phase in phases:
            runs: dict[tuple[str, str], Callable[[], float]] = {}
            seconds: dict[tuple[str, str], float] = {}
            failures: dict[tuple[str, str], str] = {}
            for side, model in {"dense": dense, "sparse": sparse}.items():
                for way in ways:
                    mode = compile_mode if way == "compiled" else None
                    start = time.perf_counter()
                    try:
                        runs[side, way] = _contestant(model, phase, prompt, new_tokens, mode)
                    except Exception as error:  # one contestant must not end the comparison
                        failures[side, way] = f"{type(error).__name__}: {error}".splitlines()[0]
                    seconds[side, way] = time.perf_counter() - start if mode else 0.0
            named = {f"{side} {way}": run for (side, way), run in runs.items()}
            timings = take_turns(named, repeats)
            for side, way in seconds:
                found.append(
                    ModelTime(
                        phase,
                        side,
                        way,
                        batch_size,
                        prompt_tokens,
                        timings.get(f"{side} {way}"),
                        seconds[side, way],
                        failures.get((side, way)),
                    )
                )
            del runs, named  # and with them the graphs' memory
    return found


def _contestant(
    model: PreTrainedModel, phase: str, prompt: Tensor, new_tokens: int, mode: str | None
) -> Callable[[], float]:
    """A function that runs once and gives microseconds a forward."""
    torch.compiler.reset()
    forward: Callable[..., Any] = model
    if mode is not None:
        # The graph is captured here, for all contestants alike.
        forward = torch.compile(model, mode=None if mode == "default" else mode, dynamic=False)
    if phase == "prefill":
        return graphed([lambda: forward(prompt, use_cache=False, logits_to_keep=1)])
    decoder = Decoder(model, prompt, new_tokens, forward)
    graph = captured([decoder.step])

    def replay() -> None:
        for _ in range(new_tokens):
            graph.replay()

    def once() -> float:
        decoder.rewind()
        return microseconds(replay) / new_tokens

    return once
