"""What decides the result of a pruning in a trainer, so that another run can go on with it."""

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from mrp_lightning.environment import versions
from mrp_lightning.journal.batch_digests import digest_of, together
from mrp_lightning.journal.manifest import Fingerprint, digest
from mrp_lightning.journal.same import with_a_say
from mrp_lightning.loop.capture import Step
from mrp_lightning.loop.contents import checkpoint_root, language_models
from mrp_lightning.loop.streaming import streamed_blocks
from mrp_lightning.processes import Processes
from mrp_lightning.upstream import attention_of

_OF_NO_FORWARD = ("_name_or_path", "transformers_version")
_NOTHING = torch.empty(0)
_LIBRARIES = ("mrp_lightning", "torch", "transformers", "cuda")


def fingerprint(
    trainer: Trainer,
    module: LightningModule,
    steps: Sequence[Step],
    config: Mapping[str, Any],
    processes: Processes,
) -> Fingerprint:
    """Say what decides the result: settings, weights, calibration data, libraries, device.

    All tensors of the module are read once, at about 1 GB/s.

    Args:
        trainer: The trainer that prunes.
        module: Its module, which is still dense.
        steps: The calibration batches of this process.
        config: The arguments of the pruning.
        processes: The processes that share the calibration batches; all call this.
    """
    model = checkpoint_root(module)[1]
    here, streamed = versions(), streamed_blocks(module)
    held = chain(module.named_parameters(), module.named_buffers())
    data = processes.all(digest_of(steps))
    return {
        **with_a_say(config),
        "precision": str(trainer.precision),
        "device": trainer.strategy.root_device.type,
        "model": type(model).__name__,
        "configuration of the model": _configuration(module),
        "whole blocks in the journal": streamed is not None,
        "weights of the model": digest(held if streamed is None else streamed.named_tensors()),
        "calibration data": together(data),
        **{f"version of {name}": here[name] for name in _LIBRARIES if name in here},
    }


def _configuration(module: LightningModule) -> str | None:
    """The digest of what Hugging Face models compute with their weights; `None` without any."""
    found = []
    for model in language_models(module).values():
        config = {k: v for k, v in model.config.to_dict().items() if k not in _OF_NO_FORWARD}
        config["attention"] = attention_of(model.config)
        found.append((json.dumps(config, sort_keys=True, default=str), _NOTHING))
    return digest(found) if found else None
