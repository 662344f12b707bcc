"""The device of a command, and what a measurement was made on."""

import os
import platform
from pathlib import Path

import torch

from mrp_lightning.errors import OptionError


def device_named(name: str | None) -> torch.device:
    """The device of `--device`.

    Args:
        name: cpu, cuda or cuda:N; `None` is CUDA where there is one.

    Raises:
        OptionError: It is none of these, or is not there.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise OptionError(f"`--device`: {str(error).splitlines()[0]}") from error
    if device.type not in ("cpu", "cuda"):
        raise OptionError(f"`--device {name}`: expected cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise OptionError(
            f"`--device {name}`: this machine has {torch.cuda.device_count() or 'no'} CUDA "
            "device; try `cpu`."
        )
    return device


def machine(device: torch.device) -> str:
    """The device and the version of torch."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor()}, {torch.get_num_threads()} of {os.cpu_count()} cores"
    return f"{name}; torch {torch.__version__}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
