"""The options of a comparison of speed, in code and on the command lines that measure."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

from export.backends.apply import BACKENDS, TARGETS
from mrp_lightning.cli.command import number_from

LAYER_TOKENS = (1, 4, 8, 16, 64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class SpeedOptions:
    """The options by which a packed model and its dense twin are measured.

    Attributes:
        backend: What runs the packed layers, one of `BACKENDS`.
        target: What the weights are kept ready for, a key of `TARGETS`.
        compile_mode: Mode of `torch.compile`, on both sides; `None` times eager code alone.
        batch_sizes: Numbers of sequences at a time.
        prompt_tokens: Length of each prompt.
        new_tokens: Decode steps of one repeat.
        layer_tokens: Numbers of tokens at which every kernel is timed on each layer shape; empty
            leaves the layers out.
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
        """The options of a command line whose parser `add_arguments` was given."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: getattr(parsed, name) for name in names if name in parsed})


def add_arguments(parser: Any, batch_sizes: Sequence[int]) -> None:
    """Add the arguments of `SpeedOptions` but `layer_tokens` to a command line, or to a group."""
    option, number = parser.add_argument, number_from(1)
    option("--backend", choices=BACKENDS, default="auto", help="what to measure")
    what = "mode of torch.compile, for both sides; none: eager code alone"
    option(
        "--compile", dest="compile_mode", type=_mode, default="default", metavar="MODE", help=what
    )
    what = "what to keep weights ready for; both keeps two layouts in memory (default: both)"
    option("--target", choices=TARGETS, default="both", help=what)
    option("--batch-sizes", nargs="+", type=number, default=[*batch_sizes], metavar="N")
    option("--prompt-tokens", type=number, default=2048, metavar="N")
    option("--new-tokens", type=number, default=128, metavar="N")


def _mode(text: str) -> str | None:
    return None if text == "none" else text
