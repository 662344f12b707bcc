"""How large the weights of a model on disk are."""

import logging
from collections.abc import Set
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

log = logging.getLogger(__name__)

DECADES, BINS_A_DECADE = (-7, 2), 10
MAGNITUDES = np.logspace(*DECADES, (DECADES[1] - DECADES[0]) * BINS_A_DECADE + 1)
"""The edges of the bins of `count_magnitudes`."""
_EXACT = 2**24
"""So many numbers can be counted in float32, which torch.histc does."""


def count_magnitudes(directory: Path, layers: Set[str]) -> np.ndarray | None:
    """How many weights of some layers have each magnitude; zeros are in no bin.

    Args:
        directory: A checkpoint in safetensors, which is read tensor by tensor.
        layers: The names of the layers.

    Returns:
        The number of weights in each bin of `MAGNITUDES`; `None` where the directory does not hold
        the weights of all layers.
    """
    counts = torch.zeros(len(MAGNITUDES) - 1, dtype=torch.float64)
    names = {f"{layer}.weight" for layer in layers}
    try:
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in names & set(tensors.keys()):
                    weight = tensors.get_tensor(name).float().abs()
                    sizes = weight[weight > 0].log10().clamp(*DECADES)
                    for part in sizes.split(_EXACT):
                        counts += torch.histc(part, len(counts), *DECADES)
                    names.remove(name)
    except SafetensorError as error:
        log.warning("The weights in %s cannot be read, so they are not shown: %s", directory, error)
        return None
    return None if names else counts.numpy()
