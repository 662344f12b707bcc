"""Verify that an exported checkpoint computes the same as its source."""

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensor

from export.conversion.checkpoint import Checkpoint, open_checkpoint, tracked
from export.conversion.selection import LayerChoice
from export.conversion.text_parity import (
    TextParity,
    compare_text,
    predicts_tokens,
    text_failures,
    text_windows,
)
from export.conversion.writing import HeadChoice
from export.loading import load
from mrp_lightning.errors import ParityError
from mrp_sparse.eight_bit_head import round_head
from mrp_sparse.formats.packed_format import different_bits
from mrp_sparse.formats.sparse24 import positive_zeros
from mrp_sparse.huggingface import CONFIGS
from mrp_sparse.kernels.operator import MAX_ERROR_RATIO
from mrp_sparse.packed_linear import PackedLinear

_TOKENS = (1, 16)
"""Numbers of tokens at which layers are compared: one token runs in other kernels."""
_MANY_TOKENS = 256
"""A further number of tokens on CUDA devices, which runs in another kernel."""


@dataclass(frozen=True)
class OperatorError:
    """Errors of a layer's output relative to a product in higher precision.

    Errors are relative Frobenius norms, of the whole output or of its worst output feature.

    Attributes:
        name: Name of the layer.
        packed: Error of the operator.
        dense: Error of the dense product in the model's dtype, for comparison.
        bit_equal: Whether both products have the same bits.
    """

    name: str
    packed: float
    dense: float
    bit_equal: bool = False

    @property
    def passes(self) -> bool:
        """Whether `packed` ≤ `MAX_ERROR_RATIO` · `dense`, or the bits are equal (also for NaN)."""
        return self.bit_equal or self.packed <= MAX_ERROR_RATIO * self.dense


@dataclass
class Parity:
    """The results of all comparisons.

    Attributes:
        tensors: Number of tensors that were compared bit by bit.
        operators: Errors of the packed layers, one for each.
        text: Comparison of the logits; `None` if the model predicts no next token, or an earlier
            comparison failed. For a head of 8 bits, the source with its head rounded to 8 bits is
            compared.
        head: The effect of rounding the head on the source's logits; `None` without such a head.
        failures: The failed comparisons; empty if the export passes.
    """

    tensors: int = 0
    operators: list[OperatorError] = field(default_factory=list)
    text: TextParity | None = None
    head: TextParity | None = None
    failures: list[str] = field(default_factory=list)

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
    model = load(directory) if source.config else None
    modules = {} if model is None else dict(model.named_modules())
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
    if not parity.failures and model is not None and predicts_tokens(model):
        windows, origin = text_windows(source, model)
        compare = functools.partial(compare_text, windows=windows, origin=origin, device=device)
        dense = source.load()
        # The rounding of the head is intended: it must not hide other differences.
        if head is not None:
            round_head(dense)
        parity.text = compare(dense, model)
        if head is not None:
            parity.head = compare(source.load(), dense)
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
