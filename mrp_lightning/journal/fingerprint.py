"""The fingerprint of a run: all that decides its result, so that another one can go on with it."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from mrp_lightning.environment import versions
from mrp_lightning.journal.manifest import WEIGHTS, Fingerprint, digest, with_a_say
from mrp_lightning.processes import Processes
from mrp_sparse.upstream import attention_of

_OF_NO_FORWARD = ("_name_or_path", "transformers_version")
_LIBRARIES = ("mrp_lightning", "torch", "transformers", "cuda")
_NOTHING = torch.empty(0)
_PLAIN = (str, int, float, complex, type(None), Enum, type, range, slice, torch.dtype, torch.device)
"""Types whose `repr` determines the value."""
_UNKNOWN = "unknown: "


def fingerprint(
    settings: Mapping[str, Any],
    configurations: Sequence[Any],
    weights: Iterable[tuple[str, Tensor]],
    batches: Sequence[Any],
    processes: Processes,
) -> Fingerprint:
    """Return the facts that decide the result: settings, weights, calibration data, libraries.

    All weights are read once, at about 1 GB/s.

    Args:
        settings: The arguments of the pruning, and on what kind of device it runs.
        configurations: Those of the transformers models in the module.
        weights: All tensors of the module, which is still dense.
        batches: The calibration batches of this process.
        processes: The processes that share the calibration batches; all call this.
    """
    computed = [(forward_of(config), _NOTHING) for config in configurations]
    here = versions()
    return {
        **with_a_say(settings),
        "configuration of the model": digest(computed) if computed else None,
        WEIGHTS: digest(weights),
        "calibration data": together(processes.all(digest_of(batches))),
        **{f"version of {name}": here[name] for name in _LIBRARIES if name in here},
    }


def forward_of(config: Any) -> str:
    """Return as JSON the part of a configuration that decides what a model computes."""
    content = {k: v for k, v in config.to_dict().items() if k not in _OF_NO_FORWARD}
    content["attention"] = attention_of(config)
    return json.dumps(content, sort_keys=True, default=str)


def digest_of(steps: Sequence[Any]) -> str:
    """Return the digest of the arguments of this process's steps.

    An object counts by the parts that `copy` would copy. If it has none, the result is a text that
    says so, and differs at every call.
    """
    unknown: dict[str, None] = {}
    known = digest(_leaves(list(steps), "", unknown, ()))
    if not unknown:
        return known
    kinds = ", ".join(unknown)
    return f"{_UNKNOWN}what is in {kinds} of the batches cannot be compared ({uuid4().hex[:8]})"


def together(digests: Sequence[str]) -> str:
    """Return one digest for the digests of all processes."""
    unknown = [one for one in digests if one.startswith(_UNKNOWN)]
    if unknown or len(digests) == 1:
        return (unknown or list(digests))[0]
    return digest((one, _NOTHING) for one in digests)


def _leaves(
    data: Any, path: str, unknown: dict[str, None], above: tuple[Any, ...]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a collection by their paths; other values are a part of the path.

    `unknown` collects the types whose content cannot be seen. `above` are the objects that contain
    `data`, which may also be contained in it.
    """
    if isinstance(data, Tensor):
        yield path, data
        return
    if isinstance(data, _PLAIN):
        yield f"{path} = {data!r}", _NOTHING
        return
    if (content := _bytes_of(data)) is not None:
        yield f"{path} = {content}", _NOTHING
        return
    if any(data is other for other in above):
        yield f"{path} = above", _NOTHING
        return
    parts = _parts(data)
    if not isinstance(data, Mapping | list | tuple) and not is_dataclass(data):
        yield f"{path} = {type(data).__name__}", _NOTHING
    if parts is None:
        unknown[type(data).__name__] = None
        return
    for name, value in parts:
        yield from _leaves(value, f"{path}.{name}", unknown, (*above, data))


def _bytes_of(data: Any) -> str | None:
    """Return the digest of raw content, `None` for other values."""
    if isinstance(data, np.ndarray | np.generic) and not data.dtype.hasobject:
        kind, raw = f"{data.dtype.str} {data.shape}", np.ascontiguousarray(data).tobytes()
    elif isinstance(data, bytes | bytearray):
        kind, raw = "bytes", bytes(data)
    else:
        return None
    return f"{kind} {hashlib.sha256(raw).hexdigest()}"


def _parts(data: Any) -> Iterator[tuple[Any, Any]] | None:
    """Return the parts of an object, by name or index; `None` if they cannot be seen."""
    if isinstance(data, Mapping):
        return iter(data.items())
    if isinstance(data, list | tuple):
        return iter(enumerate(data))
    if isinstance(data, Set):
        return iter(enumerate(sorted(data, key=repr)))
    if is_dataclass(data):
        return ((field.name, getattr(data, field.name)) for field in fields(data))
    try:
        reduced = data.__reduce_ex__(4)  # as for a copy
    except Exception:  # whatever an object says that cannot be copied
        return None
    if isinstance(reduced, str):
        return iter([("name", reduced)])
    make, arguments, state, items, entries = (*reduced, None, None, None)[:5]
    name = getattr(make, "__qualname__", type(make).__name__)
    held = (name, arguments, state, list(items or ()), list(entries or ()))
    return iter(enumerate(held))
