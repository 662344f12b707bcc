"""What runs a packed 2:4 weight on a CUDA device, chosen by shape and number of tokens.

`choose` is what the operator asks: the fastest kernel of the measured table, or, where nothing was
measured, the one that should be right for so many tokens. A weight never prepared for cuSPARSELt is
never run by it. `export.backends` puts a whole model on a back-end.
"""

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor

from export.kernels import forms
from export.kernels.kernels import FORM, KERNELS, Call, with_config
from export.kernels.table import Table, cache_path, environment
from export.packed.operator import linear24
from mrp_lightning.errors import DataError

__all__ = ["choose", "choose_name", "measured_table", "use_table"]

FEW_TOKENS = 64
"""Up to here reading the weight takes the time, and the kernel that reads it packed leads."""

log = logging.getLogger(__name__)
_tables: dict[str, Table] = {}  # by device; what `use_table` set, or what was found on disk


def choose(
    x_rows: int,
    out_features: int,
    in_features: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]:
    """A function (x, values, meta, bias) → y for x (x_rows, in_features).

    Raises:
        ValueError: On the call, where input and weight differ in dtype.
    """
    call = Call(x_rows, out_features, in_features, dtype, device)

    def run(x: Tensor, values: Tensor, meta: Tensor, bias: Tensor | None) -> Tensor:
        if x.dtype != values.dtype:
            raise ValueError(
                f"The input is {x.dtype} and the packed weight {values.dtype}; cast one of them."
            )
        prepared = forms.find(values, FORM) is not None
        return _kernel(call, prepared)(x, values, meta, bias)

    return run


def choose_name(call: Call, prepared: bool) -> tuple[str, dict[str, int]]:
    """The kernel's name and its configuration.

    Args:
        call: The problem.
        prepared: Whether the weight has its cuSPARSELt form.
    """
    usable = {
        name: kernel
        for name, kernel in KERNELS.items()
        if (prepared or name != "cusparselt") and kernel.refuse(call) is None
    }
    table = measured_table(call.device)
    for m in table.at(call.tokens, call.out_features, call.in_features, call.dtype):
        if m.kernel in usable:
            return m.kernel, dict(m.config)
    order: tuple[str, ...]
    if call.tokens == 1:
        order = ("triton-gemv", "triton-gemm", "cusparselt", "unpack-dense")
    elif call.tokens <= FEW_TOKENS:
        order = ("triton-gemm", "cusparselt", "unpack-dense")
    else:
        order = ("cusparselt", "unpack-dense")
    name = next(name for name in order if name in usable)
    return name, dict(KERNELS[name].configs[0])


@functools.lru_cache(maxsize=4096)
def _kernel(call: Call, prepared: bool) -> Callable[..., Tensor]:
    name, config = choose_name(call, prepared)
    log.debug("%s runs by %s %s", call, name, config)
    return with_config(name, config)


def measured_table(device: torch.device) -> Table:
    """The table in use on a device: set by `use_table`, else read from the cache directory."""
    key = _key(device)
    if key not in _tables:
        here = environment(device)
        path = cache_path(here)
        table = Table(here)
        if path.exists():
            try:
                table = Table.load(path)
            except DataError as error:
                log.warning("%s Until then kernels are chosen by number of tokens alone.", error)
        _tables[key] = table
    return _tables[key]


def use_table(table: Table | None, device: torch.device) -> None:
    """Choose by this table from now on; `None`: by the one in the cache directory again."""
    _tables.pop(_key(device), None)
    if table is not None:
        _tables[_key(device)] = table
    _kernel.cache_clear()


def _key(device: torch.device) -> str:
    """A tensor's device has an index where the one that a user names may have none."""
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)


@linear24.register_kernel("cuda")
def _cuda(x: Tensor, weight: Tensor, meta: Tensor, bias: Tensor | None) -> Tensor:
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    flat = x.reshape(-1, columns)
    kernel = choose(flat.shape[0], rows, columns, x.dtype, x.device)
    return kernel(flat, weight, meta, bias).view(*x.shape[:-1], rows)
