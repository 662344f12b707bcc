"""A tiny random model of every family that is tested, with batches for it.

Norms and biases are not left at one and zero, so that a walk that gets any of them wrong gives
other numbers.
"""

from collections.abc import Callable
from typing import Any

import torch
import transformers
from tiny_configs import FAMILIES, IMAGES, SEQ2SEQ, VOCABULARY
from torch import Tensor, nn

LENGTHS = (12, 9, 16)


def build(name: str) -> nn.Module:
    """Return the tiny model of a family, with the same random weights on every call."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family.model_type, **family.config)
    model: nn.Module = getattr(transformers, family.auto).from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "A_log" in parameter_name:
                parameter.copy_(noise.abs())
            elif parameter.ndim >= 2:
                parameter.copy_(0.2 * noise)
            else:
                parameter.add_(0.05 * noise)
    return model


def batches(name: str, *, padding: bool = True) -> list[dict[str, Tensor]]:
    """Batches of several lengths: padded on the left, on the right, and not at all."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(2)
    if family.auto == IMAGES:
        return [{"pixel_values": torch.randn(n, 3, 16, 16, generator=generator)} for n in (2, 1, 3)]
    made = []
    for length in LENGTHS:
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    if padding:
        made[0]["attention_mask"][0, :5] = 0
        made[1]["attention_mask"][1, 6:] = 0
    if family.auto == SEQ2SEQ:
        for batch in made:
            batch["decoder_input_ids"] = batch["input_ids"][:, :7]
    return made


def runner(model: nn.Module, *, use_cache: bool | None = None) -> Callable[[Any], Any]:
    """Runs a model on a batch, with its cache on, off, or as it comes."""
    options = {} if use_cache is None else {"use_cache": use_cache}
    return lambda batch: model(**batch, **options)
