"""The device that a command uses."""

import os
from functools import cache

import torch

from mrp_lightning.environment import progress_log
from mrp_lightning.errors import OptionError, first_line


def device_named(name: str | None) -> torch.device:
    """Return the device of `--device`: cpu, cuda or cuda:N; `None` is CUDA if available, else cpu.

    Raises:
        OptionError: The name is none of these, or this machine lacks the device.
    """
    if name is None:
        warn_of_unused_gpu()
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"`--device`: {str(error).splitlines()[0]}") from error
    # torch knows the names of devices that this package is not made for, such as meta or mps.
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"`--device {name}`: expected cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"`--device {name}`: this machine has {torch.cuda.device_count() or 'no'} CUDA "
            "device; try `cpu`."
        )
    return device


@cache
def warn_of_unused_gpu() -> None:
    """Warn once if torch is a CUDA build, but cannot use a GPU, so that the CPU does all the work.

    torch falls back silently if the driver is older than its CUDA, or if a container was started
    without its GPUs. `CUDA_VISIBLE_DEVICES` that hides all GPUs is a choice, and gives no warning.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda is None or hidden or torch.cuda.is_available():
        return
    try:
        # `is_available` hides the reason; an initialization that fails gives it.
        torch.cuda.init()
        reason = "it sees no device"
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error)
    progress_log.warning(
        "THE CPU DOES ALL THE WORK: torch %s is a build for CUDA %s and can use no GPU (%s). If "
        "this machine has one, check `nvidia-smi`: CUDA 13 needs a driver 580 or newer, a "
        "container its `--gpus all`, and torch for an older driver comes from "
        "https://download.pytorch.org/whl/cu126. If it has none, set CUDA_VISIBLE_DEVICES=-1.",
        torch.__version__,
        torch.version.cuda,
        reason,
    )


@cache
def warn_of_slow_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """Warn once of a model in 16 bits on a CPU of x86 without AVX-512, where float32 is faster."""
    is_narrow = dtype in (torch.bfloat16, torch.float16)
    if is_narrow and device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2":
        name = str(dtype).removeprefix("torch.")
        progress_log.warning(
            "This CPU has no instructions for %s, which is several times as slow here as float32: "
            "load the model with `dtype: float32` (`--dtype float32`) if memory allows.",
            name,
        )
