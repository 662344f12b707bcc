"""The fingerprint of a run: all that decides its result, so that another one can go on with it."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrp_lightning.environment import versions
from mrp_lightning.journal.batch_digests import digest_of, together
from mrp_lightning.journal.manifest import Fingerprint, digest
from mrp_lightning.journal.same import with_a_say
from mrp_lightning.processes import Processes
from mrp_lightning.upstream import attention_of

_OF_NO_FORWARD = ("_name_or_path", "transformers_version")
_LIBRARIES = ("mrp_lightning", "torch", "transformers", "cuda")
_NOTHING = torch.empty(0)


def fingerprint(
    settings: Mapping[str, Any],
    configurations: Sequence[Any],
    weights: Iterable[tuple[str, Tensor]],
    batches: Sequence[Any],
    processes: Processes,
) -> Fingerprint:
    """Say what decides the result: settings, weights, calibration data, libraries.

    All weights are read once, at about 1 GB/s.

    Args:
        settings: The arguments of the pruning, and on what kind of device it runs.
        configurations: Those of the transformers models in the module.
        weights: All tensors of the module, which is still dense.
        batches: The calibration batches of this process.
        processes: The processes that share the calibration batches; all call this.
    """
    computed = [(_forward_of(config), _NOTHING) for config in configurations]
    here = versions()
    return {
        **with_a_say(settings),
        "configuration of the model": digest(computed) if computed else None,
        "weights of the model": digest(weights),
        "calibration data": together(processes.all(digest_of(batches))),
        **{f"version of {name}": here[name] for name in _LIBRARIES if name in here},
    }


def _forward_of(config: Any) -> str:
    """Of a configuration what a transformers model computes with its weights."""
    found = {k: v for k, v in config.to_dict().items() if k not in _OF_NO_FORWARD}
    found["attention"] = attention_of(config)
    return json.dumps(found, sort_keys=True, default=str)
