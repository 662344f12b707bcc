"""Names that torch keeps to itself."""

from typing import Any

import torch
from torch import Tensor, nn

COMPILED = "_orig_mod"
"""The child under which `torch.compile` keeps the module that it wraps. Seen in torch 2.13.

Hooks on the wrapper never fire, and the word is in the names of all that is inside. In its place:
whatever unwraps an `OptimizedModule`, once torch has it."""


def without_compiled(name: str) -> str:
    """Return the name of a weight or module without the parts that `torch.compile` adds."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


APPLY = "_apply"
"""The method by which `to`, `half` and their like change every tensor of a module. Seen in torch
2.13.

A block that stays where it is while its model moves has one of its own. There is no hook for it."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile` wrapped, or the module itself; see `COMPILED`."""
    original: nn.Module = getattr(module, COMPILED, module)
    return original


def pads(conv: nn.Conv2d) -> list[int]:
    """The pads, as `torch.nn.functional.pad` takes them, that do what a convolution's padding does.

    Seen in torch 2.13. `conv.padding` is a pair of numbers or a word, and the word gives uneven
    pads for even kernels; torch has worked that out. In its place: `pad` with a convolution's
    `padding`, once it takes words.
    """
    return list(conv._reversed_padding_repeated_twice)


def times_changed(tensor: Tensor) -> int:
    """The number of times that a tensor was changed in place; inference mode counts none.

    Seen in torch 2.13. Layers that are given the same tensor share a Hessian, unless something was
    added to it in between. Nothing public tells that.
    """
    return 0 if tensor.is_inference() else tensor._version


def has_matrix_units() -> bool:
    """Whether this CPU has AMX, units that multiply tiles of bfloat16 numbers.

    Seen in torch 2.13. In its place: `torch.cpu.get_capabilities()["amx_tile"]`, once the oldest
    torch that is supported has it.
    """
    return torch.cpu._is_amx_tile_supported()


def float32_precision(setting: tuple[str, str]) -> str:
    """The precision in force of float32 products: none, ieee, tf32 or bf16.

    It is that of a backend and an operation, such as ("cuda", "matmul") or ("mkldnn", "all").

    Seen in torch 2.13. In its place: `torch.backends.mkldnn.fp32_precision` and its like. Of these,
    mkldnn's now sets the precision of all back-ends.
    """
    return str(torch._C._get_fp32_precision_getter(*setting))


def set_float32_precision(setting: tuple[str, str], precision: str) -> None:
    """Set the precision of float32 products; see `float32_precision`."""
    torch._C._set_fp32_precision_setter(*setting, precision)


def group_store() -> Any:
    """The store of torch's default process group, which all of its processes can read and write.

    Seen in torch 2.13. It is there without a port of its own, and in all backends. In its place: a
    public `torch.distributed.get_default_store`.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def is_cutlass_forced() -> bool:
    """Whether torch's 2:4 tensors run on CUTLASS though cuSPARSELt is there.

    Seen in torch 2.13, whose class of them documents this attribute as the way to choose. In its
    place: an argument of `to_sparse_semi_structured`.
    """
    from torch.sparse import SparseSemiStructuredTensor

    return SparseSemiStructuredTensor._FORCE_CUTLASS


def tiles_of_sparse24(kind: Any, dtype: torch.dtype) -> tuple[int, int] | None:
    """The tile that divides a 2:4 tensor's rows and columns; `None` for dtypes that it cannot have.

    Seen in torch 2.13. Whoever does not ask first gets an error in the middle of a model. In its
    place: a public function that says whether a tensor has such a form.
    """
    rules = kind._DTYPE_SHAPE_CONSTRAINTS.get(dtype)
    return None if rules is None else (rules.sparse_min_rows, rules.sparse_min_cols)
