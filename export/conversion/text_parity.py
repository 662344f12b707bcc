"""The logits of a model before and after its export, on the same text."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoTokenizer, PreTrainedModel

from export.conversion.checkpoint import Checkpoint
from export.conversion.tracking import Track, silently
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.errors import DataError, first_line
from mrp_lightning.models.skeleton import longest_sequence
from mrp_sparse.formats.packed_format import different_bits

MIN_TOP1_AGREEMENT = 0.995
MAX_PERPLEXITY_CHANGE = 0.001
"""As a part of the perplexity: rounding moves a perplexity of 2000 by more than one of 7."""
MIN_TOKENS = 4096
_WINDOW = 512
_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model")


@dataclass(frozen=True)
class TextParity:
    """The pruned model and the exported one on the same tokens, and the origin of these.

    `tokens` were predicted, and the likeliest one was the same at a fraction `top1_agreement` of
    them. `divergence` is the mean Kullback-Leibler divergence in nats, `max_difference` the largest
    absolute difference of a logit.
    """

    text: str
    tokens: int
    top1_agreement: float
    perplexity_before: float
    perplexity_after: float
    divergence: float
    max_difference: float
    bit_equal: bool


def text_windows(
    source: Checkpoint, model: PreTrainedModel, files: Sequence[str]
) -> tuple[Tensor, str]:
    """Windows of tokens, and their origin; random tokens for a model without a tokenizer."""
    length = min(_WINDOW, longest_sequence(model.config) or _WINDOW)
    count = math.ceil(MIN_TOKENS / (length - 1))
    if not any(file for name in _TOKENIZERS for file in source.path.glob(name)):
        if files:
            raise DataError(f"`--text` needs a tokenizer, and {source.path} has none.")
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(vocabulary, (count, length), generator=generator)
        return windows, "random tokens, as the checkpoint has no tokenizer"
    data = TextDataModule(eval_files=list(files) or None, sequence_length=length)
    try:
        data.tokenizer = AutoTokenizer.from_pretrained(source.path)
    except (ImportError, OSError, ValueError) as error:
        raise DataError(
            f"The tokenizer in {source.path} cannot be loaded: {first_line(error)}"
        ) from error
    windows = data.evaluation_windows("test")[:count]
    if len(windows) < count:
        raise DataError(
            f"`--text`: the parity gate needs {count} windows of {length} tokens, but the text "
            f"gives {len(windows)}. Give more text, or none to take the embedded text."
        )
    return windows, ", ".join(files) or "Python's standard library (test split)"


def compare_text(
    before: PreTrainedModel,
    after: PreTrainedModel,
    windows: Tensor,
    *,
    origin: str,
    device: torch.device | str = "cpu",
    track: Track = silently,
) -> TextParity:
    """Logits of both models on windows (windows, length), one model on the device at a time."""
    reference = []
    _move(before, device).eval()
    for window in track(windows, len(windows), "logits of the source"):
        reference.append(_logits(before, window, device))
    _move(before, "cpu")
    _move(after, device).eval()
    of_tokens, differences, equal = [], [], True
    pairs = zip(windows, reference, strict=True)
    for window, expected in track(pairs, len(windows), "logits of the export"):
        found = _logits(after, window, device)
        equal &= not different_bits(found, expected)
        differences.append(float((found.float() - expected.float()).abs().max()))
        p, q = expected.float().log_softmax(-1), found.float().log_softmax(-1)
        agree = (p.argmax(-1) == q.argmax(-1)).double()
        losses = [F.nll_loss(logs, window[1:], reduction="none").double() for logs in (p, q)]
        divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).double()
        of_tokens.append(torch.stack([agree, *losses, divergence]))
    means = torch.cat(of_tokens, dim=1).mean(dim=1)
    return TextParity(
        text=origin,
        tokens=sum(rows.shape[1] for rows in of_tokens),
        top1_agreement=float(means[0]),
        perplexity_before=float(means[1].exp()),
        perplexity_after=float(means[2].exp()),
        divergence=float(means[3]),
        max_difference=max(differences),
        bit_equal=equal,
    )


def _move(model: nn.Module, device: torch.device | str) -> nn.Module:
    return model.to(device)  # PreTrainedModel.to has another signature, which says less


def _logits(model: PreTrainedModel, window: Tensor, device: torch.device | str) -> Tensor:
    """Logits after all tokens but the last (length − 1, vocabulary), on the CPU."""
    with torch.inference_mode():
        output: Any = model(input_ids=window[None].to(device), use_cache=False)
        return output.logits[0, :-1].cpu()


def text_failures(text: TextParity) -> list[str]:
    """The reasons why the export does not pass; none, where all logits have the same bits.

    Logits that hold NaN are no model's, however equal.
    """
    if not math.isfinite(text.perplexity_before):
        return [
            f"the logits of the source hold NaN or Inf: its perplexity on {text.text} is "
            f"{text.perplexity_before}; prune and pack a model whose weights are finite"
        ]
    if text.bit_equal:
        return []
    failures = []
    if not text.top1_agreement >= MIN_TOP1_AGREEMENT:
        failures.append(
            f"the likeliest next token agrees at {text.top1_agreement:.2%} of {text.tokens} tokens,"
            f" less than {MIN_TOP1_AGREEMENT:.1%}"
        )
    change = text.perplexity_after / text.perplexity_before - 1
    if not abs(change) < MAX_PERPLEXITY_CHANGE:
        failures.append(
            f"perplexity goes from {text.perplexity_before:.4f} to {text.perplexity_after:.4f}, "
            f"a change of {MAX_PERPLEXITY_CHANGE:.1%} or more"
        )
    return failures
