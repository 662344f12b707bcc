"""A step of decoding that is compiled ahead of time, against the model's own forward."""

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from export import Bitmask4Linear
from mrp_lightning.errors import OptionError
from mrp_sparse.compiled_step import LENGTHS, CompiledStep, round_activations
from mrp_sparse.eight_bit_head import round_head
from mrp_sparse.kernels import compiled

from .conftest import onto_grid


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> None:
    if not compiled.load():
        pytest.skip("needs a C++ compiler")


def small_model(seed: int) -> Any:
    """One block of four bits, in bfloat16."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    options = sizes | heads | {"tie_word_embeddings": True}
    config = AutoConfig.for_model("llama", vocab_size=512, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = onto_grid(module.weight.detach() * (torch.rand(module.weight.shape) < 0.5))
            module.weight = nn.Parameter(weight, requires_grad=False)
            model.set_submodule(name, Bitmask4Linear.from_linear(module))
    return model.requires_grad_(False)


def wrapper_of(file: Path) -> str:
    """The code in which a compiled step calls what is not its own."""
    with zipfile.ZipFile(file) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith("wrapper.cpp")]
        return opened.read(name).decode()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def _cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.usefixtures("_cache")
def test_compiled_steps_give_the_logits_of_the_model(place, monkeypatch):
    """The second model, of other places, compiles nothing; a second text does not see the first."""
    prompt = torch.randint(1, 512, (1, 9))
    more = torch.randint(1, 512, (1, 5))
    for seed in (0, 1):
        model = small_model(seed)
        round_head(model)
        step = CompiledStep(model, 20)
        for _ in range(2):
            found = [step.read(prompt), *(step(token.view(1, 1)) for token in more[0])]
            with torch.no_grad():
                expected = model(torch.cat([prompt, more], dim=1)).logits[0, -6:]
            errors = (torch.stack(found).double() - expected.double()).norm(dim=1)
            assert bool((errors < 0.02 * expected.double().norm(dim=1)).all())
        monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", None)
    assert [file.suffix for file in place.rglob("step-*")].count(".pt2") == 1
    assert "mrp_lightning.linear8" in wrapper_of(step.file)
    round_activations(model)
    with pytest.raises(TypeError):  # it asks for another step, and compiles
        CompiledStep(model, 20)


@pytest.mark.usefixtures("_cache")
def test_operators_are_called_without_python():
    step = CompiledStep(small_model(0), 20)
    step.read(torch.ones(1, 1, dtype=torch.int64))
    files = set()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        step(torch.ones(1, 1, dtype=torch.int64))
    finally:
        sys.setprofile(None)
    assert any("compiled_step" in file for file in files)
    assert not [file for file in files if "_library" in file or "mrp_sparse/kernels" in file]


@pytest.mark.usefixtures("_cache")
def test_the_room_of_the_cache_ends_with_a_word(monkeypatch):
    step = CompiledStep(small_model(0), 20)
    step.read(torch.ones(1, LENGTHS - 1, dtype=torch.int64))
    step(torch.ones(1, 1, dtype=torch.int64))
    with pytest.raises(OptionError, match=f"room for {LENGTHS} tokens"):
        step(torch.ones(1, 1, dtype=torch.int64))


@pytest.mark.usefixtures("_cache")
def test_a_model_with_another_cache_is_refused():
    config = AutoConfig.for_model(
        "mistral", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, sliding_window=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(OptionError, match="StaticSlidingWindowLayer"):
        CompiledStep(model, 20)
