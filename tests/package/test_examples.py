"""The scripts in examples/ run as they stand, and do what they say."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch, short_library):
    monkeypatch.chdir(tmp_path)


def test_every_example_is_tested():
    tested = {"one_matrix", "own_module", "causal_lm", "vision_encoder"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == tested


def test_one_matrix():
    errors = example("one_matrix").main()
    assert errors["SM"] < errors["sparsegpt"] < errors["magnitude"]


def test_own_module():
    accuracy = example("own_module").main()
    assert accuracy["dense"] > 0.9
    assert accuracy["dense"] - accuracy["pruned"] < 0.05


def test_causal_lm(tmp_path, tiny_llama):
    text = example("causal_lm").main(str(tiny_llama))
    assert text.startswith("import os")
    assert len(text) > 40
    assert (tmp_path / "runs/example-2of4-sparse24/model.safetensors").is_file()


def test_vision_encoder():
    change = example("vision_encoder").main()
    assert 0 < change < 0.1
