"""Verify that an exported checkpoint computes the same as its source."""

import copy
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensor
from transformers import PreTrainedModel

from export.conversion.checkpoint import Checkpoint, open_checkpoint, tracked
from export.conversion.selection import LayerChoice
from export.conversion.writing import HeadChoice
from export.loading import load
from mrp_lightning.errors import FormatError, ParityError
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.models.classes import is_causal
from mrp_lightning.models.loading import find_tokenizer
from mrp_lightning.text.sources import StandardLibrary
from mrp_lightning.text.windows import Cutter
from mrp_sparse.eight_bit_head import round_head
from mrp_sparse.formats.packed_format import different_bits
from mrp_sparse.formats.sparse24 import positive_zeros
from mrp_sparse.huggingface import CONFIGS
from mrp_sparse.kernels.operator import MAX_ERROR_RATIO
from mrp_sparse.packed_linear import PackedLinear, round_activations

_TOKENS = (1, 16)
"""Numbers of tokens at which layers are compared: one token runs in other kernels."""
_MANY_TOKENS = 256
"""A further number of tokens on CUDA devices, which runs in another kernel."""
_MIN_AGREEMENT = 0.995
"""The least fraction of confident tokens with equal likeliest tokens."""
_MAX_DIVERGENCE = 0.005
"""The largest divergence in nats; another order of sums gives 8e-5 to 2e-3 in bfloat16."""
_MAX_PERPLEXITY_CHANGE = 0.001
"""The largest relative change of perplexity."""
_FREE = 0.005
"""The largest relative rise of perplexity at which activations are rounded without being asked."""
_RANDOM = "random tokens, as the checkpoint has no tokenizer"
MIN_TOKENS = 4096
"""The least number of predicted tokens."""
_WINDOW = 512


@dataclass(frozen=True)
class OperatorError:
    """Errors of a layer's `packed` and `dense` product relative to one in higher precision.

    Errors are relative Frobenius norms, of the whole output or of its worst output feature. If both
    products have the same bits, `bit_equal` is true.
    """

    name: str
    packed: float
    dense: float
    bit_equal: bool = False

    @property
    def passes(self) -> bool:
        """Whether `packed` ≤ `MAX_ERROR_RATIO` · `dense`, or the bits are equal (also for NaN)."""
        return self.bit_equal or self.packed <= MAX_ERROR_RATIO * self.dense


@dataclass(frozen=True)
class TextParity:
    """A comparison of the logits of the pruned and the exported model on the same tokens.

    Attributes:
        text: The origin of the tokens.
        tokens: Number of tokens that were predicted.
        top1_agreement: Fraction of these with equal likeliest tokens. Kernels that sum in another
            order change it by ties: 0.98 was measured for a bfloat16 model of 30 blocks.
        perplexity_before: Perplexity of the pruned model; `perplexity_after` of the exported one.
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


@dataclass
class Parity:
    """The results of all comparisons.

    Attributes:
        tensors: Number of tensors that were compared bit by bit.
        operators: Errors of the packed layers.
        text: Comparison of the logits; `None` if the model predicts no next token, or an earlier
            comparison failed. A head of 8 bits is compared with the source's, rounded.
        head: The effect of rounding the head on the source's logits; `None` without such a head.
        activations: The effect on a CPU of rounding activations; `None` where the export asks for
            none. The other comparisons are made without this rounding.
        failures: The failed comparisons; empty if the export passes.
    """

    tensors: int = 0
    operators: list[OperatorError] = field(default_factory=list)
    text: TextParity | None = None
    head: TextParity | None = None
    activations: TextParity | None = None
    failures: list[str] = field(default_factory=list)

    @property
    def rounding_is_free(self) -> bool:
        """Whether rounding activations raises the perplexity of real text by at most 0.5%."""
        text = self.activations
        if text is None or text.text == _RANDOM:
            return False
        return text.perplexity_after <= (1 + _FREE) * text.perplexity_before

    def require(self) -> None:
        """Raise a `ParityError` that lists all failures, if there are any."""
        if self.failures:
            listed = "\n".join(f"  {failure}" for failure in self.failures)
            raise ParityError(f"The export does not compute what its source computes:\n{listed}")


def check_parity(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    *,
    head: HeadChoice | None = None,
    device: torch.device | str = "cpu",
) -> Parity:
    """Compare an exported directory, as it is on disk, with its source, and return the results.

    A difference raises no error here; `Parity.require` does that. The first failing stage ends the
    comparison, since later stages would fail, too. Logits are compared on the embedded text. A
    `head` of 8 bits must equal the source's head, rounded; the effect of the rounding is reported,
    and is no failure.

    Raises:
        DataError, FormatError, OptionError: See `text_windows` and `export.load`.
    """
    parity = Parity()
    # From cheap to expensive: stored bits, products of single layers, logits of whole models.
    _compare_bits(source, directory, layers, head, parity)
    if parity.failures:
        return parity
    try:
        model = load(directory) if source.config else None
    except FormatError:
        # Of a source that cannot be loaded, either, the error is about that: nothing is wrong with
        # the export, whose directory will be gone.
        source.load()
        raise
    modules = {} if model is None else dict(model.named_modules())
    is_rounded = any(getattr(m, "eight_bit_activations", False) for m in modules.values())
    if model is not None:
        round_activations(model, False)
    names = {layer.name for layer in layers if layer.reason is None}
    packed = {n: m for n, m in modules.items() if n in names and isinstance(m, PackedLinear)}
    stored = packed.items() or _packed_in_files(directory, layers)
    for name, layer in tracked(stored, len(packed) or None, "comparing products"):
        weight = getattr(modules.get(name), "weight", None)
        if isinstance(weight, SparseSemiStructuredTensor):
            multiply = functools.partial(F.linear, weight=weight)
            error = _product_error(name, multiply, layer.dense_weight().to(weight.device))
        else:
            error = operator_error(name, layer, device)
        parity.operators.append(error)
    parity.failures += [
        f"{error.name}: the operator's relative error is {error.packed:.2e}, more than "
        f"{MAX_ERROR_RATIO} times the {error.dense:.2e} of the dense product"
        for error in parity.operators
        if not error.passes
    ]
    if not parity.failures and model is not None and is_causal(model.config):
        windows, origin = text_windows(source, model)
        dense = source.load()
        # The rounding of the head is intended: it must not hide other differences.
        if head is not None:
            round_head(dense)
        expected = source_logits(dense, windows, device)
        parity.text = compare_logits(expected, model, windows, origin=origin, device=device)
        if is_rounded:
            round_activations(model)  # a GPU rounds none
            parity.activations = compare_logits(expected, model, windows, origin=origin)
        del expected  # the logits of a large vocabulary take gigabytes
        if head is not None:
            expected = source_logits(source.load(), windows, device)
            parity.head = compare_logits(expected, dense, windows, origin=origin, device=device)
        parity.failures += text_failures(parity.text)
    return parity


def _compare_bits(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    head: HeadChoice | None,
    parity: Parity,
) -> None:
    """Compare every tensor of the source with that of the exported file of the same name."""
    choices = {layer.tensor: layer for layer in layers if layer.reason is None}
    exported = {file.name: file for file in open_checkpoint(directory).files}
    for file in tracked(source.files, len(source.files), "comparing bits"):
        if file.name not in exported:
            parity.failures.append(f"{file.name}: the file is missing")
            continue
        stored = exported[file.name].read()
        for name, tensor in file.read().items():
            is_head = head is not None and name in head.tensors
            expected = head.convert(name, tensor) if head and is_head else {name: tensor}
            for key, part in expected.items():
                parity.failures += _compare_tensor(key, part, choices.get(key), stored)
            parity.tensors += 1


def _compare_tensor(
    name: str, tensor: Tensor, layer: LayerChoice | None, stored: dict[str, Tensor]
) -> list[str]:
    if name not in stored:
        return [f"{name}: missing"]
    exported = stored[name]
    if layer is not None:
        # Packed formats do not store zeros, so −0 comes back as +0. That is the only change of bits
        # that packing is allowed to make.
        tensor = positive_zeros(layer.matrix(tensor))[0]
        form, columns = layer.form, tensor.shape[1]
        names = form.companion_names(name)
        companions = [stored[key] for key in names if key in stored]
        if not companions:
            exported = layer.matrix(exported)
        # The order of the checks matters: `unpack` trusts its companions, so they have to be
        # complete and undamaged before it reads them.
        elif len(companions) < len(names):
            return [f"{key}: missing" for key in names if key not in stored]
        elif damage := form.damage(exported, *companions, columns):
            return [f"{names[0]}: {damage}"]
        else:
            exported = form.unpack(exported, *companions, columns)
    if count := different_bits(exported, tensor):
        return [f"{name}: {count} of {tensor.numel()} values have other bits"]
    return []


def _packed_in_files(
    directory: Path, layers: Sequence[LayerChoice]
) -> Iterator[tuple[str, PackedLinear]]:
    """Read the packed layers of a model that is the user's own, or that torchao multiplies."""
    for file in open_checkpoint(directory).files:
        named = [(layer, layer.form.companion_names(layer.tensor)) for layer in layers]
        inside = [(layer, names) for layer, names in named if {*names} <= {*file.names}]
        tensors = file.read() if inside else {}
        for layer, names in inside:
            kind = CONFIGS[layer.form.quant_method].layer
            stored = [tensors[name] for name in (layer.tensor, *names)]
            yield layer.name, kind.from_packed(stored, layer.shape[1])


def operator_error(
    name: str, layer: PackedLinear, device: torch.device | str = "cpu"
) -> OperatorError:
    """Compare the packed and the dense product of random inputs with one in higher precision.

    Returns the error at several numbers of tokens that is largest relative to the dense product's.
    """
    moved = copy.deepcopy(layer).to(device)
    # The reference products below have no bias, and compare the weight alone.
    moved.bias = None
    return _product_error(name, moved, moved.dense_weight())


def _product_error(name: str, multiply: Callable[[Tensor], Tensor], dense: Tensor) -> OperatorError:
    """Return the largest error of a product with a weight (rows, columns), relative to dense."""
    counts = (*_TOKENS, _MANY_TOKENS) if dense.is_cuda else _TOKENS
    errors = [error for tokens in counts for error in _errors_at(name, multiply, dense, tokens)]
    # Failures come first: equal bits pass at any ratio, even with NaN, and must not hide a failure
    # with a smaller ratio.
    return max(errors, key=lambda error: (not error.passes, error.packed / max(error.dense, 1e-30)))


@torch.no_grad()
def _errors_at(
    name: str, multiply: Callable[[Tensor], Tensor], dense: Tensor, tokens: int
) -> Iterator[OperatorError]:
    """Yield the error of the whole output and, for several tokens, of its worst row.

    A single wrong group of a large weight is within the rounding of the whole output, but not of
    its row. For one token, rows may be near zero, where a relative error means nothing.
    """
    # A reference has to be more exact than both products. For 16 bits, float32 has 13 or more bits
    # to spare, and costs less than float64 on GPUs.
    higher = torch.float32 if dense.dtype.itemsize == 2 else torch.float64
    # The generator runs on the CPU, so that all devices get the same inputs.
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, dense.shape[1], generator=generator).to(dense.device, dense.dtype)
    exact = (x.to(higher) @ dense.to(higher).T).double()
    product, expected = multiply(x), F.linear(x, dense)
    bit_equal = not different_bits(product, expected)
    for dim in (None, 0) if tokens > 1 else (None,):
        # A row of zeros has the norm 0: the clamp gives 0 for an exact product, where 0 / 0 would
        # be NaN.
        scale = exact.norm(dim=dim).clamp_min(torch.finfo(torch.float32).tiny)
        packed, rounded = ((y.double() - exact).norm(dim=dim) / scale for y in (product, expected))
        yield OperatorError(name, float(packed.max()), float(rounded.max()), bit_equal)


def text_windows(source: Checkpoint, model: PreTrainedModel) -> tuple[Tensor, str]:
    """Return token ids (windows, length) and their origin; random tokens without a tokenizer.

    Raises:
        DataError: The tokenizer cannot be read.
    """
    length = min(_WINDOW, longest_sequence(model.config) or _WINDOW)
    count = math.ceil(MIN_TOKENS / (length - 1))
    tokenizer = find_tokenizer(str(source.path))
    if tokenizer is None:
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(vocabulary, (count, length), generator=generator)
        return windows, _RANDOM
    text = StandardLibrary()
    windows = text.windows(Cutter(tokenizer, length, text.bos), "test", count).ids
    return windows, "Python's standard library (test split)"


def source_logits(
    source: PreTrainedModel, windows: Tensor, device: torch.device | str = "cpu"
) -> list[Tensor]:
    """Return the logits (length − 1, vocabulary) of each window of token ids (windows, length).

    All are held on the CPU, where the model ends, too: only one of two large models needs to fit
    the device.
    """
    logits = list(_logits(source, windows, device, "logits of the source"))
    nn.Module.to(source, "cpu")
    return logits


def compare_logits(
    reference: Sequence[Tensor],
    export: PreTrainedModel,
    windows: Tensor,
    *,
    origin: str,
    device: torch.device | str = "cpu",
) -> TextParity:
    """Compare the source's logits with those of an export, on windows that come from `origin`.

    The export is set to evaluation mode, and ends on `device`.
    """
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
