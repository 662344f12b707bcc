"""Greedy generation at batch 1, and its speed.

On a CPU a step of decoding is compiled ahead of time, once for each shape and format (minutes), and
kept for the next start; `step_to_compile` returns it if it is missing. On a GPU transformers
compiles it around a static cache and replays CUDA graphs. Where that fails, a warning gives the
reason, and steps run eagerly.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TextStreamer

from mrp_ground.errors import OptionError, counted, first_line
from mrp_sparse.compiled_step import CompiledStep

log = logging.getLogger(__name__)

_FREE = {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k"}
_FREE |= {"top_p", "max_length", "max_new_tokens", "transformers_version", "use_cache"}
_FREE |= {"_from_model_config", "cache_implementation", "return_dict_in_generate"}
_FREE |= {f"output_{output}" for output in ("attentions", "hidden_states", "scores", "logits")}
"""Settings of `generation_config` that do not change which token is the likeliest."""

_EAGER = "Python takes each step of decoding, which is slower: the step could not be compiled (%s)."
_WARM_UP_TOKENS = 6
"""Tokens of a warm-up: a compiled step runs once to warm up and once to be captured; the prompt is
another graph."""


@dataclass(frozen=True)
class Speed:
    """The speed of a generation.

    Attributes:
        tokens: Number of new tokens.
        first: Seconds until the first new token.
        rate: Tokens a second after the first; 0 for a single token.
        num_bytes: Bytes of the parameters and buffers in memory.
    """

    tokens: int
    first: float
    rate: float
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"[{counted(self.tokens, 'token')}: the first after {self.first:.2f} s, then "
            f"{self.rate:.1f} a second; {self.num_bytes / 2**20:,.0f} MiB of weights]"
        )


class TimedStreamer(TextStreamer):
    """Streamer that prints the prompt and each token as text, and records their times.

    Attributes:
        times: `time.perf_counter()` as the prompt came, then as each token came.
    """

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Receive the prompt, then the tokens one by one."""
        self.times.append(time.perf_counter())
        super().put(value)


def write(
    model: Any,
    tokens: Mapping[str, Tensor],
    streamer: TimedStreamer,
    max_new_tokens: int,
    compiled: bool,
) -> Speed:
    """Continue a text greedily, and measure the speed.

    Args:
        model: A language model of transformers, dense or packed, in evaluation.
        tokens: `input_ids` and `attention_mask` of the beginning of the text, each (1, tokens).
        streamer: Prints the tokens as they come; a new one, without `times`.
        max_new_tokens: Number of new tokens at most, ≥ 1; an end token ends the text earlier.
        compiled: Whether steps run without Python, if this model can be compiled. If it cannot, a
            warning gives the reason, and steps run eagerly.

    Returns:
        The speed, after a warm-up.
    """
    options: dict[str, Any] = {**tokens, "max_new_tokens": max_new_tokens, "do_sample": False}
    on_cpu, written = _is_on_cpu(model), False
    if compiled and not on_cpu and _is_static(model, options):
        options["cache_implementation"] = "static"
        model.generate(**options, streamer=streamer)
        written = True
    with torch.inference_mode():
        if compiled and on_cpu:
            written = _write_compiled(model, tokens["input_ids"], max_new_tokens, streamer)
        if not written:
            _warm_up(model, options)
            model.generate(**options, streamer=streamer)
    # The prompt is streamed before the model reads it, so that its time is the start. The rate
    # leaves the first token out, whose time is mostly that of reading the prompt.
    begin, *times = streamer.times
    spent = times[-1] - times[0]
    return Speed(
        tokens=len(times),
        first=times[0] - begin,
        rate=(len(times) - 1) / spent if spent else 0.0,
        num_bytes=storage_bytes(model),
    )


def step_to_compile(model: Any, length: int) -> CompiledStep | None:
    """Return the step of a model for `length` tokens, prompt included, for `compile_step`.

    Returns:
        The step; `None` if it is compiled already, if the model is not on the CPU, or if it is
        refused before any compilation, for which `write` logs the reason.
    """
    if not _is_on_cpu(model):
        return None
    try:
        _require_greedy(model)
        step = CompiledStep(model, length, later=True)
    except Exception:  # also of the model's own code, of any type
        log.debug("The step cannot be compiled.", exc_info=True)
        return None
    return None if step.file.is_file() else step


def compile_step(step: CompiledStep) -> None:
    """Compile a step for the next start. A failure is a warning, since the text is written."""
    try:
        step.prepare()
    except Exception as error:  # each part of torch.export and the compilers has its own
        log.debug("The step was not compiled.", exc_info=True)
        log.warning(_EAGER, first_line(error))


def _require_greedy(model: Any) -> None:
    """Raise an `OptionError` if generation settings, which a step ignores, change its tokens."""
    if asks := set(model.generation_config.to_diff_dict()) - _FREE:
        raise OptionError(f"its generation_config asks for {', '.join(sorted(asks))}")


def _is_on_cpu(model: Any) -> bool:
    return bool(model.device.type == "cpu")


def _warm_up(model: Any, options: Mapping[str, Any]) -> None:
    """Generate a few tokens, in a cache as long as for all of them."""
    most = options["input_ids"].shape[1] + _WARM_UP_TOKENS
    # A criterion stops, not a smaller `max_new_tokens`: that would shorten the cache, and a cache
    # of another length needs another graph.
    stop = [lambda ids, _: torch.full((len(ids),), ids.shape[1] >= most, device=ids.device)]
    model.generate(**options, stopping_criteria=stop)


def _is_static(model: Any, options: Mapping[str, Any]) -> bool:
    """Return whether a model generates with a static cache, and compile its step by doing so.

    transformers compiles the step where the cache and the quantizer allow it. A failure is
    logged, and the result is then False.
    """
    try:
        _warm_up(model, {**options, "cache_implementation": "static"})
    except Exception as error:  # transformers', dynamo's, and the compilers' are of many kinds
        log.debug("The step was not compiled.", exc_info=True)
        log.warning(_EAGER, first_line(error))
        return False
    return True


def _write_compiled(
    model: Any, prompt: Tensor, max_new_tokens: int, streamer: TimedStreamer
) -> bool:
    """Generate by compiled steps; return False, with a warning, if the model cannot be compiled."""
    try:
        _require_greedy(model)
        step = CompiledStep(model, prompt.shape[1] + max_new_tokens)
    except Exception as error:  # each part of torch.export and the compilers has its own
        log.debug("The step was not compiled.", exc_info=True)
        log.warning(_EAGER, first_line(error))
        return False
    # `read` starts at position 0 again, so that the warm-up leaves no token in the cache.
    step.read(prompt[:, :1])
    step(prompt[:, :1])  # warms up
    streamer.put(prompt)
    logits = step.read(prompt)
    stop = model.generation_config.eos_token_id
    # Without an end token this is {None}, which no token equals.
    ends = set(stop if isinstance(stop, list) else [stop])
    for left in reversed(range(max_new_tokens)):
        token = logits.argmax(dim=-1).view(1, 1)
        streamer.put(token[0])
        # No step is computed after the last token, since nobody reads its logits.
        if not left or int(token) in ends:
            break
        logits = step(token)
    streamer.end()
    return True


def storage_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and buffers in memory, each storage once.

    A 2:4 tensor subclass gives the `nbytes` of its dense matrix; its parts are counted instead.
    """
    storages: dict[int, int] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        for part in _parts(tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _parts(tensor: Tensor) -> list[Tensor]:
    flatten: Callable[[], tuple[list[str], Any]] | None
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return [tensor]
    return [part for name in flatten()[0] for part in _parts(getattr(tensor, name))]
