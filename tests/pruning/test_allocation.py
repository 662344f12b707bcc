"""Sparsities of blocks by DLP's measure, against a rewrite on full forwards."""

import math
from types import SimpleNamespace

import pytest
import torch
from slow_pruning import inputs_of, prune_model
from torch import nn

from mrp_lightning.errors import OptionError, TargetError
from mrp_lightning.pruning.allocation import (
    Measure,
    allocate,
    check_allocation,
    patterns_of_layers,
)
from mrp_lightning.solver.patterns import make_pattern

DLP = {"allocation": "dlp"}


def uneven(model: nn.Module) -> nn.Module:
    """Make the blocks differ, as those of a trained model do."""
    for k, block in enumerate(model.model.layers):
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight *= 1 + k
    return model


def slow_ratios(model: nn.Module, batches, sparsity: float, names: list[str]) -> dict[str, float]:
    sums, sizes = {}, {}
    for name in names:
        layers = [m for m in model.get_submodule(name).modules() if isinstance(m, nn.Linear)]
        medians = [
            (layer.weight.double().abs() * x.norm(dim=0)).median()
            for layer, x in zip(layers, inputs_of(model, layers, batches), strict=True)
        ]
        sums[name] = float(sum(medians))
        sizes[name] = sum(layer.weight.numel() for layer in layers)
    importance = {name: 1 - value / sum(sums.values()) for name, value in sums.items()}
    low, high = min(importance.values()), max(importance.values())
    alpha = min(0.15, sparsity / 2, (1 - sparsity) / 2)
    spared = {name: (i - low) / (high - low) * 2 * alpha for name, i in importance.items()}
    mean = sum(spared[name] * sizes[name] for name in names) / sum(sizes.values())
    return {name: sparsity + mean - spared[name] for name in names}


@pytest.mark.parametrize("sparsity", [0.5, 0.7, 0.9])
@torch.no_grad()
def test_blocks_get_the_published_ratios_and_the_model_the_exact_total(sparsity, build, batches):
    model = uneven(build("llama"))
    names = [f"model.layers.{k}" for k in range(3)]
    expected = slow_ratios(model, batches, sparsity, names)
    report = prune_model(model, batches, pattern=None, sparsity=sparsity, beyond=DLP)
    assert {row.name: row.sparsity for row in report.blocks} == pytest.approx(expected, rel=1e-5)
    assert len({round(ratio, 3) for ratio in expected.values()}) == 3
    zeros, weights = 0, 0
    for name in names:
        layers = [m.weight for m in model.get_submodule(name).modules() if isinstance(m, nn.Linear)]
        removed = sum(int((w == 0).sum()) for w in layers)
        size = sum(w.numel() for w in layers)
        assert removed / size == pytest.approx(expected[name], abs=2 / size)
        zeros, weights = zeros + removed, weights + size
    assert zeros == math.floor(sparsity * weights + 0.5)
    assert report.totals["removed"] == zeros
    assert report.to_dict()["blocks"][0]["sparsity"] == report.blocks[0].sparsity


@pytest.mark.parametrize("family", ["t5", "mixtral", "mamba", "bart"])
@torch.no_grad()
def test_families_with_other_walks_and_layers_get_the_exact_total(family):
    import families

    model, batches = families.build(family), families.batches(family)
    report = prune_model(
        model,
        batches,
        pattern=None,
        sparsity=0.7,
        forward=families.runner(model),
        beyond=DLP,
        offload=True,
    )
    assert report.totals["removed"] == math.floor(0.7 * report.totals["weights"] + 0.5)
    assert len({row.sparsity for row in report.blocks}) > 1


def measure(value: float, *sizes: int) -> Measure:
    layers = [
        SimpleNamespace(name=f"{value}.{i}", weight=torch.empty(1, size))
        for i, size in enumerate(sizes)
    ]
    return Measure(value, layers)


def test_rounding_leaves_the_total_as_it_is():
    measures = {"a": measure(1.0, 7, 7, 7), "b": measure(2.0, 5, 11), "c": measure(4.0, 13)}
    ratios = allocate(0.66, measures)
    patterns = patterns_of_layers(ratios, measures)
    removed = sum(
        patterns[layer.name].budget(1, layer.weight.numel())
        for each in measures.values()
        for layer in each.layers
    )
    assert removed == 33
    assert ratios["a"] < ratios["b"] < ratios["c"]


@pytest.mark.parametrize("sparsity", [0.01, 0.3, 0.99])
def test_ratios_stay_between_none_and_all(sparsity):
    ratios = allocate(sparsity, {"a": measure(1.0, 1000), "b": measure(9.0, 10)})
    assert all(0 < ratio < 1 for ratio in ratios.values())


def test_blocks_that_are_alike_share_alike():
    assert allocate(0.7, {"a": measure(1.0, 8), "b": measure(1.0, 4)}) == {"a": 0.7, "b": 0.7}


def test_what_it_is_not_for_is_refused(batches):
    with pytest.raises(OptionError, match="uniform, dlp; got 'owl'"):
        check_allocation("owl", make_pattern(0.7, None))
    with pytest.raises(OptionError, match='`allocation: dlp` .* "2:4" removes 2 of every 4'):
        check_allocation("dlp", make_pattern(None, "2:4"))
    check_allocation("uniform", make_pattern(None, "2:4"))
    model = nn.Sequential(nn.Linear(8, 8))
    with pytest.raises(TargetError, match="`allocation` work on repeated blocks"):
        prune_model(model, [{"input": torch.randn(4, 8)}], pattern=None, sparsity=0.5, beyond=DLP)
