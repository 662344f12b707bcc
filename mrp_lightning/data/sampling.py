"""Windows of text that a language model writes, drawn from its own distribution."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mrp_lightning.calibration.walks import replaced
from mrp_lightning.errors import DataError, TargetError

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 64
_MOST_OF_ONE_TOKEN = 0.9
"""The largest share of one token among all tokens of a text that is not degenerate."""
_FEW_TOKENS = 16  # so few may all be the same by chance
_CHECKED = 64  # tokens of a window that one forward without a cache draws again
_AGREEING = 0.75
"""The least share of checked tokens that must agree up to rounding; by chance a tenth does."""
_ROUNDING = 0.05
"""The error of cumulative probabilities that rounded logits may cause."""
_COPIES_OF_LOGITS = 6  # float32 temporaries (windows, vocabulary) while a token is drawn


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The draws of a model's text: the same sampling of the same model gives the same windows.

    Attributes:
        length: Tokens a window, the first ones included.
        seed: The seed of all random numbers.
        prefix: The tokens (tokens,) that each window begins with, int64. If it is empty, the first
            token is drawn uniformly from `first`.
        first: The candidates (tokens,) for the first token of a window without a prefix, int64.
    """

    length: int
    seed: int
    prefix: Tensor
    first: Tensor

    def uniforms(self, windows: range) -> Tensor:
        """Return random numbers in [0, 1), one for each token (windows, length), float32."""
        # One generator for each window, seeded by (seed, n): window n is the same in any batch,
        # process or order. numpy's numbers do not depend on the device.
        generators = (np.random.default_rng([self.seed % 2**64, n]) for n in windows)
        numbers = [generator.random(self.length, np.float32) for generator in generators]
        return torch.from_numpy(np.stack(numbers))

    def starts(self, uniforms: Tensor) -> Tensor:
        """Return the tokens that each window begins with (windows, tokens), int64.

        `uniforms` are those of the windows; their first column draws the first token.
        """
        if len(self.prefix):
            return self.prefix.expand(len(uniforms), -1)
        # ⌊u·n⌋ < n as u < 1; in float32 the product could be rounded up to n.
        return self.first[(uniforms[:, :1].double() * len(self.first)).long()]


class _InverseTransform(LogitsProcessor):
    """A logits processor that samples by the inverse transform, at temperature 1.

    The token of a number u is the first whose cumulative probability, in the order of the whole
    vocabulary, exceeds u. It gets the score 0 and all others −∞, so that greedy search takes it.
    `uniforms` are (windows, length); `report` is called with the length of the windows so far.
    """

    def __init__(self, uniforms: Tensor, report: Callable[[int], None]) -> None:
        self.uniforms, self.report = uniforms, report

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return the scores (windows, vocabulary) that select the drawn token, from its logits."""
        length = input_ids.shape[1]
        self.report(length)
        cumulative = _cumulative(scores)
        # The rounded sum of all probabilities is not quite 1. Numbers are scaled by it, so that
        # each lies below the last cumulative probability, up to the rounding below.
        total = cumulative[:, -1:]
        if not bool(total.isfinite().all()):
            raise DataError(
                f"`calibration: self`: the model's predictions after {length} tokens of its own "
                "are NaN or Inf. In float16 they may overflow: load the model in bfloat16 or "
                "float32. Otherwise the checkpoint is broken."
            )
        thresholds = self.uniforms[:, length : length + 1].to(cumulative) * total
        # `right=True`: the first cumulative probability > u, so never a token of probability 0.
        drawn = torch.searchsorted(cumulative, thresholds, right=True)
        drawn = drawn.clamp_(max=scores.shape[1] - 1)  # u·total may be rounded up to the total
        return torch.full_like(scores, -torch.inf).scatter_(1, drawn, 0.0)


def _cumulative(logits: Tensor) -> Tensor:
    """Return the cumulative probabilities (…, vocabulary), float32."""
    return logits.float().softmax(-1).cumsum(-1)


def write(
    model: PreTrainedModel, sampling: Sampling, windows: range, report: Callable[[int], None]
) -> Tensor:
    """Generate a batch of windows.

    The model's own generation configuration (penalties, end tokens, ranges of tokens) has no
    effect. An end token does not end a window: another text follows, as in training.

    Args:
        model: A model that `require_writer` accepts.
        sampling: The draws of the tokens.
        windows: The numbers of the windows.
        report: Called with the number of tokens that each window has so far.

    Returns:
        The token ids (windows, length), int64, on the CPU. Logits that are not finite, or nearly
        the same token throughout, raise a DataError.
    """
    with _able_to_write(model):
        uniforms = sampling.uniforms(windows)
        starts = sampling.starts(uniforms)
        written = _generate(model, starts, uniforms, report)
        # One window suffices, at the cost of one forward: a faulty cache concerns all alike.
        if not _agrees(model, written[:1], uniforms[:1], starts.shape[1]):
            log.warning(
                "%s predicts other tokens step by step, with its cache, than all at once. Its text "
                "is written without a cache, which takes much longer.",
                type(model).__name__,
            )
            written = _generate(model, starts, uniforms, report, use_cache=False)
    _require_varied(written[:, starts.shape[1] :])
    return written.cpu()


def _require_varied(text: Tensor) -> None:
    """Raise a `DataError` if nearly all tokens (windows, tokens) of a text are the same."""
    tokens, counts = text.unique(return_counts=True)
    frequent_token = counts.argmax()
    part = int(counts[frequent_token]) / max(text.numel(), 1)
    if part > _MOST_OF_ONE_TOKEN and text.numel() > _FEW_TOKENS:
        raise DataError(
            "`calibration: self`: the model writes little but the token "
            f"{int(tokens[frequent_token])}: {part:.0%} of its text. That is nothing to calibrate "
            "on. Name a text in `calibration` or `train_files` (`prune --text`)."
        )


def _generate(
    model: PreTrainedModel,
    starts: Tensor,
    uniforms: Tensor,
    report: Callable[[int], None],
    *,
    use_cache: bool = True,
) -> Tensor:
    processor = _InverseTransform(uniforms.to(model.device), report)
    written: Tensor = model.generate(  # type: ignore[operator]
        starts.to(model.device),
        attention_mask=torch.ones_like(starts, device=model.device),
        max_length=uniforms.shape[1],
        do_sample=False,
        logits_processor=LogitsProcessorList([processor]),
        disable_compile=True,
        use_cache=use_cache,
    )
    return written


def _agrees(model: PreTrainedModel, written: Tensor, uniforms: Tensor, start: int) -> bool:
    """Return whether one forward, without a cache, draws most of the first tokens again."""
    read = written[:, : start + _CHECKED]
    logits = model(read, use_cache=False).logits[0, start - 1 : -1]
    upper, tokens = _cumulative(logits), read[0, start:, None]
    thresholds = uniforms[0, start : read.shape[1], None].to(upper) * upper[:, -1:]
    # Token t is drawn by numbers between the cumulative probabilities of t − 1 and t. A number near
    # such a limit may draw its neighbour by rounding, so that t counts as equal within a margin.
    lower = torch.where(tokens > 0, upper.gather(1, (tokens - 1).clamp_min(0)), 0.0)
    apart = torch.maximum(lower - thresholds, thresholds - upper.gather(1, tokens))
    return float((apart < _ROUNDING).float().mean()) > _AGREEING


@contextmanager
def _able_to_write(model: PreTrainedModel) -> Iterator[None]:
    """Give a model the generation configuration of plain decoding in a context, without dropout."""
    # The parts in training mode are listed one by one, since `model.train()` at the end would also
    # set the parts that the user had frozen in evaluation mode.
    in_training = [part for part in model.modules() if part.training]
    options = replaced(model, "generation_config", GenerationConfig())
    with torch.inference_mode(False), torch.no_grad(), options, attention_of_one_token():
        model.eval()
        try:
            yield
        finally:
            for part in in_training:
                part.training = True


@contextmanager
def attention_of_one_token() -> Iterator[None]:
    """Compute the attention of one new token by matrix products on a CPU, within a context.

    torch 2.13's fused kernel takes 16 times as long for it in bfloat16 (64 windows of 250 tokens,
    nine heads that share three of keys): softmax(s·QKᵀ)·V, with the queries that share keys as rows
    of one product.
    """
    fused: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Any]:
        batch, heads, length, size = query.shape
        unusual = mask is not None or {"position_bias", "cache", "softcap"} & {
            name for name, option in options.items() if option is not None
        }
        if length != 1 or query.device.type != "cpu" or unusual:
            return fused(module, query, key, value, mask, **options)
        scaling = options.get("scaling")
        scaled = query * (size**-0.5 if scaling is None else scaling)
        scores = scaled.reshape(batch, key.shape[1], -1, size) @ key.transpose(-1, -2)
        mixed = scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value
        return mixed.reshape(batch, 1, heads, -1), None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = attention
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = fused


def require_writer(model: Any) -> PreTrainedModel:
    """Return the model if it is a causal language model, else raise a TargetError."""
    if not isinstance(model, PreTrainedModel):
        problem = "there is no Hugging Face model, or several"
    elif model.config.is_encoder_decoder:
        problem = f"{type(model).__name__} writes answers to another text, with an encoder"
    elif not model.can_generate():
        problem = f"{type(model).__name__} has no head that predicts the next token"
    else:
        return model
    raise TargetError(
        "`calibration: self` needs one causal language model, which writes its own text; "
        f"{problem}. Name a text in `calibration` or `train_files` (`prune --text`)."
    )


def windows_at_once(model: PreTrainedModel, length: int) -> int:
    """Return the number of windows of a length that the device's memory holds, from 1 to 64.

    They take at most half of a GPU's free memory, or a quarter of a machine's memory.
    """
    if model.device.type == "cuda":
        # Half, since activations and the allocator's fragments are not in the estimate of a window.
        room = torch.cuda.mem_get_info(model.device)[0] // 2
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    return max(1, min(_MOST_AT_ONCE, room // bytes_a_window(model, length)))


def bytes_a_window(model: PreTrainedModel, length: int) -> int:
    """Return the bytes of a window while it is generated: keys, values and logits."""
    text = model.config.get_text_config()
    heads = getattr(text, "num_attention_heads", 0) or 0
    size = getattr(text, "head_dim", None) or text.hidden_size // (heads or 1)
    heads = getattr(text, "num_key_value_heads", None) or heads
    # Keys and values: 2 · layers · heads · size · length. Layers with a sliding window or a state
    # take less, as a rule, so that the estimate is on the safe side.
    keys = 2 * text.num_hidden_layers * heads * size * length * model.dtype.itemsize
    return keys + 4 * _COPIES_OF_LOGITS * text.vocab_size
