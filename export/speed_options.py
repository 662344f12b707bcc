"""The options of timing a packed model, apart from the work: help need not wait for torch."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from mrp_lightning.commands.command import number_from

BACKENDS = ("auto", "triton", "torch", "torchao", "torchao-fp8")
TARGETS: Mapping[str, tuple[int, ...]] = {
    "decode": (1, 8),
    "prefill": (1024, 4096),
    "both": (1, 8, 1024, 4096),
}
"""By target, the numbers of tokens at which a sparse layer must be faster than a dense one."""

LAYER_TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class SpeedOptions:
    """The options for measuring a packed model and its dense twin.

    Attributes:
        backend: The back-end of the packed layers, one of `BACKENDS`.
        target: The phases for which weights are prepared, a key of `TARGETS`.
        compile_mode: Mode of `torch.compile` on both sides; `None` times only eager code.
        batch_sizes: Numbers of sequences at a time.
        prompt_tokens: Length of each prompt.
        new_tokens: Decode steps of one repeat.
        layer_tokens: Numbers of tokens at which every kernel is timed on each layer shape; empty to
            time no layers.
    """

    backend: str = "auto"
    target: str = "both"
    compile_mode: str | None = "default"
    batch_sizes: Sequence[int] = (1,)
    prompt_tokens: int = 2048
    new_tokens: int = 128
    layer_tokens: Sequence[int] = LAYER_TOKENS

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of whole models that are timed."""
        return ("prefill", "decode") if self.target == "both" else (self.target,)

    @classmethod
    def of(cls, parsed: Namespace) -> Self:
        """Return the options of a command line that `add_arguments` has extended."""
        return cls(**{field.name: getattr(parsed, field.name) for field in fields(cls)})


def add_arguments(parser: Any) -> None:
    """Add the arguments of `SpeedOptions` to a command line."""
    option, number = parser.add_argument, number_from(1)
    option("--backend", choices=BACKENDS, default="auto", help="the back-end to measure")
    text = "mode of torch.compile, for both sides; none: eager code alone"
    option(
        "--compile",
        dest="compile_mode",
        type=_mode,
        default="default",
        metavar="MODE",
        help=text,
    )
    text = "the phase to keep weights ready for; both keeps two layouts in memory (default: both)"
    option("--target", choices=TARGETS, default="both", help=text)
    option("--batch-sizes", nargs="+", type=number, default=[1], metavar="N")
    option("--prompt-tokens", type=number, default=2048, metavar="N")
    option("--new-tokens", type=number, default=128, metavar="N")
    text = "time every kernel on each layer shape at so many tokens; no number: only the models"
    tokens = {"type": number, "nargs": "*", "default": [*LAYER_TOKENS]}
    option("--layer-tokens", **tokens, metavar="N", help=text)


def _mode(text: str) -> str | None:
    return None if text == "none" else text
