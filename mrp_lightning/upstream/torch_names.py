"""Private names of torch."""

from typing import Any

import torch
from torch import Tensor, nn

COMPILED = "_orig_mod"
"""The name of the child in which `torch.compile` keeps the module that it wraps. Seen in torch
2.13. Hooks on the wrapper never fire, and the names of all parts inside contain this name.
Replacement: a function that unwraps an `OptimizedModule`, once torch has one."""


def without_compiled(name: str) -> str:
    """Return the name of a weight or module without the parts that `torch.compile` adds."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


APPLY = "_apply"
"""The method by which `to`, `half` and the like change every tensor of a module. Seen in torch
2.13. A block that stays in place while its model moves overrides it, since there is no hook."""


def recomputed_buffers(module: nn.Module) -> list[Tensor]:
    """Return the buffers of one module that no checkpoint holds.

    Seen in torch 2.13. Replacement: a public counterpart of `register_buffer(persistent=False)`.
    """
    names = module._non_persistent_buffers_set
    return [tensor for name, tensor in module.named_buffers(recurse=False) if name in names]


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself; see `COMPILED`."""
    original: nn.Module = getattr(module, COMPILED, module)
    return original


def pads(conv: nn.Conv2d) -> list[int]:
    """Return a convolution's padding as the argument of `torch.nn.functional.pad`.

    Seen in torch 2.13. `conv.padding` is a pair of numbers or a string, which means uneven padding
    for even kernels; torch stores the resolved numbers. Replacement: `pad` with a convolution's
    `padding`, once it accepts strings.
    """
    return list(conv._reversed_padding_repeated_twice)


def times_changed(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; inference tensors have no count, so 0.

    Seen in torch 2.13. Layers that read the same tensor share a Hessian, unless the tensor was
    changed in place in between. There is no public way to know.
    """
    return 0 if tensor.is_inference() else tensor._version


def multiplies_bfloat16() -> bool:
    """Return whether this CPU has instructions that multiply bfloat16 numbers: AVX512-BF16 or AMX.

    Seen in torch 2.13. Replacement: `torch.cpu.get_capabilities()`, once the oldest supported torch
    has it.
    """
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def float32_precision(setting: tuple[str, str]) -> str:
    """Return the effective precision of float32 products: none, ieee, tf32 or bf16.

    A setting is a backend and an operation, such as ("cuda", "matmul") or ("mkldnn", "all"). Seen
    in torch 2.13. Replacement: `torch.backends.mkldnn.fp32_precision` and the like, once setting
    mkldnn's no longer sets that of all back-ends.
    """
    return str(torch._C._get_fp32_precision_getter(*setting))


def set_float32_precision(setting: tuple[str, str], precision: str) -> None:
    """Set the precision of float32 products; see `float32_precision`."""
    torch._C._set_fp32_precision_setter(*setting, precision)


def group_store() -> Any:
    """Return the store of torch's default process group, which all of its processes read and write.

    Seen in torch 2.13. The store needs no further port, and exists for all backends. Replacement: a
    public `torch.distributed.get_default_store`.
    """
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def is_cutlass_forced() -> bool:
    """Return whether torch's 2:4 tensors run on CUTLASS although cuSPARSELt is available.

    Seen in torch 2.13, whose class of 2:4 tensors documents this attribute as the way to choose.
    Replacement: an argument of `to_sparse_semi_structured`.
    """
    from torch.sparse import SparseSemiStructuredTensor

    return SparseSemiStructuredTensor._FORCE_CUTLASS


def tiles_of_sparse24(kind: Any, dtype: torch.dtype) -> tuple[int, int] | None:
    """Return the divisors of a 2:4 tensor's rows and columns; `None` for unsupported dtypes.

    Seen in torch 2.13. Without this check, the conversion fails in the middle of a model.
    Replacement: a public function that tests whether a tensor can be converted.
    """
    rules = kind._DTYPE_SHAPE_CONSTRAINTS.get(dtype)
    return None if rules is None else (rules.sparse_min_rows, rules.sparse_min_cols)
