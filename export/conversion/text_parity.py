"""Compare the logits of an export with those of its source on a text."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer, PreTrainedModel

from export.conversion.checkpoint import Checkpoint, tracked
from mrp_lightning.errors import DataError, first_line
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.text.sources import StandardLibrary
from mrp_lightning.text.windows import SEPARATOR, Cutter
from mrp_sparse.formats.packed_format import different_bits

_MIN_AGREEMENT = 0.995
"""The least fraction of confident tokens with equal likeliest tokens."""
_MAX_DIVERGENCE = 0.005
"""The largest divergence in nats; another order of sums gives 8e-5 to 2e-3 in bfloat16."""
_MAX_PERPLEXITY_CHANGE = 0.001
"""The largest relative change of perplexity."""
MIN_TOKENS = 4096
"""The least number of predicted tokens."""
_WINDOW = 512
_CHARACTERS = 100
"""More characters than tokens have on average: a longer text is not tokenized to its end."""
_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model")


@dataclass(frozen=True)
class TextParity:
    """A comparison of the logits of the pruned and the exported model on the same tokens.

    Attributes:
        text: The origin of the tokens.
        tokens: Number of tokens that were predicted.
        top1_agreement: Fraction of these with equal likeliest tokens. Kernels that sum in another
            order change it by ties: 0.98 was measured for a bfloat16 model of 30 blocks.
        perplexity_before: Perplexity of the pruned model.
        perplexity_after: Perplexity of the exported model.
        divergence: Mean Kullback-Leibler divergence, in nats.
        max_difference: Largest absolute difference of a logit.
        bit_equal: Whether all logits have the same bits.
        confident_tokens: Number of tokens at which the source's two largest logits differ by more
            than rounding explains: two units in the last place of the largest logit.
        confident_agreement: The agreement at these; 1 if there are none.
    """

    text: str
    tokens: int
    top1_agreement: float
    perplexity_before: float
    perplexity_after: float
    divergence: float
    max_difference: float
    bit_equal: bool
    confident_tokens: int = 0
    confident_agreement: float = 1.0


def text_windows(source: Checkpoint, model: PreTrainedModel) -> tuple[Tensor, str]:
    """Return token ids (windows, length) and their origin; random tokens without a tokenizer.

    Raises:
        DataError: The tokenizer cannot be read.
    """
    length = min(_WINDOW, longest_sequence(model.config) or _WINDOW)
    count = math.ceil(MIN_TOKENS / (length - 1))
    if not any(file for name in _TOKENIZERS for file in source.path.glob(name)):
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(vocabulary, (count, length), generator=generator)
        return windows, "random tokens, as the checkpoint has no tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path)
    except (ImportError, OSError, ValueError) as error:
        raise DataError(
            f"The tokenizer in {source.path} cannot be loaded: {first_line(error)}"
        ) from error
    text = StandardLibrary()
    documents, label = text.documents("test"), text.label("test")
    # The text is cut before it is tokenized, whose time grows with its length.
    beginning = SEPARATOR.join(documents)[: _CHARACTERS * count * length]
    cutter = Cutter(tokenizer, length, text.bos).within(documents, label)
    windows = cutter.consecutive(label, beginning, count).ids
    return windows, "Python's standard library (test split)"


def compare_text(
    source: PreTrainedModel,
    export: PreTrainedModel,
    windows: Tensor,
    *,
    origin: str,
    device: torch.device | str = "cpu",
) -> TextParity:
    """Compare logits on windows, with one model on the device at a time.

    Both models are set to evaluation mode; `source` ends on the CPU, `export` on `device`. All
    logits of the source are held on the CPU.

    Args:
        source: The pruned model.
        export: The exported model.
        windows: Token ids (windows, length).
        origin: The description of the text, for `TextParity.text`.
        device: The device for both models.
    """
    # The source's logits wait on the CPU while the export has the device, so that only one of two
    # large models needs to fit it.
    reference = list(_logits(source, windows, device, "logits of the source"))
    nn.Module.to(source, "cpu")
    rows, max_difference, bit_equal = [], 0.0, True
    logits = _logits(export, windows, device, "logits of the export")
    for window, expected, computed in zip(windows, reference, logits, strict=True):
        bit_equal &= not different_bits(computed, expected)
        p, q = expected.float(), computed.float()
        # torch's maximum keeps NaN, which Python's `max` would drop.
        max_difference = float((p - q).abs().max().maximum(torch.tensor(max_difference)))
        agrees = p.argmax(-1) == q.argmax(-1)
        first, second = p.topk(2).values.unbind(-1)
        # The unit in the last place of a logit of magnitude m is at most eps·m. Each of the two
        # compared logits may be off by one unit, so a margin above 2·eps·m is no tie.
        rounding = 2 * torch.finfo(expected.dtype).eps * p.abs().amax(-1)
        confident = first - second > rounding
        p, q = p.log_softmax(-1), q.log_softmax(-1)
        losses = [F.nll_loss(logs, window[1:], reduction="none") for logs in (p, q)]
        # `kl_div(q, p)` is Σ exp(p)·(p − q): the divergence of the export from the source, weighted
        # by the source's probabilities.
        divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1)
        columns = (agrees, *losses, divergence, confident, confident & agrees)
        rows.append(torch.stack([column.double() for column in columns], dim=1))
    table = torch.cat(rows)
    agreement, loss, export_loss, divergence, _, _ = table.mean(0).unbind()
    confident, agreeing = table[:, 4:].sum(0).tolist()
    return TextParity(
        text=origin,
        tokens=len(table),
        top1_agreement=float(agreement),
        perplexity_before=float(loss.exp()),
        perplexity_after=float(export_loss.exp()),
        divergence=float(divergence),
        max_difference=max_difference,
        bit_equal=bit_equal,
        confident_tokens=int(confident),
        confident_agreement=agreeing / confident if confident else 1.0,
    )


def _logits(
    model: PreTrainedModel,
    windows: Tensor,
    device: torch.device | str,
    description: str,
) -> Iterator[Tensor]:
    """Yield the logits (length − 1, vocabulary) of each window, without those of the last token."""
    nn.Module.to(model, device).eval()  # PreTrainedModel.to has another signature
    with torch.inference_mode():
        for window in tracked(windows, len(windows), description):
            output: Any = model(input_ids=window[None].to(device), use_cache=False)
            yield output.logits[0, :-1].cpu()


def text_failures(text: TextParity) -> list[str]:
    """Return the reasons why the export does not pass; none if all logits have equal bits.

    Another order of summation changes near ties, so likeliest tokens are only compared where the
    source is confident. NaN among the logits fails even if the bits are equal.
    """
    if not math.isfinite(text.perplexity_before):
        return [
            f"the logits of the source hold NaN or Inf: its perplexity on {text.text} is "
            f"{text.perplexity_before}; prune and pack a model whose weights are finite"
        ]
    if text.bit_equal:
        return []
    failures = []
    # The conditions are negated, so that NaN, which compares as false, fails.
    if not text.confident_agreement >= _MIN_AGREEMENT:
        failures.append(
            f"the likeliest next token agrees at {text.confident_agreement:.2%} of the "
            f"{text.confident_tokens} tokens at which the source's margin exceeds rounding, less "
            f"than {_MIN_AGREEMENT:.1%}"
        )
    if not text.divergence <= _MAX_DIVERGENCE:
        failures.append(
            f"the Kullback-Leibler divergence is {text.divergence:.2e} nats, more than "
            f"{_MAX_DIVERGENCE:.0e}"
        )
    change = text.perplexity_after / text.perplexity_before - 1
    if not abs(change) < _MAX_PERPLEXITY_CHANGE:
        failures.append(
            f"perplexity goes from {text.perplexity_before:.4f} to {text.perplexity_after:.4f}, "
            f"a change of {_MAX_PERPLEXITY_CHANGE:.1%} or more"
        )
    return failures


def predicts_tokens(model: PreTrainedModel) -> bool:
    """Return whether transformers lists a model's class among those that predict the next token."""
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    return type(model) in (kinds if isinstance(kinds, tuple) else (kinds,))
