"""Models for the tests of serving, which run in the environment of `make vllm`."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

# vLLM reads these when it is imported.
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory for the models of all tests."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def half(root: Path) -> Path:
    """The embedded LLaMA without the smaller half of each layer's weights."""
    from served import embedded, removed

    return embedded(root / "half", removed)


@pytest.fixture(scope="session")
def packed(root: Path) -> Callable[..., Path]:
    """A function that exports a directory in a format, and returns the new one."""
    from served import export

    def exported(source: Path, form: str, *options: str) -> Path:
        name = "-".join([source.name, form, *options]).replace("*", "")
        return export(source, root / name, form, *options)

    return exported
