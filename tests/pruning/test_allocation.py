"""Sparsities of blocks, by what each does to the output: against rewrites on full forwards."""

import math
from types import SimpleNamespace

import pytest
import scipy.optimize
import torch
from slow_pruning import prune_model
from torch import Tensor, nn

from mrp_lightning.calibration.walks import Inject
from mrp_lightning.errors import OptionError, TargetError
from mrp_lightning.pruning.output_change import _divergence
from mrp_lightning.pruning.prune_layers import prune_layers
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.pruning.survey import STEP, Change, allocate, patterns_of_layers

OUTPUT = {"allocation": "output"}


@pytest.fixture
def fine(monkeypatch):
    """No grid: sparsities follow the measurements to 1e-10."""
    monkeypatch.setattr("mrp_lightning.pruning.survey.STEP", 1e-9)


def uneven(model: nn.Module) -> nn.Module:
    """Make the blocks differ, as those of a trained model do."""
    for k, block in enumerate(model.model.layers):
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight *= 1 + k
    return model


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
@torch.no_grad()
def test_blocks_get_what_is_reported_and_the_model_the_exact_total(sparsity, build, batches):
    model = uneven(build("llama"))
    names = [f"model.layers.{k}" for k in range(3)]
    report = prune_model(model, batches, pattern=None, sparsity=sparsity, beyond=OUTPUT)
    expected = {row.name: row.sparsity for row in report.blocks}
    assert len({round(ratio, 3) for ratio in expected.values()}) > 1
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


def shares(errors: list[float], sparsity: float) -> list[float]:
    """s + (μ − ln E)/7 within s ± 0.15, μ such that blocks of one size have the mean s."""
    logs = [math.log(error) for error in errors]

    def spread(level: float) -> list[float]:
        return [min(max((level - log) / 7, -0.15), 0.15) for log in logs]

    level = scipy.optimize.brentq(lambda x: sum(spread(x)), min(logs) - 2, max(logs) + 2)
    return [sparsity + shift for shift in spread(level)]


def tokens_of(model: nn.Module, batches, kept: slice) -> Tensor:
    logits = [model(**batch).logits[batch["attention_mask"].bool()] for batch in batches]
    return torch.cat(logits)[:, kept].double()


@pytest.mark.parametrize("kept", [slice(None), slice(0, -9)], ids=["all", "some are ruled out"])
@torch.no_grad()
def test_blocks_that_change_the_predicted_tokens_more_are_pruned_less(kept, build, batches, fine):
    names = [f"model.layers.{k}" for k in range(3)]
    given = {"pattern": None, "sparsity": 0.5}
    expected = tokens_of(uneven(build("llama")), batches, kept).softmax(-1)
    divergences = []
    for name in names:  # each alone, in a dense model
        model = uneven(build("llama"))
        prune_model(model, batches, blocks=name, **given)
        found = tokens_of(model, batches, kept).log_softmax(-1)
        divergence = nn.functional.kl_div(found, expected, reduction="batchmean")
        divergences.append(float(divergence))
    model = uneven(build("llama"))

    def forward(batch):
        logits = model(**batch).logits
        ruled_out = torch.full_like(logits, -torch.inf)
        ruled_out[..., kept] = logits[..., kept]
        return ruled_out

    report = prune_model(model, batches, beyond=OUTPUT, forward=forward, **given)
    ratios = [row.sparsity for row in report.blocks]
    assert ratios == pytest.approx(shares(divergences, 0.5), abs=1e-4)
    assert max(ratios) - min(ratios) > 0.01
    assert report.totals["removed"] == report.totals["weights"] // 2
    assert len(report.layers) == 3 * 7


@torch.no_grad()
def test_enough_tokens_are_run_and_no_more(build, batches, monkeypatch):
    run, finish = [], Inject.finish
    monkeypatch.setattr("mrp_lightning.pruning.output_change.TOKENS", 1)
    monkeypatch.setattr(
        Inject, "finish", lambda self, k, i: run.append((k, i)) or finish(self, k, i)
    )
    prune_model(build("llama"), batches, pattern=None, sparsity=0.5, beyond=OUTPUT)
    assert run == [(0, 0), (0, 0), (1, 0), (2, 0)]  # the dense model, then each block pruned
    assert len(batches) > 1


@torch.no_grad()
def test_the_same_tokens_are_compared_in_batches_of_any_size(build, monkeypatch, fine):
    monkeypatch.setattr("mrp_lightning.pruning.output_change.TOKENS", 40)
    ids = torch.randint(3, 64, (6, 16), generator=torch.Generator().manual_seed(3))
    found = []
    for size in (1, 4):
        batches = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids.split(size)]
        model = uneven(build("llama"))
        report = prune_model(model, batches, pattern=None, sparsity=0.5, beyond=OUTPUT)
        found.append([row.sparsity for row in report.blocks])
    # The Hessians' sums are rounded differently, which may exchange weights of equal scores.
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def divergence(now: Tensor, dense: Tensor) -> Tensor:
    expected, found = dense.double().log_softmax(1), now.double().log_softmax(1)
    return nn.functional.kl_div(found, expected, reduction="none", log_target=True).sum(1)


@pytest.mark.parametrize("size", [1e-3, 0.1, 10.0])
def test_divergences_are_exact_also_where_they_are_small(size):
    generator = torch.Generator().manual_seed(4)
    dense, noise = torch.randn(2, 64, 2048, generator=generator)
    now = dense + size * noise
    expected = divergence(now, dense).float()
    torch.testing.assert_close(_divergence(now, dense), expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("shift", [95.0, 1e4, -1e4])  # exp(95) overflows in float32
def test_a_token_that_becomes_certain_or_impossible(shift):
    dense = torch.randn(64, 100, generator=torch.Generator().manual_seed(5))
    now = dense.clone()
    now[:, 7] += shift
    expected = divergence(now, dense).float()
    torch.testing.assert_close(_divergence(now, dense), expected, rtol=1e-3, atol=0)


def test_tokens_that_are_ruled_out():
    dense = torch.randn(64, 100, generator=torch.Generator().manual_seed(6))
    dense[:, 0] = -torch.inf
    now = 1.1 * dense
    expected = divergence(now[:, 1:], dense[:, 1:]).float()
    torch.testing.assert_close(_divergence(now, dense), expected, rtol=1e-3, atol=0)
    now[:, 1] = -torch.inf
    assert bool((_divergence(now, dense) == torch.inf).all())
    now = dense.clone()
    now[:, 0] = 1.0  # not ruled out any more: KL = −ln(1 − q₀)
    expected = -torch.log1p(-now.softmax(1)[:, 0])
    torch.testing.assert_close(_divergence(now, dense), expected, rtol=1e-3, atol=0)


class Block(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.down.weight.mul_(scale)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Tower(nn.Module):
    """Blocks without a vocabulary, whose hidden states are the output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(1 + 2 * k) for k in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_other_outputs_are_compared_by_their_relative_error(fine):
    def tower() -> Tower:
        torch.manual_seed(0)
        return Tower()

    batches = list(torch.randn(4, 5, 40, 16, generator=torch.Generator().manual_seed(1)))
    given = {"pattern": None, "sparsity": 0.5, "forward": None}
    dense, errors = torch.cat([tower()(x) for x in batches]), []
    for k in range(3):
        model = tower()
        prune_model(model, batches, blocks=f"blocks.{k}", **{**given, "forward": model})
        now = torch.cat([model(x) for x in batches])
        ratio = (now - dense).norm(dim=-1).square() / dense.norm(dim=-1).square()
        errors.append(float(ratio.mean()))
    for returned in (lambda x: x, lambda x: {"ids": x.long(), "y": x}, lambda x: ([x.long()], x)):
        model = tower()
        forward = lambda x, model=model, returned=returned: returned(model(x))  # noqa: E731
        report = prune_model(model, batches, beyond=OUTPUT, **{**given, "forward": forward})
        ratios = [row.sparsity for row in report.blocks]
        assert ratios == pytest.approx(shares(errors, 0.5), abs=1e-4)
    assert max(ratios) - min(ratios) > 0.01


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda y: {"ids": y.long(), "text": ["a"]}, "`predict_step` returns.*got dict"),
        (lambda y: y / 0, "with blocks.0 pruned the output differs by nan"),
    ],
    ids=["nothing", "infinite"],
)
@torch.no_grad()
def test_an_output_that_tells_nothing_is_refused_and_the_model_as_it_was(returned, message):
    model = Tower()
    before = [p.clone() for p in model.parameters()]
    given = {"pattern": None, "sparsity": 0.5, "forward": lambda x: returned(model(x))}
    with pytest.raises(TargetError, match=message):
        prune_model(model, [torch.randn(5, 40, 16)], beyond=OUTPUT, **given)
    assert all(map(torch.equal, before, model.parameters()))


@torch.no_grad()
def test_a_dry_run_that_fails_leaves_the_model_as_it_was(build, batches, monkeypatch):
    model, seen = build("llama"), []

    def prune_some(layers, *args, **options):
        seen.extend(layers)
        if len(seen) == 10:
            raise ValueError("in the middle")
        return prune_layers(layers, *args, **options)

    monkeypatch.setattr("mrp_lightning.pruning.block.prune_layers", prune_some)
    with pytest.raises(ValueError, match="in the middle"):
        prune_model(model, batches, pattern=None, sparsity=0.5, beyond=OUTPUT)
    for (name, now), before in zip(
        model.named_parameters(), build("llama").parameters(), strict=True
    ):
        assert torch.equal(now, before), name


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
        beyond=OUTPUT,
        offload=True,
    )
    assert report.totals["removed"] == math.floor(0.7 * report.totals["weights"] + 0.5)
    assert len({row.sparsity for row in report.blocks}) > 1


def change(value: float, *sizes: int) -> Change:
    layers = [
        SimpleNamespace(name=f"{value}.{i}", weight=torch.empty(1, size))
        for i, size in enumerate(sizes)
    ]
    return Change(value, layers)


def test_rounding_leaves_the_total_as_it_is():
    changes = {"a": change(1.0, 7, 7, 7), "b": change(2.0, 5, 11), "c": change(4.0, 13)}
    ratios = allocate(0.66, changes)
    patterns = patterns_of_layers(ratios, changes)
    removed = sum(
        patterns[layer.name].budget(1, layer.weight.numel())
        for each in changes.values()
        for layer in each.layers
    )
    assert removed == 33
    assert ratios["a"] > ratios["b"] > ratios["c"]


def test_rounding_moves_no_sparsity():
    values = {name: math.exp(STEP * n) for name, n in {"a": -25, "b": -23, "c": -22}.items()}
    sizes = {"a": (70, 30), "b": (51, 49), "c": (100,)}
    found = []
    for error in (0.0, 0.05, -0.05):
        changes = {
            name: Change(value * (1 + error * (-1) ** i), change(i, *sizes[name]).layers)
            for i, (name, value) in enumerate(values.items())
        }
        ratios = allocate(0.7, changes)
        found.append((ratios, patterns_of_layers(ratios, changes)))
    assert found[0] == found[1] == found[2]
    assert found[0][0]["a"] - found[0][0]["b"] == pytest.approx(2 * STEP / 7)


def test_the_total_stays_and_the_spread_is_bounded():
    changes = {"a": change(0.9, 100), "b": change(0.03, 700), "c": change(0.0, 200)}
    ratios = allocate(0.7, changes)
    assert ratios == pytest.approx({"a": 0.55, "b": 0.7 + (15 - 30) / 700, "c": 0.85})


@pytest.mark.parametrize("sparsity", [0.01, 0.3, 0.99])
def test_ratios_stay_between_none_and_all(sparsity):
    ratios = allocate(sparsity, {"a": change(1.0, 1000), "b": change(9.0, 10)})
    assert all(0 < ratio < 1 for ratio in ratios.values())


def test_blocks_that_are_alike_share_alike():
    ratios = allocate(0.7, {"a": change(1.0, 8), "b": change(1.0, 4)})
    assert ratios == pytest.approx({"a": 0.7, "b": 0.7}, abs=1e-12)


def test_what_it_is_not_for_is_refused():
    with pytest.raises(OptionError, match="uniform, output; got 'owl'"):
        Settings(method="SM", sparsity=0.7, allocation="owl")
    with pytest.raises(OptionError, match="`allocation: output` .* the pattern 2:4"):
        Settings(method="SM", pattern="2:4", allocation="output")
