"""`python -m export.generate DIR --prompt TEXT`: stream what a model writes, and tell its speed."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer
from transformers.utils import logging as transformers_logging

from export.backends.torchao_format import load
from export.speed.twins import storage_bytes
from mrp_lightning.arguments import checked
from mrp_lightning.cli.command import make_parser, number_from, told
from mrp_lightning.environment import device_named, machine
from mrp_lightning.errors import DataError, first_line
from mrp_lightning.models.skeleton import longest_sequence
from mrp_lightning.models.tokenizers import load_tokenizer


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


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line. Status 2: a mistake of the user's."""
    transformers_logging.disable_progress_bar()
    with told():
        options = _parser().parse_args(args)
        device = device_named(options.device)
        print(f"On {machine(device)}\n")
        speeds = []
        for directory in filter(None, (options.compare, options.directory)):
            print(f"--- {directory}")
            speeds.append(write(directory, options.prompt, options.max_new_tokens, device))
            print(f"{speeds[-1]}\n")
    if options.compare and speeds[0].rate:
        before, after = speeds
        print(
            f"{after.rate / before.rate:.2f} times the tokens a second, "
            f"{after.num_bytes / before.num_bytes:.2f} of the memory"
        )


@checked
def write(
    directory: str | os.PathLike[str], prompt: str, max_new_tokens: int, device: torch.device
) -> Speed:
    """Let a model go on with a text, likeliest token after likeliest token, and print it.

    Args:
        directory: A model, dense or packed, with its tokenizer.
        prompt: The beginning of the text.
        max_new_tokens: Where to stop, if the model does not stop by itself.
        device: Where it runs.

    Raises:
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
    streamer = TimedStreamer(tokenizer)
    with torch.inference_mode():
        model.generate(**tokens, max_new_tokens=2, do_sample=False)  # compiles, and warms up
        begin = time.perf_counter()
        model.generate(**tokens, max_new_tokens=max_new_tokens, do_sample=False, streamer=streamer)
    _, *times = streamer.times
    spent = times[-1] - times[0]
    return Speed(
        tokens=len(times),
        first=times[0] - begin,
        rate=(len(times) - 1) / spent if spent else 0.0,
        num_bytes=storage_bytes(model),
    )


def _parser() -> Any:
    parser = make_parser("python -m export.generate", str(__doc__))
    option = parser.add_argument
    option("directory", metavar="DIR", help="a packed (or dense) model")
    option("--prompt", required=True, metavar="TEXT", help="how the text begins")
    what = "a model that writes the same first, to compare with"
    option("--compare", metavar="DENSE_DIR", help=what)
    what = "default: 128"
    option("--max-new-tokens", type=number_from(1), default=128, metavar="N", help=what)
    option("--device", help="default: cuda if present")
    return parser


if __name__ == "__main__":
    main()
