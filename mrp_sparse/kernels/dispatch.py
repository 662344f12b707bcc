"""The operator on CUDA devices: a kernel is chosen for every call, by its shape, and runs.

The choice is the kernel that was measured to be the fastest of the usable ones or, where nothing
was measured, the first usable one of the default order.
"""

import functools
import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from mrp_sparse.errors import FormatError
from mrp_sparse.kernels.candidates import KERNELS, Call, PackedWeight, usable
from mrp_sparse.kernels.kernel_times import KernelTimes, cache_path, environment
from mrp_sparse.kernels.operator import linear24

FEW_TOKENS = 64
"""Up to here reading the weight takes the time, and the kernels that read it packed lead."""
MANY_TOKENS_ORDER = ("cusparselt", "unpack-dense")

log = logging.getLogger(__name__)
_times: dict[str, KernelTimes] = {}  # by device; `use_times` set them, or they were on the disk


@linear24.register_kernel("cuda")
def multiply(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    """Compute what `linear24` says, by the kernel that `choose` gives.

    Raises:
        ValueError: Input and weight differ in dtype.
    """
    if x.dtype != weight.dtype:
        raise ValueError(
            f"The input is {x.dtype} and the packed weight {weight.dtype}; cast one of them."
        )
    out_features, in_features = weight.shape[0], 2 * weight.shape[1]
    flat = x.reshape(-1, in_features)
    call = Call(
        len(flat), out_features, in_features, x.dtype, x.device, compressed=compressed is not None
    )
    name, config = choose(call)
    y = KERNELS[name].multiply(flat, PackedWeight(weight, meta, compressed), bias, **config)
    return y.view(*x.shape[:-1], out_features)


@functools.lru_cache(maxsize=4096)
def choose(call: Call) -> tuple[str, Mapping[str, int]]:
    """The name in `KERNELS` of the kernel that takes a call, and its configuration."""
    kernels = usable(call)
    rows = known_times(call.device).at(call)
    measured = next((row for row in rows if row.kernel in kernels), None)
    if measured is not None:
        name, config = measured.kernel, measured.config
    else:
        order = KERNELS if call.tokens <= FEW_TOKENS else MANY_TOKENS_ORDER
        name = next(name for name in order if name in kernels)
        config = KERNELS[name].configs[0]
    log.debug("%s runs by %s %s", call, name, config)
    return name, config


def known_times(device: torch.device) -> KernelTimes:
    """The times in use on a device: set by `use_times`, else read from the cache directory."""
    key = _key(device)
    if key not in _times:
        here = environment(device)
        path = cache_path(here)
        _times[key] = KernelTimes(here)
        if path.exists():
            try:
                _times[key] = KernelTimes.load(path)
            except FormatError as error:
                log.warning("%s Until then kernels are chosen by number of tokens alone.", error)
    return _times[key]


def use_times(times: KernelTimes | None, device: torch.device) -> None:
    """Choose by these times from now on; `None`: by those in the cache directory again."""
    _times.pop(_key(device), None)
    if times is not None:
        _times[_key(device)] = times
    choose.cache_clear()


def _key(device: torch.device) -> str:
    """A tensor's device has an index where the one that a user names may have none."""
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)
