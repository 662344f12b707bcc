"""Checkpoints that somebody else wrote."""

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 60
"""After which a test hangs. What is refused is refused at once, but the machine may be busy."""


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def checkpoint(tiny_llama: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a model with other values in its config.json; those that are `None` are removed."""

    def write(**values: Any) -> Path:
        directory = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
        config = json.loads((directory / "config.json").read_text()) | values
        config = {key: value for key, value in config.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(config))
        return directory

    return write
