"""A linear layer with a packed weight, whatever its format."""

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from mrp_lightning.arguments import checked
from mrp_lightning.errors import FormatError, TargetError
from mrp_lightning.formats.packed_format import PackedFormat
from mrp_lightning.targets.layers import is_conv1d, layers_of


def is_packable(module: nn.Module) -> bool:
    """Whether this is a linear layer with one matrix: no convolution, no stacked experts."""
    return isinstance(module, nn.Linear) or is_conv1d(module)


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


class PackedLinear(nn.Module):
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
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        for name, tensor in zip(self.FORMAT.beside, beside, strict=True):
            self.register_buffer(name, tensor)
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

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., in_features) to (..., out_features).

        Raises:
            RuntimeError: The input has another number of columns; `nn.Linear` raises the same.
        """
        if x.shape[-1] != self.in_features:
            raise RuntimeError(
                f"{type(self).__name__}: expected {self.in_features} columns, its `in_features`, "
                f"got an input of shape {tuple(x.shape)}."
            )
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        """Call the operator."""
        raise NotImplementedError

    def derive(self) -> None:
        """Renew or forget what was computed from the stored tensors, because they changed."""
        raise NotImplementedError

    @classmethod
    def like(
        cls, linear: nn.Module, device: torch.device | str | None = None, **sizes: int
    ) -> Self:
        """An uninitialised layer of the shape of an `nn.Linear` or of transformers' `Conv1D`.

        It is made where the dense weight is, if no device is given. `sizes` is `num_kept`, where
        the class cannot tell that from the shape.
        """
        (dense,) = layers_of("", linear)
        weight = dense.weight
        rows, columns = weight.shape
        has_bias = getattr(linear, "bias", None) is not None
        options: dict[str, Any] = {"dtype": weight.dtype, "device": device or weight.device}
        return cls(columns, rows, bias=has_bias, **(options | sizes))

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
        (dense,) = layers_of("", linear)
        layer = cls.from_packed(cls.FORMAT.pack(dense.weight), dense.weight.shape[1])
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

    def to_linear(self) -> nn.Linear:
        """The same layer with its zeros stored."""
        has_bias = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, has_bias, device="meta")
        linear.weight = nn.Parameter(self.dense_weight())
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach())
        return linear

    def extra_repr(self) -> str:
        """Shape, as `nn.Linear` shows it."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}"
        )
