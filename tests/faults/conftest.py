"""A model to prune, what a run without faults makes of it, and checks that must always hold."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from faulty import contents, prune_into, weights

from callbacks import MRPCallback


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random LLaMA of three blocks on disk."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        **{"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
        **{"initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    )
    directory = tmp_path_factory.mktemp("dense") / "llama"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.fixture
def source(dense: Path) -> Iterator[Path]:
    """The same, and a check that it is left as it was."""
    before = contents(dense)
    yield dense
    assert contents(dense) == before


@pytest.fixture(scope="session")
def expected(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run without faults writes."""
    directory = tmp_path_factory.mktemp("expected") / "out"
    prune_into(dense, directory)
    return directory


@pytest.fixture
def out(source: Path, expected: Path, tmp_path: Path) -> Iterator[Path]:
    """Where runs write. In the end what an uninterrupted one writes is there, and nothing else."""
    yield tmp_path / "out"
    assert weights(tmp_path / "out") == weights(expected)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def prune(source: Path, out: Path) -> Callable[..., MRPCallback]:
    """Prune the model into `out`."""
    return lambda **arguments: prune_into(source, out, **arguments)
