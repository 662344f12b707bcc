"""How long each kernel took on this device, by shape and number of tokens."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from mrp_sparse.errors import FormatError
from mrp_sparse.json_files import read_json
from mrp_sparse.kernels import cusparselt
from mrp_sparse.kernels.candidates import Call

VERSION = 1
STORED_DENSE = "stored dense"
"""The baseline: the same pruned weight kept as an ordinary matrix. No kernel has this name."""


@dataclass(frozen=True)
class Contestant:
    """A kernel on one problem: (tokens, in) times the transpose of (out, in), in one dtype.

    The dtype is written as torch prints it, without `torch.`, and the kernel is a key of `KERNELS`,
    or `STORED_DENSE`.
    """

    out_features: int
    in_features: int
    dtype: str
    tokens: int
    kernel: str

    @property
    def problem(self) -> tuple[int, int, str, int]:
        """All but the kernel: the shape, the dtype and the number of tokens."""
        return self.out_features, self.in_features, self.dtype, self.tokens


@dataclass(frozen=True)
class Measurement(Contestant):
    """The time of a kernel, in its best configuration.

    In microseconds: the median of the repeats, and their 20th and 80th percentiles.
    """

    config: Mapping[str, int]
    microseconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Failure(Contestant):
    """The reason why a kernel could not be measured."""

    reason: str


@dataclass(frozen=True)
class KernelTimes:
    """Measurements of one environment: a device and the versions of the libraries there."""

    environment: Mapping[str, Any]
    measurements: tuple[Measurement, ...] = ()

    def at(self, call: Call) -> list[Measurement]:
        """The measurements for a shape at the nearest number of tokens, the fastest first.

        Nearest by ratio, and within a factor of two: else nothing is known. One token is a problem
        of its own, for which no other number of tokens stands in.
        """
        tokens = call.tokens
        shape = call.out_features, call.in_features, str(call.dtype).removeprefix("torch.")
        same = [
            m
            for m in self.measurements
            if (m.out_features, m.in_features, m.dtype) == shape
            and (m.tokens == 1) == (tokens == 1)
            and m.tokens <= 2 * tokens <= 4 * m.tokens
        ]
        if not same:
            return []
        nearest = min({m.tokens for m in same}, key=lambda n: (max(n, tokens) / min(n, tokens), n))
        return sorted((m for m in same if m.tokens == nearest), key=lambda m: m.microseconds)

    def merged(self, measurements: Iterable[Measurement]) -> "KernelTimes":
        """These times, with newer ones in the place of older ones of the same problem."""
        new = tuple(measurements)
        measured = {m.problem for m in new}
        kept = tuple(m for m in self.measurements if m.problem not in measured)
        return KernelTimes(self.environment, kept + new)

    def save(self, path: Path) -> None:
        """Write JSON; an interrupted write leaves the old file."""
        content = {"version": VERSION, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        written = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            written.write_text(json.dumps(content, indent=1))
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "KernelTimes":
        """Read what `save` wrote.

        Raises:
            FormatError: The file is no such thing, or of another version.
        """
        content = read_json(path, "measure again")
        if content.get("version") != VERSION:
            raise FormatError(
                f"{path} is a table of version {content.get('version')!r}, not {VERSION}. Delete "
                "it and measure again."
            )
        try:
            rows = tuple(Measurement(**row) for row in content["measurements"])
            if any(not isinstance(row.config, dict) or not row.microseconds > 0 for row in rows):
                raise ValueError("a row without `config` or `microseconds`")
            return cls(dict(content["environment"]), rows)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path} is not as mrp-lightning writes it ({error}). Delete it, or measure again."
            ) from error


def environment(device: torch.device) -> dict[str, Any]:
    """The device and the versions of what runs there, on which measurements depend."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["cusparselt"] = cusparselt.version()
        try:
            found["triton"] = version("triton")
        except PackageNotFoundError:
            found["triton"] = None
    else:
        found["device"] = device.type
    return found


def cache_path(environment: Mapping[str, Any]) -> Path:
    """The file in which the times of an environment are kept; `XDG_CACHE_HOME` moves it."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]
    return root / "mrp-lightning" / f"sparse24-{digest}.json"
