"""The manifest of a journal: fingerprint and progress of its run, and differences of two runs.

A fingerprint holds everything that determines the result of a run: only an equal run can resume it.
"""

import hashlib
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from mrp_ground.upstream import attention_of
from mrp_lightning.environment import versions
from mrp_lightning.errors import FormatError, JournalError, first_line
from mrp_lightning.processes import Processes
from mrp_lightning.storage.files import move_durably
from mrp_lightning.storage.json_files import as_dataclass, read_json

_DIGEST_PREFIX = "sha256:"
"""The prefix of digests, which replace values that are too long to show."""

_WITHOUT_EFFECT = frozenset(
    {"enable_progress_bar", "offload", "overwrite", "resume", "save_dir", "streaming"}
)
"""Options that do not affect the result of a run, only where it is computed and stored."""


def _with_effect(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that affect the result, by name or dotted key."""
    return {k: v for k, v in settings.items() if k.rpartition(".")[2] not in _WITHOUT_EFFECT}


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe how two runs' settings that affect results differ, such as "`seed` was 4, is 5".

    A setting that one of them lacks counts as `None` there.
    """
    earlier, now = _with_effect(earlier), _with_effect(now)
    return [
        _difference(name, earlier.get(name), now.get(name))
        for name in {**earlier, **now}
        if earlier.get(name) != now.get(name)
    ]


def _difference(name: str, was: Any, is_: Any) -> str:
    if all(isinstance(value, str) and value.startswith(_DIGEST_PREFIX) for value in (was, is_)):
        return f"`{name}` differ"
    was, is_ = (json.dumps(value, default=str, ensure_ascii=False) for value in (was, is_))
    return f"`{name}` was {was}, is {is_}"


NAME = "manifest.json"
WEIGHTS = "weights of the model"
"""The key of a fingerprint in which models with different weights differ."""
FORMAT_VERSION = 1

Fingerprint = dict[str, Any]
"""The facts that determine a run's result, by name: JSON values, or digests of large values."""


@dataclass(frozen=True)
class Entry:
    """An entry of a journal: the shard of one finished block.

    Attributes:
        file: The name of the shard in the journal.
        sha256: Its checksum.
        weights: The `digest` of the tensors in it.
        grid: The checksum of the file of the block's grid parameters; `None` if it has none.
    """

    file: str
    sha256: str
    weights: str
    grid: str | None = None

    @property
    def grid_file(self) -> str:
        """The name of the file of the block's grid parameters."""
        return self.file.replace(".safetensors", "-grid.safetensors")

    @property
    def checksums(self) -> dict[str, str]:
        """The checksums of the block's files, by name."""
        return {self.file: self.sha256} | ({self.grid_file: self.grid} if self.grid else {})


@dataclass(kw_only=True)
class Manifest:
    """The content of `manifest.json`.

    Attributes:
        fingerprint: The facts that decide the result of the run.
        about: The content of the report other than layers, with the number of steps as `blocks`.
        seconds, cpu_seconds: The wall time of the run so far, and its CPU time in all threads.
        shards: The entries of the finished blocks, by the number of the step.
        kept: The checksums of the files of `Journal.kept`, by the name of the value.
    """

    fingerprint: Fingerprint
    about: dict[str, Any]
    seconds: float
    cpu_seconds: float
    shards: dict[int, Entry]
    kept: dict[str, str]

    @classmethod
    def new(cls, fingerprint: Fingerprint, about: Mapping[str, Any]) -> "Manifest":
        """Return the manifest of a run that has done nothing yet."""
        # No field has a default: a file that lacks one is damaged, and is not read as a new run.
        run = {"fingerprint": plain(fingerprint), "about": plain(about)}
        return cls(**run, seconds=0.0, cpu_seconds=0.0, shards={}, kept={})

    def save(self, directory: Path) -> None:
        """Write `manifest.json` atomically."""
        # `plain` makes the numbers of steps strings, as `load` reads them: as integers they would
        # sort otherwise, and have another checksum.
        content = plain({"format_version": FORMAT_VERSION, **asdict(self)})
        # The checksum covers all other keys: `load` removes it before it compares.
        content["sha256"] = _checksum(content)
        partial = directory / f"{NAME}.partial"
        partial.unlink(missing_ok=True)  # else a link would be followed
        partial.write_text(json.dumps(content, indent=1), encoding="utf-8")
        # A rename: a reader, or a run after a crash, has the old manifest or the new one.
        move_durably(partial, directory / NAME)

    @classmethod
    def load(cls, directory: Path) -> "Manifest":
        """Read a `manifest.json`; raise a JournalError if it is damaged or of another version."""
        file, remedy = directory / NAME, "set `resume: false` (`prune --restart`) to start afresh"
        try:
            content = read_json(file, remedy, FORMAT_VERSION)
            manifest = as_dataclass(cls, content, str(file), remedy)
        except FormatError as error:
            raise JournalError(f"The journal cannot be read. {error}") from error
        if content.pop("sha256", None) != _checksum(content):
            raise JournalError(
                f"{file} is damaged: its checksum is not that of its content. Set `resume: false` "
                "(`prune --restart`) to start the run afresh."
            )
        return manifest


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping as it is read back from a JSON file; values that JSON lacks become text."""
    # A file name that is no UTF-8 has surrogates, which no file can hold.
    text = json.dumps(values, default=str, ensure_ascii=False).encode("utf-8", "replace")
    content: dict[str, Any] = json.loads(text)
    return content


def digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Return the SHA-256 of names, types, shapes and bytes of tensors; about 1 GB/s on one core."""
    sha256 = hashlib.sha256()
    for name, tensor in named:
        # Names, types and shapes delimit the bytes: without them, tensors cut at other points would
        # have the same digest.
        sha256.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        # As bytes: NumPy has no bfloat16, and equal values such as 0 and −0 differ in bits.
        data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        sha256.update(data.numpy().data)
    return _DIGEST_PREFIX + sha256.hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


_OF_NO_FORWARD = ("_name_or_path", "transformers_version")
_LIBRARIES = ("mrp_lightning", "torch", "transformers", "cuda")
_UNKNOWN = "unknown: "


def fingerprint(
    settings: Mapping[str, Any],
    configurations: Sequence[Any],
    weights: Iterable[tuple[str, Tensor]],
    batches: Sequence[Any],
    processes: Processes,
) -> Fingerprint:
    """Return the facts that decide the result: settings, weights, calibration data, libraries.

    All weights are read once, at about 1 GB/s. All `processes`, each with its share of the
    calibration `batches`, must call this while the module is dense.
    """
    computed = [forward_of(config) for config in configurations]
    here = versions()
    return {
        **_with_effect(settings),
        "configuration of the model": _digest_of_texts(computed) if computed else None,
        WEIGHTS: digest(weights),
        "calibration data": together(processes.all(digest_of(batches))),
        **{f"version of {name}": here[name] for name in _LIBRARIES if name in here},
    }


def _digest_of_texts(texts: Sequence[str]) -> str:
    return _DIGEST_PREFIX + hashlib.sha256("\n".join(texts).encode()).hexdigest()


def forward_of(config: Any) -> str:
    """Return as JSON the part of a configuration that decides what a model computes."""
    content = {k: v for k, v in config.to_dict().items() if k not in _OF_NO_FORWARD}
    content["attention"] = attention_of(config)
    return json.dumps(content, sort_keys=True, default=str)


class _Hashing(pickle.Pickler):
    """A pickler into a hash, in which tensors count by their `digest`, and mappings by items."""

    def __init__(self) -> None:
        self.sha256 = hashlib.sha256()
        super().__init__(self, protocol=4)

    def write(self, data: Any) -> None:
        """Hash a part of the pickle."""
        self.sha256.update(data)

    def reducer_override(self, data: Any) -> Any:
        """Return the replacement of an object that is no plain container."""
        if isinstance(data, Tensor):  # whose own pickle has addresses
            return str, (digest([("", data)]),)
        # A `BatchEncoding` also holds objects whose pickles differ from time to time.
        return (dict, (dict(data),)) if isinstance(data, Mapping) else NotImplemented


def digest_of(steps: Sequence[Any]) -> str:
    """Return the digest of the arguments of this process's steps.

    If an object cannot be pickled, the result is a message that differs at every call.
    """
    hashing = _Hashing()
    try:
        hashing.dump(list(steps))
    except Exception as error:  # of any type, from objects that cannot be pickled
        reason = f"{_UNKNOWN}the batches cannot be compared: {first_line(error)}"
        return f"{reason} ({uuid4().hex[:8]})"
    return _DIGEST_PREFIX + hashing.sha256.hexdigest()


def together(digests: Sequence[str]) -> str:
    """Return one digest for the digests of all processes."""
    # Unknown data of one process make all of it unknown: a digest would hide the reason.
    unknown = [one for one in digests if one.startswith(_UNKNOWN)]
    if unknown or len(digests) == 1:
        return (unknown or list(digests))[0]
    return _digest_of_texts(digests)
