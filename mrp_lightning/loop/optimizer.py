"""The optimizer of `fit` and its schedule."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import get_cosine_schedule_with_warmup

from mrp_lightning.errors import OptionError


def adamw(
    parameters: Iterable[nn.Parameter],
    *,
    learning_rate: float,
    weight_decay: float,
    warmup_steps: int,
    steps: float,
) -> dict[str, Any]:
    """AdamW with linear warm-up and cosine decay, as `configure_optimizers` of Lightning gives it.

    Args:
        parameters: What is trained.
        learning_rate: The peak of the schedule.
        weight_decay: That of the matrices; vectors (norms, biases) have none.
        warmup_steps: The number of steps until the peak.
        steps: The number of steps in all.

    Raises:
        OptionError: The number of steps is not known: it is infinite, or none.
    """
    if not 1 <= steps < math.inf:
        raise OptionError(
            "The learning rate falls over the steps that the trainer will take, and their number "
            "is not known. Give `trainer.max_steps`."
        )
    trained = list(parameters)
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, warmup_steps, int(steps))
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
