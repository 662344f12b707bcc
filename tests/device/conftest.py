from collections.abc import Iterator

import pytest
import torch
from second_device import second_device


@pytest.fixture
def second() -> Iterator[torch.device]:
    """A device whose tensors cannot be mixed with those of the CPU."""
    with second_device() as device:
        yield device
