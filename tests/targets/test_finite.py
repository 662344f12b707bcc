"""Values that are not finite are counted, in parts that take little memory."""

import pytest
import torch
from torch import nn

from mrp_lightning.errors import TargetError
from mrp_lightning.targets import blocks
from mrp_lightning.targets.blocks import refuse_not_finite


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (23,), (11, 4), (3, 50), (5, 2, 3)], ids=str)
def test_all_parts_are_counted(shape, monkeypatch):
    monkeypatch.setattr(blocks, "_VALUES_AT_ONCE", 8)
    sizes, ask = [], torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda part: sizes.append(part.numel()) or ask(part))
    values = torch.zeros(shape)
    refuse_not_finite([], [("w", nn.Parameter(values))])
    row = values[0].numel() if values.ndim and len(values) else 1
    assert sum(sizes) == values.numel()
    assert max(sizes) <= max(8, row)
    if not values.numel():
        return
    values.view(-1)[:: max(1, values.numel() - 1)] = torch.nan  # the first and the last one
    count = min(2, values.numel())
    with pytest.raises(TargetError, match=rf"^NaN or Inf in 1 parameter(?s:.*)\n  w: {count}$"):
        refuse_not_finite([], [("w", nn.Parameter(values))])
