"""Load what an export wrote with transformers, and compare it with the source."""

import importlib.util
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint
from export.conversion.compressed import Compressed
from export.conversion.text_parity import compare_text, predicts_tokens, text_failures
from mrp_lightning.errors import ParityError, first_line
from mrp_lightning.models.checkpoint import longest_sequence, model_class

_WINDOWS, _LENGTH = 2, 32
_ADVICE = "Leave layers dense with --skip, or take another --format. Please report this."


def load_with_transformers(source: Checkpoint, directory: Path, chosen: Compressed) -> str:
    """Load an export with transformers, and return a sentence on the result.

    Its logits on random tokens are compared with those of the source. The sentence gives the reason
    if nothing is loaded: the package that reads the format is missing, or loading fails and some
    experts stay dense.

    Raises:
        ParityError: transformers cannot load the export otherwise, does not find all weights in it,
            or computes other logits.
    """
    layout = chosen.layout
    if importlib.util.find_spec(layout.module) is None:
        return f"transformers was not tried here: the package {layout.package} is not installed."
    # compressed-tensors shows bars that no argument silences.
    with redirect_stderr(StringIO()):
        try:
            loaded: Any = model_class(source.pretrained_config()).from_pretrained(
                directory, dtype="auto", output_loading_info=True
            )
        # A missing package is no fault of the export, so it comes before the general case.
        except ImportError as error:
            return f"transformers was not tried here: {first_line(error)}"
        except Exception as error:  # of any type, from the code of the format
            if chosen.integers.dense_experts:  # seen in transformers 5.23
                return (
                    "transformers cannot load it: of this format, it reads experts that are "
                    "packed, and some stay dense."
                )
            raise ParityError(
                f"transformers cannot load what was written: {first_line(error)}. {_ADVICE}"
            ) from error
        outcome = _compared(source, *loaded)
    return f"transformers loaded it here, with the package {layout.package} and {outcome}."


def _compared(source: Checkpoint, model: PreTrainedModel, loading: Any) -> str:
    """Return how a loaded export compares with its source; raise a `ParityError` if it differs."""
    names = sorted({*loading["missing_keys"], *loading["unexpected_keys"]})
    # Names come before logits: with a missing weight, transformers computes with a random one, and
    # the logits would only show that something differs.
    if names or loading["mismatched_keys"]:
        wrong = ", ".join(names[:5]) or "other shapes"
        raise ParityError(
            f"transformers does not find the weights of {type(model).__name__} in what was "
            f"written: {wrong}. {_ADVICE}"
        )
    if not predicts_tokens(model):
        return "all its weights"
    vocabulary = model.config.get_text_config().vocab_size
    length = min(_LENGTH, longest_sequence(model.config) or _LENGTH)
    # Random tokens need no tokenizer, which a checkpoint may lack.
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(vocabulary, (_WINDOWS, length), generator=generator)
    text = compare_text(source.load(), model, windows, origin="random tokens")
    if failures := text_failures(text):
        raise ParityError(f"transformers computes otherwise: {'; '.join(failures)}. {_ADVICE}")
    return "the same logits" + ("" if text.bit_equal else f", but for {text.max_difference:.1e}")
