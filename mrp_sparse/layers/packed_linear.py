"""A linear layer with a packed weight, whatever its format."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mrp_sparse.arguments import checked
from mrp_sparse.errors import FormatError, TargetError
from mrp_sparse.formats.packed_format import PackedFormat
from mrp_sparse.layers.frozen_linear import FrozenLinear, frozen, is_conv1d, weight_matrix


def is_packable(module: nn.Module) -> bool:
    """Whether this is a linear layer with one matrix: no convolution, no stacked experts."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


class PackedLinear(FrozenLinear):
    """y = x Wᵀ + b with W packed as `docs/format.md` says: the kept values, their places, and more.

    All are on the device of the layer; the bias is not initialised.
    """

    FORMAT: ClassVar[PackedFormat]
    """The format of the stored tensors."""
    DERIVED: ClassVar[str]
    """Name of what is computed from the stored tensors, and is no part of the state dict."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        weight: Tensor,
        beside: Sequence[Tensor],
        bias: bool,
    ) -> None:
        tensors = dict(zip(self.FORMAT.beside, beside, strict=True))
        super().__init__(in_features, out_features, **tensors)
        self.weight = frozen(weight)
        options: dict[str, Any] = {"dtype": self.dtype, "device": weight.device}
        self.bias = frozen(torch.empty(out_features, **options)) if bias else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == self.DERIVED:
            # A non-persistent buffer stays out of state dicts. While there is none it must not be
            # registered as such: accelerate moves every one of them, `None` too.
            self.register_buffer(name, value, persistent=value is None)
            return
        super().__setattr__(name, value)
        if name in ("weight", self.FORMAT.places):
            self.derive()

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.derive()

    def derive(self) -> None:
        """Renew or forget what was computed from the stored tensors, because they changed."""
        raise NotImplementedError

    @classmethod
    @checked
    def from_linear(cls, linear: nn.Module) -> Self:
        """Pack a pruned `nn.Linear`, or transformers' `Conv1D`.

        Raises:
            PatternError: Its weight has no form of this kind.
            TargetError: It is another module.
        """
        if not is_packable(linear):
            raise TargetError(
                f"{cls.__name__}.from_linear packs an `nn.Linear` or transformers' `Conv1D`; got a "
                f"{type(linear).__name__}. Give one of these."
            )
        weight = weight_matrix(linear)
        layer = cls.from_packed(cls.FORMAT.pack(weight), weight.shape[1])
        if isinstance(linear.bias, Tensor):
            layer.bias = frozen(linear.bias.detach())
        return layer

    @classmethod
    @checked
    def from_packed(cls, tensors: Sequence[Tensor], columns: int) -> Self:
        """A layer without bias on the tensors that a weight of so many columns was packed into.

        Raises:
            FormatError: They are not as many, of other shapes, or were never packed together.
            PatternError: No weight of so many columns has this form.
        """
        names = ("weight", *cls.FORMAT.beside)
        kinds = [type(tensor).__name__ for tensor in tensors]
        if len(tensors) != len(names) or not all(isinstance(x, Tensor) for x in tensors):
            raise FormatError(
                f"{cls.__name__}.from_packed needs the tensors {', '.join(names)}; got "
                f"{', '.join(kinds) or 'none'}."
            )
        values, places, *_ = tensors
        options: dict[str, Any] = {"device": "meta"}
        if cls.FORMAT.count:
            options[cls.FORMAT.count] = values.numel()
        rows = places.shape[0] if places.ndim else 0
        layer = cls(columns, rows, bias=False, **options)
        expected = {name: tuple(layer.state_dict()[name].shape) for name in names}
        got = {name: tuple(tensor.shape) for name, tensor in zip(names, tensors, strict=True)}
        if got != expected or places.dtype != torch.uint8:
            raise FormatError(
                f"{cls.__name__}.from_packed: of {rows} rows and {columns} columns the "
                f"tensors are {expected}, with `{cls.FORMAT.places}` in uint8. Got {got}, in "
                f"{places.dtype}."
            )
        if damage := cls.FORMAT.damage(*tensors, columns):
            raise FormatError(f"{cls.__name__}.from_packed: damaged, {damage}. Pack it again.")
        layer.weight = frozen(values)
        for name, tensor in zip(cls.FORMAT.beside, tensors[1:], strict=True):
            setattr(layer, name, tensor)
        return layer

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values and the activations."""
        return self.weight.dtype

    def packed(self) -> list[Tensor]:
        """The tensors that the weight is packed into, as the format names them."""
        return [self.weight.detach(), *map(self.get_buffer, self.FORMAT.beside)]

    @property
    def places(self) -> Tensor:
        """The tensor that says where the kept values were."""
        return self.get_buffer(self.FORMAT.places)

    def dense_weight(self) -> Tensor:
        """W (out_features, in_features), with its zeros."""
        return self.FORMAT.unpack(*self.packed(), self.in_features)

    def damage(self) -> str | None:
        """The reason why the stored tensors were never packed together, or `None`."""
        if self.places.dtype != torch.uint8:
            return f"expected uint8, got {self.places.dtype}"
        return self.FORMAT.damage(*self.packed(), self.in_features)
