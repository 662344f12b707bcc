"""The measured table: how long each kernel took on this device, by shape and number of tokens."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from export.kernels import cusparselt
from mrp_lightning.errors import FormatError
from mrp_lightning.files import save_text
from mrp_lightning.json_files import read_json

VERSION = 1
STORED_DENSE = "stored dense"
"""The baseline: the same pruned weight kept as an ordinary matrix. No kernel has this name."""


@dataclass(frozen=True)
class Measurement:
    """One kernel on one problem.

    Attributes:
        out_features: Rows of the weight.
        in_features: Columns of the weight.
        dtype: Dtype of weight and input as torch prints it, without `torch.`.
        tokens: Rows of the input.
        kernel: A key of `KERNELS`, or `STORED_DENSE`.
        config: The best configuration of the kernel.
        microseconds: Median time of the repeats.
        low: 20th percentile of the repeats, microseconds.
        high: 80th percentile of the repeats, microseconds.
    """

    out_features: int
    in_features: int
    dtype: str
    tokens: int
    kernel: str
    config: Mapping[str, int]
    microseconds: float
    low: float
    high: float

    @property
    def problem(self) -> tuple[int, int, str, int]:
        """What all kernels are compared on: the shape, the dtype and the number of tokens."""
        return self.out_features, self.in_features, self.dtype, self.tokens


@dataclass(frozen=True)
class Failure:
    """A kernel that could not be measured on one problem, and why."""

    out_features: int
    in_features: int
    dtype: str
    tokens: int
    kernel: str
    reason: str


@dataclass(frozen=True)
class KernelTimes:
    """Measurements of one environment: a device and the versions of the libraries there."""

    environment: Mapping[str, Any]
    measurements: tuple[Measurement, ...] = field(default=())

    def at(
        self, tokens: int, out_features: int, in_features: int, dtype: torch.dtype
    ) -> list[Measurement]:
        """What was measured for a shape at the nearest number of tokens, the fastest first.

        Nearest by ratio, and within a factor of two: else nothing is known. One token is a problem
        of its own, for which no other number of tokens stands in.
        """
        name = str(dtype).removeprefix("torch.")
        same = [
            m
            for m in self.measurements
            if (m.out_features, m.in_features, m.dtype) == (out_features, in_features, name)
            and (m.tokens == 1) == (tokens == 1)
            and m.tokens <= 2 * tokens <= 4 * m.tokens
        ]
        if not same:
            return []
        nearest = min({m.tokens for m in same}, key=lambda n: (max(n, tokens) / min(n, tokens), n))
        return sorted((m for m in same if m.tokens == nearest), key=lambda m: m.microseconds)

    def merged(self, measurements: Iterable[Measurement]) -> "KernelTimes":
        """This table with newer measurements in the place of older ones of the same problem."""
        new = tuple(measurements)
        measured = {m.problem for m in new}
        kept = tuple(m for m in self.measurements if m.problem not in measured)
        return KernelTimes(self.environment, kept + new)

    def save(self, path: Path) -> None:
        """Write JSON; an interrupted write leaves the old file."""
        content = {"version": VERSION, **asdict(self)}
        save_text(path, json.dumps(content, indent=1))

    @classmethod
    def load(cls, path: Path) -> "KernelTimes":
        """Read what `save` wrote.

        Raises:
            FormatError: The file is no such table.
        """
        content = read_json(path, "measure again")
        if content.get("version") != VERSION:
            raise FormatError(
                f"{path} is a table of version {content.get('version')!r}, not {VERSION}. Delete "
                "it and measure again."
            )
        try:
            measurements = tuple(Measurement(**m) for m in content["measurements"])
            if not all(isinstance(m.microseconds, int | float) for m in measurements):
                raise TypeError("`microseconds` is no number")
            return cls(dict(content["environment"]), measurements)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path} is not a table of measurements ({error}). Delete it and measure again."
            ) from error


def environment(device: torch.device) -> dict[str, Any]:
    """What measurements depend on: the device and the versions of what runs there."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cusparselt"] = cusparselt.version()
        from importlib.metadata import PackageNotFoundError, version

        try:
            found["triton"] = version("triton")
        except PackageNotFoundError:
            found["triton"] = None
    else:
        found["device"] = device.type
    return found


def cache_path(environment: Mapping[str, Any]) -> Path:
    """Where the table of an environment is kept; `XDG_CACHE_HOME` moves it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]
    return root / "mrp-lightning" / f"sparse24-{digest}.json"
