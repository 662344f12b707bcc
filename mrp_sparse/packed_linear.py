"""Linear layers that store their weight packed: 2:4, bitmask, and bitmask of four bits.

The layers hold plain tensors, so that state dicts, safetensors, `deepcopy`, `torch.compile` and
`torch.export` treat them like any other module. The weight is frozen. `mrp_sparse/FORMAT.md`
describes the stored tensors byte by byte.
"""

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn

from mrp_ground.arguments import checked
from mrp_ground.errors import FormatError, PatternError, TargetError
from mrp_ground.upstream import is_conv1d as is_conv1d
from mrp_sparse.formats import bitmask4
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.formats.sparse24 import SPARSE24
from mrp_sparse.kernels.dispatch import why_not_compressed
from mrp_sparse.upstream import compress_cusparselt

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes of weights that can be packed."""
Dense = TypeVar("Dense", bound=nn.Module)


def is_packable(module: nn.Module) -> bool:
    """Return whether the module multiplies as `nn.Linear` or the `Conv1D` of transformers does.

    A subclass with a `forward` of its own may return another thing, as routers of experts do.
    """
    kind: Any = type(module)
    # Falcon's adds the bias in an operation of its own.
    is_plain = kind.forward is nn.Linear.forward or kind.__name__ == "FalconLinear"
    return (isinstance(module, nn.Linear) and is_plain) or is_conv1d(module)


CAST = r"\.to\((?:dtype=)?self\.(\w+)\.weight\.dtype\)"
"""The pattern of a cast to the dtype of a child's weight, which is no floating one for codes."""


def is_in_source(model: nn.Module, name: str, pattern: str) -> bool:
    """Return whether the source of the module around a module has a pattern with its name.

    Args:
        model: The model.
        name: The name of the module in it.
        pattern: A regular expression, whose groups match names.
    """
    owner, _, child = name.rpartition(".")
    kind: Any = type(model.get_submodule(owner))
    return child in _in_source(kind, pattern)


@functools.cache
def _in_source(kind: type, pattern: str) -> frozenset[str]:
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # a class without a file, such as one typed at a prompt
        return frozenset()
    return frozenset(
        name for match in re.finditer(pattern, source) for name in match.groups() if name
    )


def weight_matrix(linear: Any) -> Tensor:
    """Return the weight (rows, columns) of an `nn.Linear` or a `Conv1D`, as a view."""
    weight: Tensor = linear.weight.detach()
    return weight.T if is_conv1d(linear) else weight


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


class PackedLinear(nn.Module):
    """y = x Wᵀ + b with W stored in a `PackedFormat`, and not trained.

    Args:
        in_features: Columns of W; of 2:4 a positive multiple of 8, of 8 bits one of 16.
        out_features: Rows of W.
        count: Number of elements of `weight`, where the shape of W does not determine it.
        bias: Whether there is a b.
        dtype: Dtype of the floating-point tensors and the activations; by default torch's.
        device: Device of the tensors, which are not initialised.

    Attributes:
        weight: The stored values; their shape and dtype are the format's.
        bias: Added to each output, (out_features,), or `None`.

    Raises:
        PatternError: No weight of this shape has the format.
    """

    weight: Tensor
    FORMAT: ClassVar[PackedFormat]
    """The format of the stored tensors."""
    DERIVED: ClassVar[str] = "offsets"
    """Name of the tensor that is computed from the stored ones, and not in the state dict."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        count: int = 0,
        *,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if reason := self.FORMAT.why_not((out_features, in_features)):
            raise PatternError(f"{type(self).__name__}: {reason}.")
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        # `empty` has no argument for the device: the context sets that of every tensor.
        with nullcontext() if device is None else torch.device(device):
            values, *companions = self.FORMAT.empty(
                (out_features, in_features), count, dtype or torch.get_default_dtype()
            )
            for name, tensor in zip(self.FORMAT.companions, companions, strict=True):
                self.register_buffer(name, tensor)
            # After the companions, since assigning `weight` derives the offsets from them.
            self.weight = frozen(values)
            self.bias = frozen(torch.empty(out_features, dtype=self.dtype)) if bias else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == self.DERIVED:
            # State dicts hold neither non-persistent buffers nor `None`. A `None` must not be
            # registered as non-persistent: accelerate moves all of those, `None` too.
            self.register_buffer(name, value, persistent=value is None)
            return
        super().__setattr__(name, value)
        # Offsets of other bits would read other values without any error.
        if name in ("weight", self.FORMAT.places):
            self.derive()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # The base class copies into existing tensors, which `__setattr__` does not see.
        super()._load_from_state_dict(*args, **kwargs)
        self.derive()

    def derive(self) -> None:
        """Recompute the derived tensor, if any, from the stored ones; `None` on the meta device."""
        if self.FORMAT.row_offsets is not None:
            bits = self.places
            setattr(self, self.DERIVED, None if bits.is_meta else self.FORMAT.row_offsets(bits))

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Raises:
            RuntimeError: The input has another number of columns; `nn.Linear` raises the same.
        """
        # Bitmasks do not record the columns within their last byte: the operators would accept some
        # inputs that are too wide.
        if x.shape[-1] != self.in_features:
            raise RuntimeError(
                f"{type(self).__name__}: expected {self.in_features} columns, its `in_features`, "
                f"got an input of shape {tuple(x.shape)}."
            )
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        offsets = getattr(self, "offsets", None)
        return self.FORMAT.multiply(x, self._stored(), self.bias, offsets=offsets)

    @classmethod
    def like(
        cls, linear: nn.Module, device: torch.device | str | None = None, **options: Any
    ) -> Self:
        """Return an uninitialised layer of `linear`'s shape and dtype, with a bias if that has one.

        Args:
            linear: An `nn.Linear` or a `Conv1D`. The new layer takes its training mode.
            device: Device of the tensors; `None` is that of the dense weight.
            **options: Further arguments of the class.
        """
        weight = weight_matrix(linear)
        rows, columns = weight.shape
        options |= {"dtype": weight.dtype, "device": device or weight.device}
        options |= {"bias": getattr(linear, "bias", None) is not None}
        return cls(columns, rows, **options).train(linear.training)

    def to_linear(self) -> nn.Linear:
        """Return the same layer as an `nn.Linear`, its zeros stored."""
        has_bias = self.bias is not None
        # Both tensors are assigned by `give`: on the meta device none is allocated before.
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        return self.give(linear)

    def give(self, dense: Dense) -> Dense:
        """Assign the weight and the bias, trainable, to a dense layer, and return that layer.

        It is an `nn.Linear` or a `Conv1D` of this shape, on any device.
        """
        weight = self.dense_weight()
        # Conv1D holds Wᵀ, here as a copy: safetensors does not save strided views.
        stored = weight if isinstance(dense, nn.Linear) else weight.T.contiguous()
        dense.weight = nn.Parameter(stored)
        if self.bias is not None:
            dense.bias = nn.Parameter(self.bias.detach())
        return dense.train(self.training)

    def extra_repr(self) -> str:
        """Return the shape, as `nn.Linear` shows it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )

    @classmethod
    @checked
    def from_linear(cls, linear: nn.Module) -> Self:
        """Return a packed layer of a pruned `nn.Linear` or `Conv1D`, which share the bias.

        Raises:
            PatternError: Its weight does not have the zeros or the shape that the format needs.
            FormatError: Its weight is not on the grid of `Bitmask4Linear`.
            TargetError: The module is of another class, or its weight of another dtype or on the
                meta device.
        """
        if not is_packable(linear):
            raise TargetError(
                f"{cls.__name__}.from_linear packs an `nn.Linear` or transformers' `Conv1D`; got a "
                f"{type(linear).__name__}. Give one of these."
            )
        weight = weight_matrix(linear)
        if weight.is_meta or weight.dtype not in DTYPES:
            raise TargetError(
                f"{cls.__name__}.from_linear needs a weight with data in "
                f"{', '.join(map(str, DTYPES))}; got {weight.dtype} on {weight.device}."
            )
        layer = cls.from_packed(cls.FORMAT.pack(weight), weight.shape[1])
        if isinstance(linear.bias, Tensor):
            layer.bias = frozen(linear.bias.detach())
        return layer.train(linear.training)

    @classmethod
    @checked
    def from_packed(cls, tensors: Sequence[Tensor], columns: int) -> Self:
        """Return a layer without bias on packed tensors, in the format's order and not copied.

        Raises:
            FormatError: Their number, shapes or dtypes are wrong, or packing cannot give them.
            PatternError: No weight of so many columns has this form.
        """
        names = cls.FORMAT.names
        kinds = [type(tensor).__name__ for tensor in tensors]
        if len(tensors) != len(names) or not all(isinstance(x, Tensor) for x in tensors):
            raise FormatError(
                f"{cls.__name__}.from_packed needs the tensors {', '.join(names)}; got "
                f"{', '.join(kinds) or 'none'}."
            )
        values, places, *_ = tensors
        rows = places.shape[0] if places.ndim else 0
        # A layer on the meta device has the expected shapes without memory; the given tensors then
        # take over, without a copy.
        layer = cls(columns, rows, values.numel(), bias=False, device="meta")
        expected = {name: tuple(layer.state_dict()[name].shape) for name in names}
        shapes = {name: tuple(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}
        if shapes != expected:
            raise FormatError(
                f"{cls.__name__}.from_packed: of {rows} rows and {columns} columns the tensors are "
                f"{expected}. Got {shapes}."
            )
        # `damage` reads the tensors by these shapes, hence the order of the checks.
        if damage := cls.FORMAT.damage(*tensors, columns):
            raise FormatError(f"{cls.__name__}.from_packed: damaged, {damage}. Pack it again.")
        layer.weight = frozen(values)
        for name, tensor in zip(cls.FORMAT.companions, tensors[1:], strict=True):
            setattr(layer, name, tensor)
        return layer

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values, the bias and the activations."""
        return self.weight.dtype

    @property
    def places(self) -> Tensor:
        """The tensor that holds the columns of the stored values."""
        return self.get_buffer(self.FORMAT.places)

    def packed(self) -> list[Tensor]:
        """Return the stored tensors, in the order of the format."""
        weight, *companions = self._stored()
        return [weight.detach(), *companions]

    def _stored(self) -> list[Tensor]:
        # Not detached: a product with a weight that requires a gradient raises in its backward.
        return [self.weight, *map(self.get_buffer, self.FORMAT.companions)]

    def dense_weight(self) -> Tensor:
        """Return W (out_features, in_features), with its zeros."""
        return self.FORMAT.unpack(*self.packed(), self.in_features)

    def damage(self) -> str | None:
        """Return why the stored tensors cannot be the result of packing, `None` if they can."""
        return self.FORMAT.damage(*self.packed(), self.in_features)


class Sparse24Linear(PackedLinear):
    """y = x Wᵀ + b with W 2:4: two values and one nibble for every four weights.

    `in_features` is a positive multiple of 8, and `count` is not needed.

    Attributes:
        weight: Stored values (out_features, in_features / 2); frozen.
        weight_meta: Columns of the values, uint8 (out_features, in_features / 8).
        compressed: W in cuSPARSELt's layout, the fastest for prefill on a CUDA device, or `None`.
            `compress` builds it; it takes another 0.5625 of the dense bytes, depends on library and
            device and is not in the state dict. It becomes `None` after `load_state_dict`, after a
            move to another device or dtype, and when `weight` or `weight_meta` is assigned. After
            one of these is changed in place, set it to `None`.
    """

    FORMAT = SPARSE24
    DERIVED = "compressed"
    weight_meta: Tensor
    compressed: Tensor | None

    def _multiply(self, x: Tensor) -> Tensor:
        return self.FORMAT.multiply(x, self._stored(), self.bias, self.compressed)

    def derive(self) -> None:
        """Drop the layout of cuSPARSELt, which `compress` builds."""
        self.compressed = None

    def compress(self) -> str | None:
        """Build `compressed` if cuSPARSELt runs here, else return the reason."""
        shape = self.out_features, self.in_features
        reason = why_not_compressed(shape, self.dtype, self.weight.device)
        self.compressed = None if reason else compress_cusparselt(self.dense_weight())
        return reason

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # `_apply` also runs for moves that change nothing, which must not drop the layout.
        device_and_dtype = self.weight.device, self.weight.dtype
        super()._apply(fn, recurse)
        if (self.weight.device, self.weight.dtype) != device_and_dtype:
            self.derive()
        return self


class BitmaskLinear(PackedLinear):
    """y = x Wᵀ + b with W of any pattern of zeros: one bit a weight, and the non-zero values.

    `count` is the number of non-zero values.

    Attributes:
        weight: Stored values (count,), row after row in the order of their columns; frozen.
        weight_bits: Their columns, uint8 (out_features, ceil(in_features / 8)), lowest bit first.
        offsets: First index of each row in `weight`, int64 (out_features,). It is computed from
            `weight_bits` when these are assigned or loaded, and is not in the state dict; `None`
            while the bits have no data. After the bits are changed in place, call `derive()`.
    """

    FORMAT = BITMASK
    weight_bits: Tensor
    offsets: Tensor | None

    def extra_repr(self) -> str:
        """Return the shape, as `nn.Linear` shows it, and the fraction of non-zero weights."""
        size = self.in_features * self.out_features
        return f"{super().extra_repr()}, kept={self.weight.numel() / max(size, 1):.1%}"


class Bitmask4Linear(PackedLinear):
    """y = x Wᵀ + b with W of four bits and any pattern of zeros: a bitmask, codes and scales.

    `count` is the number of bytes of the codes. Products are those of the values in the layer's
    dtype, unless `eight_bit_activations` is set.

    Attributes:
        weight: Codes, uint8 (count,), two in a byte, group after group of 64 columns; frozen.
        weight_bits: Their columns, uint8 (out_features, ceil(in_features / 8)), lowest bit first.
        weight_scales: A scale for each group, (out_features, ceil(in_features / 64)); frozen.
        offsets: First index of each row in `weight`, int64 (out_features,); see `BitmaskLinear`.
        eight_bit_activations: Whether inputs are rounded to 8 bits, with a scale for each token and
            64 columns: products of integers, less exact, off by default (`round_activations`).
    """

    FORMAT = BITMASK4
    weight_bits: Tensor
    weight_scales: Tensor
    offsets: Tensor | None

    eight_bit_activations = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the scales, the bias and the activations."""
        return self.weight_scales.dtype

    def _multiply(self, x: Tensor) -> Tensor:
        rounds = self.eight_bit_activations
        return self.FORMAT.multiply(x, self._stored(), self.bias, rounds, offsets=self.offsets)

    def extra_repr(self) -> str:
        """Return the shape, as `nn.Linear` shows it, and the bits a weight, its place included."""
        size = max(self.in_features * self.out_features, 1)
        stored = sum(t.nbytes for t in self.packed())
        group = bitmask4.GROUP
        shown = f"{super().extra_repr()}, bits={8 * stored / size:.2f}, group_size={group}"
        return f"{shown}, activations=int8" if self.eight_bit_activations else shown


def round_activations(model: nn.Module, is_on: bool = True) -> None:
    """Set `eight_bit_activations` of all layers of four bits, in place."""
    for module in model.modules():
        if isinstance(module, Bitmask4Linear):
            module.eight_bit_activations = is_on
