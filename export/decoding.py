"""What a model writes, likeliest token after likeliest token, and how fast.

On a CPU a step of decoding is compiled ahead of time, once for each shape and format (minutes), and
kept for the next start. Where that cannot be done, a warning says why, and Python takes each step.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from export.backends.torchao_format import load
from export.compiled_step import CompiledStep, round_activations
from export.speed.twins import storage_bytes
from mrp_lightning.arguments import checked
from mrp_lightning.errors import DataError, OptionError, first_line
from mrp_lightning.models.skeleton import longest_sequence
from mrp_lightning.models.tokenizers import load_tokenizer
from mrp_lightning.packed.bitmask4_linear import Bitmask4Linear
from mrp_lightning.packed.eight_bit_head import round_head
from mrp_lightning.packed.eight_bit_linear import EightBitLinear

log = logging.getLogger(__name__)

_FREE = {"bos_token_id", "eos_token_id", "pad_token_id", "do_sample", "temperature", "top_k"}
_FREE |= {"top_p", "max_length", "max_new_tokens", "transformers_version", "use_cache"}
_FREE |= {"_from_model_config", "cache_implementation", "return_dict_in_generate"}
_FREE |= {f"output_{what}" for what in ("attentions", "hidden_states", "scores", "logits")}
"""Settings of `generation_config` that do not change which token is the likeliest."""
FEW = 8
"""Up to so many tokens packed rows are multiplied as they are decoded."""


@dataclass(frozen=True)
class Speed:
    """How fast a model wrote.

    Attributes:
        tokens: Number of tokens that it wrote.
        first: Seconds until the first of them.
        rate: Tokens a second after the first; 0 where there was but one.
        num_bytes: Bytes that its weights take in memory.
    """

    tokens: int
    first: float
    rate: float
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"[{self.tokens} tokens: the first after {self.first:.2f} s, then {self.rate:.1f} a "
            f"second; {self.num_bytes / 2**20:,.0f} MiB of weights]"
        )


class TimedStreamer(TextStreamer):
    """Print tokens as they come, and note when they came."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)
        self.times: list[float] = []  # of the prompt, then of each token

    def put(self, value: Tensor) -> None:
        """Take the prompt, then the tokens one by one."""
        self.times.append(time.perf_counter())
        super().put(value)


@checked
def write(
    directory: str | os.PathLike[str],
    prompt: str,
    max_new_tokens: int,
    device: torch.device,
    *,
    compiled: bool = False,
    eight_bits: bool = False,
    eight_bit_head: bool = False,
) -> Speed:
    """Let a model go on with a text, likeliest token after likeliest token, and print it.

    Args:
        directory: A model, dense or packed, with its tokenizer.
        prompt: The beginning of the text.
        max_new_tokens: Where to stop, if the model does not stop by itself.
        device: Where it runs.
        compiled: Whether steps run without Python, if this model can be compiled so.
        eight_bits: Whether layers of four bits round their activations to 8 bits, where few tokens
            are multiplied; what that does to the logits is printed.
        eight_bit_head: Whether the head is rounded to 8 bits; the same is printed.

    Raises:
        OptionError: There is no head that can be rounded; see `Head.of`.
        FileNotFoundError: The directory holds no model.
        FormatError: See `export.load`.
        DataError: There is no tokenizer in it, the prompt is empty, or the text would get longer
            than the model's positions.
    """
    model: Any = load(Path(directory), dtype="auto").eval()
    model.to(device)
    try:
        tokenizer = load_tokenizer(directory)
    except (FileNotFoundError, DataError) as error:
        raise DataError(
            f"{directory} holds no tokenizer that can be loaded: {first_line(error)}"
        ) from error
    tokens = tokenizer(prompt, return_tensors="pt").to(device)
    if not tokens["input_ids"].numel():
        raise DataError("`--prompt` is empty; give the beginning of a text.")
    most, length = longest_sequence(model.config), tokens["input_ids"].shape[1]
    if most is not None and length + max_new_tokens > most:
        step = f"at most {most - length}" if length < most else "a shorter prompt"
        raise DataError(
            f"`--prompt` has {length} tokens and `--max-new-tokens` is {max_new_tokens}, but "
            f"{directory} has {most} positions, beyond which it writes nothing of sense. Give "
            f"{step}."
        )
    tokens = {key: tokens[key] for key in ("input_ids", "attention_mask")}
    first = tokens["input_ids"][:, :FEW]
    if isinstance(model.get_output_embeddings(), EightBitLinear):
        print("[a head of 8 bits: it is stored so]")
    elif eight_bit_head:
        _tell(model, first, "a head of 8 bits", round_head)
    if eight_bits:
        if any(isinstance(module, Bitmask4Linear) for module in model.modules()):
            _tell(model, first, "activations of 8 bits", round_activations)
        else:
            print("[activations of 8 bits: no layer has four bits, and none is rounded]")
    streamer = TimedStreamer(tokenizer)
    with torch.inference_mode():
        written = compiled and _write_compiled(model, tokens["input_ids"], max_new_tokens, streamer)
        if not written:
            model.generate(**tokens, max_new_tokens=2, do_sample=False)  # warms up
            model.generate(
                **tokens, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer
            )
    begin, *times = streamer.times
    spent = times[-1] - times[0]
    return Speed(
        tokens=len(times),
        first=times[0] - begin,
        rate=(len(times) - 1) / spent if spent else 0.0,
        num_bytes=storage_bytes(model),
    )


def _write_compiled(
    model: Any, prompt: Tensor, max_new_tokens: int, streamer: TimedStreamer
) -> bool:
    """Write by steps without Python, and say whether that could be done; a warning says why not."""
    try:
        if asks := set(model.generation_config.to_diff_dict()) - _FREE:
            raise OptionError(f"its generation_config asks for {', '.join(sorted(asks))}")
        step = CompiledStep(model, prompt.shape[1] + max_new_tokens)
    except Exception as error:  # each part of torch.export and the compilers has its own
        log.debug("The step was not compiled.", exc_info=True)
        log.warning(
            "Python takes each step of decoding, which is slower: the step could not be compiled "
            "(%s).",
            first_line(error),
        )
        return False
    step.read(prompt[:, :1])
    step(prompt[:, :1])  # warms up
    streamer.put(prompt)
    logits = step.read(prompt)
    stop = model.generation_config.eos_token_id
    ends = set(stop if isinstance(stop, list) else [stop])
    for left in reversed(range(max_new_tokens)):
        token = logits.argmax(dim=-1).view(1, 1)
        streamer.put(token[0])
        if not left or int(token) in ends:
            break
        logits = step(token)
    streamer.end()
    return True


@torch.no_grad()
def _tell(model: Any, tokens: Tensor, what: str, change: Callable[[Any], object]) -> None:
    """Change a model, and tell what that does to the logits of a few tokens."""
    before = model(tokens).logits.double()
    change(model)
    after = model(tokens).logits.double()
    error = float((after - before).norm() / before.norm())
    same = float((after.argmax(-1) == before.argmax(-1)).double().mean())
    print(
        f"[{what}: logits are off by {error:.2%}, and the likeliest token is the same for "
        f"{same:.0%} of {tokens.shape[1]} tokens]"
    )
