"""Write the continuation of a prompt by one model or two, and measure their speed."""

import logging
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from export.loading import load, storage_bytes
from mrp_lightning.data.sampling import attention_of_one_token
from mrp_lightning.devices import device_named, machine
from mrp_lightning.errors import DataError, counted, first_line
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.models.loading import load_tokenizer
from mrp_sparse.eight_bit_head import EightBitLinear, round_head
from mrp_sparse.huggingface import expand_bitmasks
from mrp_sparse.packed_linear import Bitmask4Linear, round_activations

log = logging.getLogger(__name__)

_FEW = 2
"""Number of tokens up to which packed rows are decoded and multiplied in one kernel."""
_WARM_UP_TOKENS = 6
"""Tokens of a warm-up: a compiled step runs once to warm up and once to be captured; the prompt is
another graph."""


@dataclass(frozen=True)
class Speed:
    """The speed of a generation."""

    tokens: int  # new ones
    first: float  # seconds until the first new token
    rate: float  # tokens a second after the first; 0 for a single token
    num_bytes: int  # of the parameters and buffers in memory

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


def generate(options: Namespace) -> None:
    """Print the continuations that the options of `mrp-lightning generate` ask for.

    Raises:
        OptionError: The device does not exist here, or the head cannot be rounded to 8 bits.
        FileNotFoundError: The directory holds no model.
        FormatError: See `export.load`.
        DataError: The directory has no tokenizer, the prompt is empty, or the text would exceed the
            model's positions.
    """
    device = device_named(options.device)
    print(f"On {machine(device)}\n")
    speeds = []
    for directory in filter(None, (options.compare, options.directory)):
        print(f"--- {directory}")
        speeds.append(_generate(directory, options, device))
    if options.compare and speeds[0].rate:
        dense, packed = speeds
        print(
            f"{packed.rate / dense.rate:.2f} times the tokens a second, "
            f"{packed.num_bytes / dense.num_bytes:.2f} of the memory"
        )


def _generate(directory: str, options: Namespace, device: torch.device) -> Speed:
    """Print a model's continuation of a text and its speed, and return the speed."""
    model: Any = load(Path(directory), dtype="auto").eval()
    expand_bitmasks(model.to(device))
    try:
        tokenizer = load_tokenizer(directory)
    except (FileNotFoundError, DataError) as error:
        raise DataError(
            f"{directory} holds no tokenizer that can be loaded: {first_line(error)}"
        ) from error
    tokens = tokenizer(options.prompt, return_tensors="pt").to(device)
    if not tokens["input_ids"].numel():
        raise DataError("`--prompt` is empty; give the beginning of a text.")
    positions, length = longest_sequence(model.config), tokens["input_ids"].shape[1]
    if positions is not None and length + options.max_new_tokens > positions:
        step = f"at most {positions - length}" if length < positions else "a shorter prompt"
        raise DataError(
            f"`--prompt` has {length} tokens and `--max-new-tokens` is {options.max_new_tokens}, "
            f"but {directory} has {positions} positions, beyond which it writes nothing of sense. "
            f"Give {step}."
        )
    tokens = {key: tokens[key] for key in ("input_ids", "attention_mask")}
    # The changes are measured with few tokens, for which the decoding kernels run: these are the
    # ones that the text is written with.
    first = tokens["input_ids"][:, :_FEW]
    if isinstance(model.get_output_embeddings(), EightBitLinear):
        print("[a head of 8 bits: it is stored so]")
    elif options.head_bits == 8:
        _change(model, first, "a head of 8 bits", round_head)
    layers = [module for module in model.modules() if isinstance(module, Bitmask4Linear)]
    if any(layer.eight_bit_activations for layer in layers):
        print("[activations of 8 bits: the directory asks for them]")
    elif options.activations is not None and layers:
        _change(model, first, "activations of 8 bits", round_activations)
    elif options.activations is not None:
        print("[activations of 8 bits: no layer has four bits, and none is rounded]")
    streamer = TimedStreamer(tokenizer)
    speed = write(model, tokens, streamer, options.max_new_tokens, not options.eager)
    print(f"{speed}\n", flush=True)
    return speed


def write(
    model: Any,
    tokens: Mapping[str, Tensor],
    streamer: TimedStreamer,
    max_new_tokens: int,
    compiled: bool,
) -> Speed:
    """Continue a text greedily by transformers' `generate`, and measure the speed.

    Args:
        model: A language model of transformers, dense or packed, in evaluation.
        tokens: `input_ids` and `attention_mask` of the beginning of the text, each (1, tokens).
        streamer: Prints the tokens as they come; a new one, without `times`.
        max_new_tokens: Number of new tokens at most, ≥ 1; an end token ends the text earlier.
        compiled: Whether the cache is static on a GPU, for which transformers compiles the step.
            If it cannot, a warning gives the reason, and Python takes each step.

    Returns:
        The speed, after a warm-up.
    """
    options: dict[str, Any] = {**tokens, "max_new_tokens": max_new_tokens, "do_sample": False}
    static = {**options, "cache_implementation": "static"}
    if compiled and _is_on_gpu(model) and _is_compiled(model, static):
        model.generate(**static, streamer=streamer)
    else:
        # Without inference mode each operator of ours goes through Python's autograd.
        with torch.inference_mode(), attention_of_one_token():
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


def _is_on_gpu(model: Any) -> bool:
    return bool(model.device.type == "cuda")


def _is_compiled(model: Any, options: Mapping[str, Any]) -> bool:
    """Warm up with a static cache; return False, with a warning, if that fails."""
    try:
        _warm_up(model, options)
    except Exception as error:  # transformers', dynamo's, and the compilers' are of many kinds
        log.debug("The step was not compiled.", exc_info=True)
        log.warning(
            "Python takes each step of decoding, which is slower: the step could not be compiled "
            "(%s).",
            first_line(error),
        )
        return False
    return True


def _warm_up(model: Any, options: Mapping[str, Any]) -> None:
    """Generate a few tokens, in a cache as long as for all of them."""
    most = options["input_ids"].shape[1] + _WARM_UP_TOKENS
    # A criterion stops, not a smaller `max_new_tokens`: that would shorten the cache, and a cache
    # of another length needs another graph.
    stop = [lambda ids, _: torch.full((len(ids),), ids.shape[1] >= most, device=ids.device)]
    model.generate(**options, stopping_criteria=stop)


@torch.no_grad()
def _change(model: Any, tokens: torch.Tensor, name: str, change: Callable[[Any], object]) -> None:
    """Change a model, and print the change of the logits of a few tokens."""
    # Changes are in sequence, so that each error is that of its own change, relative to the model
    # before it.
    exact = model(tokens).logits.double()
    change(model)
    changed = model(tokens).logits.double()
    error = float((changed - exact).norm() / exact.norm())
    agreement = float((changed.argmax(-1) == exact.argmax(-1)).double().mean())
    print(
        f"[{name}: logits are off by {error:.2%}, and the likeliest token is the same for "
        f"{agreement:.0%} of {tokens.shape[1]} tokens]"
    )
