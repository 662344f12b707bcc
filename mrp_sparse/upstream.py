"""Private names of torch and transformers, and the public ones that would replace them."""

import re
from typing import Any

import torch
from torch import Tensor


def check(holds: Any, message: str) -> None:
    """Raise a RuntimeError where a relation of shapes does not hold, which may be symbols.

    Seen in torch 2.13. Code that `torch.compile` and `torch.export` trace cannot ask a symbol by
    `if`. Replacement: a public name of `torch._check`, which torch's pages recommend.
    """
    torch._check(holds, lambda: message)


def ask_for_amx() -> None:
    """Ask Linux for AMX in this process, as vLLM's attention does not; seen in 0.32, torch 2.13."""
    # Linux kills a process that uses AMX without permission. oneDNN asks for it at its first
    # product, which does not exist where all layers are packed. Replacement: none is needed once
    # vLLM asks by itself. Without AMX this does nothing.
    torch.cpu._init_amx()


def compress_cusparselt(weight: Tensor) -> Tensor:
    """Return a 2:4 weight in cuSPARSELt's layout.

    Seen in torch 2.13, as the next function. torch's public way to cuSPARSELt,
    `to_sparse_semi_structured`, gives a subclass of tensors, which neither safetensors nor an
    operator of ours takes. In their place: public operators, once torch has them.
    """
    return torch._cslt_compress(weight.contiguous())


def matmul_cusparselt(compressed: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Return (W x)ᵀ + bias for x (in, tokens); see `compress_cusparselt`."""
    return torch._cslt_sparse_mm(compressed, x, bias=bias, transpose_result=True)


def was_loaded(tensor: Tensor) -> bool:
    """Return whether `from_pretrained` read a tensor from a file, or left it on the disk.

    Seen in transformers 5.23, which reports missing tensors only after it calls the quantizer.
    Replacement: the report of the loading, once quantizers are given it.
    """
    return tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)


def ignore_unexpected(model: Any, name: str) -> None:
    """Let `from_pretrained` ignore a tensor of the files that the model does not have.

    Seen in transformers 5.23. Replacement: a hook of quantizers for unexpected keys.
    """
    ignored = set(model._keys_to_ignore_on_load_unexpected or ())
    model._keys_to_ignore_on_load_unexpected = ignored | {re.escape(name)}
