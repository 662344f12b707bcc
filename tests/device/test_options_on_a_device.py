"""Options of a pruning on a device: grids of bits, mask J, structures, and text of its own."""

import copy
from typing import Any

import pytest
import torch
from families import batches, build
from second_device import NAME, assert_same, trainer_on
from shapes import random_24
from torch import nn
from torch.utils.data import DataLoader

from callbacks import PruningCallback
from mrp_lightning import CausalLM, prune_weight
from mrp_lightning.data.sampling import Sampling, write
from mrp_lightning.pruning import balance as balance_module
from mrp_lightning.solver.grid import GRIDS
from mrp_lightning.targets import blocks as blocks_module
from mrp_lightning.targets import plan as plan_module
from mrp_sparse.eight_bit_head import EightBitLinear
from mrp_sparse.packed_linear import Bitmask4Linear, BitmaskLinear, Sparse24Linear

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _weights_in_disguise_are_dense(monkeypatch):
    """Their class is not that of a parameter, as sharded or quantized weights' is not."""
    for module in (plan_module, blocks_module, balance_module):
        monkeypatch.setattr(module, "why_not_plain", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"bits": 3}, None),
        ({"bits": 4, "group_size": 32}, "2:4"),
        ({"bits": 8}, None),
        ({"grid": "q4_0"}, "2:4"),
    ],
)
def test_bits_are_those_of_the_cpu(second, options, pattern):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 64, generator=generator)
    inputs = torch.randn(300, 64, generator=generator) * torch.linspace(0.1, 2, 64)
    hessian = 2 * inputs.T @ inputs / 300
    method = "SM" if pattern else "S+M"

    def solve(device):
        w, h = weight.to(device), hessian.to(device)
        return prune_weight(w, h, pattern=pattern, method=method, **options)

    there, here = solve(second), solve(CPU)
    assert there.weight.device == second
    assert_same({"weight": there.weight}, {"weight": here.weight}, second)
    assert there.loss == pytest.approx(here.loss, rel=0 if second.type == NAME else 1e-2)


@pytest.mark.parametrize("grid", ["q3_k", "q4_1", "q5_k"])
def test_scales_and_minima_are_those_of_the_cpu(second, grid):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, 256, generator=generator) + 0.2
    inputs = torch.randn(600, 256, generator=generator) * torch.linspace(0.1, 2, 256)
    hessian = 2 * inputs.T @ inputs / 600
    there = prune_weight(weight.to(second), hessian.to(second), grid=grid)
    here = prune_weight(weight, hessian, grid=grid)
    assert there.loss == pytest.approx(here.loss, rel=0 if second.type == NAME else 1e-2)
    for solution in (there, here):
        parameters = solution.grid_parameters
        assert parameters.scales.device == CPU
        codes = GRIDS[grid].codes_of(solution.weight, parameters)
        assert codes is not None
        assert codes.device == solution.weight.device


OPTIONS: dict[str, dict[str, Any]] = {
    "mask J": {"pattern": "2:4", "method": "JM"},
    "bits alone": {"method": "SM", "bits": 3, "targets": ["o_proj"]},
    "balanced bits": {"method": "SM", "bits": 4, "group_size": 16, "balance": True},
    "the head": {"pattern": "2:4", "method": "SM", "targets": ["lm_head", "down_proj"]},
    "a grid of the head": {"pattern": "2:4", "method": "SM", "head_grid": "q5_0"},
    "neurons": {"structure": "neurons", "sparsity": 0.25, "method": "SM"},
    "experts": {"structure": "experts", "sparsity": 0.25, "method": "SM"},
}


def pruned(options: dict[str, Any], device: torch.device) -> dict[str, torch.Tensor]:
    """The weights of a tiny model that was pruned on a device."""
    model = build(family_of(options))
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    windows = DataLoader([batch["input_ids"][0, :9] for batch in batches("llama")], batch_size=1)
    trainer_on(device).predict(CausalLM(model), windows, callbacks=[PruningCallback(**options)])
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def family_of(options: dict[str, Any]) -> str:
    return "mixtral" if options.get("structure") == "experts" else "llama"


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_stays_on_the_device(second, name):
    options = OPTIONS[name]
    dense = dict(build(family_of(options)).named_parameters())
    expected = pruned(options, CPU)
    assert any(not torch.equal(expected[key], dense[key]) for key in expected)
    assert_same(pruned(options, second), expected, second, atol=2e-3)


@torch.no_grad()
def test_own_text_is_written_on_the_device(second):
    """A GPU rounds otherwise, and one other token changes all that follow."""
    sampling = Sampling(
        length=10, seed=0, prefix=torch.tensor([]).long(), first=torch.arange(3, 64)
    )
    texts = []
    for device in (CPU, second):
        model = build("llama")
        model.set_attn_implementation("eager")
        texts.append(write(model.to(device), sampling, range(4), lambda _: None).cpu())
    assert texts[1].shape == (4, 10)
    same = (texts[0] == texts[1]).all(1)
    assert same.all() if second.type == NAME else same[0]


@torch.no_grad()
@pytest.mark.parametrize("kind", [Sparse24Linear, BitmaskLinear, Bitmask4Linear, EightBitLinear])
@pytest.mark.parametrize("tokens", [1, 5])
def test_packed_layers_multiply_on_the_device(second, kind, tokens):
    torch.manual_seed(0)
    dense = nn.Linear(208, 48)
    if kind is Sparse24Linear:
        dense.weight.data = random_24(48, 208, torch.float32, CPU)
    if kind is Bitmask4Linear:
        dense.weight.data = dense.weight.data.sign() * torch.randint(0, 9, (48, 208)) / 64
    here = kind.from_linear(dense)
    there = copy.deepcopy(here).to(second)
    x = torch.randn(2, tokens, 208)
    y = there(x.to(second))
    assert y.device == second
    torch.testing.assert_close(y.cpu(), here(x), rtol=1e-5, atol=1e-5)
