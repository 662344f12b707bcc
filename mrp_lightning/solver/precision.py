"""Full float32 in matrix products, whatever shortcuts the user allows elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def full_float32(device: torch.device) -> Iterator[None]:
    """Compute float32 products in float32: no autocast, no TF32, no bfloat16.

    `torch.set_float32_matmul_precision("high")`, which Lightning recommends for training, rounds
    the factors to 10 bits and less. A Hessian with a condition number of 1e4 does not survive that.
    """
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
