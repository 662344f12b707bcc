"""`linear24` on CUDA devices: choose a kernel for each call by its shape, and run it.

The choice is the usable kernel with the shortest measured time or, without measurements, the first
usable one in the default order.
"""

import functools
import hashlib
import json
import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrp_ground.environment import cache_directory
from mrp_ground.errors import FormatError
from mrp_ground.json_files import read_json
from mrp_sparse.kernels import cusparselt
from mrp_sparse.kernels.candidates import KERNELS, Call, PackedWeight, usable
from mrp_sparse.kernels.operator import linear24

VERSION = 1  # of the file that `KernelTimes.save` writes
STORED_DENSE = "stored dense"
"""Name of the baseline, the pruned weight as an ordinary matrix; no kernel has this name."""


@dataclass(frozen=True)
class _Contestant:
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
        """The shape, the dtype and the number of tokens."""
        return self.out_features, self.in_features, self.dtype, self.tokens


@dataclass(frozen=True)
class Measurement(_Contestant):
    """The time of a kernel in its best configuration.

    Times are in microseconds: the median of the repeats, and their 20th and 80th percentiles.
    """

    config: Mapping[str, int]
    microseconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Failure(_Contestant):
    """A kernel that could not be measured, and the reason."""

    reason: str


@dataclass(frozen=True)
class KernelTimes:
    """Measured times of kernels in one environment: a device and the versions of its libraries."""

    environment: Mapping[str, Any]
    measurements: tuple[Measurement, ...] = ()

    def at(self, call: Call) -> list[Measurement]:
        """Return the measurements of a shape at the nearest number of tokens, the fastest first.

        The nearest number by ratio, within a factor of two; else the list is empty. For one token,
        only measurements of one token count.
        """
        tokens = call.tokens
        shape = call.out_features, call.in_features, str(call.dtype).removeprefix("torch.")
        # tokens / 2 ≤ m.tokens ≤ 2·tokens, in whole numbers. One token has a kernel of its own, so
        # that its times predict nothing for two.
        same = [
            m
            for m in self.measurements
            if (m.out_features, m.in_features, m.dtype) == shape
            and (m.tokens == 1) == (tokens == 1)
            and m.tokens <= 2 * tokens <= 4 * m.tokens
        ]
        if not same:
            return []
        # Of equal ratios the smaller number wins: the order of a set must not decide.
        nearest = min({m.tokens for m in same}, key=lambda n: (max(n, tokens) / min(n, tokens), n))
        return sorted((m for m in same if m.tokens == nearest), key=lambda m: m.microseconds)

    def merged(self, measurements: Iterable[Measurement]) -> "KernelTimes":
        """Return these times, newer ones replacing older ones of the same problem."""
        new = tuple(measurements)
        # A problem is replaced whole: a kernel that fails now must not win by its older time.
        measured = {m.problem for m in new}
        older = tuple(m for m in self.measurements if m.problem not in measured)
        return KernelTimes(self.environment, older + new)

    def save(self, path: Path) -> None:
        """Write JSON; an interrupted write leaves the old file."""
        content = {"version": VERSION, **asdict(self)}
        path.parent.mkdir(parents=True, exist_ok=True)
        # A rename within one folder is atomic, and the process id separates two writers.
        written = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            written.write_text(json.dumps(content, indent=1))
            written.replace(path)
        finally:
            written.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "KernelTimes":
        """Read the times that `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            FormatError: The file has no such content, or is of another version.
        """
        content = read_json(path, "measure again")
        if content.get("version") != VERSION:
            raise FormatError(
                f"{path} is a table of version {content.get('version')!r}, not {VERSION}. Delete "
                "it and measure again."
            )
        try:
            rows = tuple(Measurement(**row) for row in content["measurements"])
            for row in rows:
                numbers = row.out_features, row.in_features, row.tokens, row.microseconds
                if not isinstance(row.config, dict) or not all(number > 0 for number in numbers):
                    raise ValueError("a row without `config`, or with a number that is not above 0")
            return cls(dict(content["environment"]), rows)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(
                f"{path} is not as mrp-lightning writes it ({error}). Delete it, or measure again."
            ) from error


def environment(device: torch.device) -> dict[str, Any]:
    """Return the device and the versions of its libraries, on which measurements depend."""
    libraries: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if device.type == "cuda":
        libraries["device"] = torch.cuda.get_device_name(device)
        libraries["cusparselt"] = cusparselt.version()
        try:
            libraries["triton"] = version("triton")
        except PackageNotFoundError:
            libraries["triton"] = None
    else:
        libraries["device"] = device.type
    return libraries


def cache_path(environment: Mapping[str, Any]) -> Path:
    """Return the file in the cache directory that holds the times of an environment."""
    digest = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]
    return cache_directory() / f"sparse24-{digest}.json"


_FEW_TOKENS = 64
"""Number of tokens up to which the time is that of reading the weight."""
_MANY_TOKENS_ORDER = ("cusparselt", "unpack-dense")

log = logging.getLogger(__name__)
_times: dict[str, KernelTimes] = {}  # by device: set by `use_times`, or read from the disk


@linear24.register_kernel("cuda")
def multiply(
    x: Tensor,
    weight: Tensor,
    meta: Tensor,
    bias: Tensor | None,
    compressed: Tensor | None = None,
) -> Tensor:
    """Compute `linear24` by the kernel that `choose` returns.

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


# Cached, since every product asks; `use_times` clears the cache.
@functools.lru_cache(maxsize=4096)
def choose(call: Call) -> tuple[str, Mapping[str, int]]:
    """Return the name in `KERNELS` of the kernel for a call, and its configuration."""
    kernels = usable(call)
    rows = known_times(call.device).at(call)
    # Rows are sorted by time. The fastest may lack its layout here: then the next one is taken.
    measured = next((row for row in rows if row.kernel in kernels), None)
    if measured is not None:
        name, config = measured.kernel, measured.config
    else:
        order = KERNELS if call.tokens <= _FEW_TOKENS else _MANY_TOKENS_ORDER
        # `unpack-dense` is in both orders and refuses nothing, so that there is always a name.
        name = next(name for name in order if name in kernels)
        config = KERNELS[name].configs[0]
    log.debug("%s runs by %s %s", call, name, config)
    return name, config


def known_times(device: torch.device) -> KernelTimes:
    """Return the times of a device: set by `use_times`, else read from the cache directory."""
    key = _key(device)
    if key not in _times:
        here = environment(device)
        path = cache_path(here)
        # Set before the file is read, so that a damaged one is reported once, not at each product.
        _times[key] = KernelTimes(here)
        if path.exists():
            try:
                _times[key] = KernelTimes.load(path)
            except FormatError as error:
                log.warning("%s Until then kernels are chosen by number of tokens alone.", error)
    return _times[key]


def use_times(times: KernelTimes | None, device: torch.device) -> None:
    """Choose kernels by these times; `None` restores those of the cache directory."""
    _times.pop(_key(device), None)
    if times is not None:
        _times[_key(device)] = times
    choose.cache_clear()


def _key(device: torch.device) -> str:
    """Return the device with its index, which a user may leave out."""
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)
