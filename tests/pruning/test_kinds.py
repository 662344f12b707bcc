"""Every kind of layer against plain arithmetic: convolutions, stacked experts, bare products."""

from typing import Any

import pytest
import torch
from slow_pruning import report_of
from torch import Tensor, nn
from torch.nn import functional

from mrp_lightning import prune_weight
from mrp_lightning.calibration import hessians
from mrp_lightning.errors import PatternError
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.sequential import prune_model as prune_job
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.hessian import HessianAccumulator
from mrp_lightning.solver.patterns import make_pattern
from mrp_lightning.targets.layers import Conv2d, layers_of
from mrp_lightning.targets.plan import make_plan

HALF = make_pattern(0.5, None)


def prune_model(
    model: nn.Module, batches: list[dict[str, Tensor]], *, pattern: str = "2:4", **choices: Any
) -> PruningReport:
    settings = Settings(pattern=pattern, method="SM")
    job = Job(
        model=model,
        forward=lambda batch: model(**batch),
        batches=batches,
        plan=make_plan(model, settings.recipe.pattern, **choices),
        settings=settings,
    )
    prune_job(job)
    return report_of(job)


def assert_close_weights(ours: Tensor, expected: Tensor) -> None:
    assert torch.equal(ours == 0, expected == 0)
    assert (ours - expected).norm() <= 2e-3 * expected.norm()


@pytest.mark.parametrize(
    "choices",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)},
        {"kernel_size": 3, "dilation": 2, "padding": "same"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    ],
)
@torch.no_grad()
def test_a_convolution_is_its_matrix_times_the_unfolded_input(choices):
    conv = nn.Conv2d(4, 5, bias=False, **choices)
    layer = Conv2d("conv", conv)
    x = torch.randn(2, 4, 9, 8)
    expected = conv(x)
    assert layer.weight.shape == (5, layer.columns)
    torch.testing.assert_close(
        layer.inputs(x) @ layer.weight.T, expected.flatten(2).transpose(1, 2), rtol=1e-4, atol=1e-5
    )
    parameter, new = conv.weight, torch.randn(5, layer.columns)
    layer.write_(new)
    assert conv.weight is parameter
    assert torch.equal(layer.weight, new)


def small_cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 12, 2, stride=2),
        nn.Flatten(),
        nn.Linear(12 * 9, 6),
    )


@torch.no_grad()
def test_a_small_cnn_is_pruned_in_one_dense_pass():
    model, dense = small_cnn(), small_cnn()
    x = torch.randn(64, 4, 6, 6)
    report = prune_model(model, [{"input": part} for part in x.split(16)])
    rows = {row.name: row for row in report.layers}
    assert rows["2"].skipped == "it is a depthwise Conv2d"
    assert torch.equal(model[2].weight, dense[2].weight)
    for k in (0, 3):
        conv = dense[k]
        patches = functional.unfold(dense[:k](x), conv.kernel_size, 1, conv.padding, conv.stride)
        rows_, channels = conv.weight.shape[:2]
        # In the order of unfold: channel, kernel position; groups of 4 run along the channels.
        order = torch.arange(patches.shape[1]).view(channels, -1).T.flatten()
        inputs = patches.transpose(1, 2).flatten(0, 1)[:, order]
        weight = conv.weight.flatten(1)[:, order]
        hessian = 2 * inputs.T @ inputs / len(inputs)
        expected = prune_weight(weight, hessian, pattern="2:4").weight
        assert_close_weights(model[k].weight.flatten(1)[:, order], expected)
        along_channels = (model[k].weight == 0).unflatten(1, (-1, 4)).sum(2)
        assert (along_channels == 2).all()
        assert rows[str(k)].tokens == len(inputs)
        assert rows[str(k)].shape == (rows_, len(order))


def test_groups_do_not_straddle_kernel_positions():
    patches = nn.Conv2d(3, 8, 4)  # 48 columns, but 3 channels
    with pytest.raises(PatternError, match=r"0: 3 input channels"):
        make_plan(nn.Sequential(patches), make_pattern(None, "2:4"))
    assert make_plan(nn.Sequential(patches), HALF).num_layers == 1


@torch.no_grad()
def test_a_convolution_with_two_owners_is_pruned_once_and_stays_tied():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))
    model[2].weight = model[0].weight
    report = prune_model(model, [{"input": torch.randn(8, 4, 6, 6)}])
    assert [row.name for row in report.pruned] == ["0"]
    assert model[2].weight is model[0].weight


@torch.no_grad()
def test_convolutions_that_read_one_input_differently_share_no_hessian():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near = nn.Conv2d(4, 4, 3, padding=1)
            self.far = nn.Conv2d(4, 4, 3, padding=2, dilation=2)

        def forward(self, x: Tensor) -> Tensor:
            return self.near(x) + self.far(x)

    torch.manual_seed(0)
    model, x = Two(), torch.randn(8, 4, 6, 6)
    weight = Conv2d("far", model.far).weight.clone()
    prune_model(model, [{"x": x}])
    inputs = Conv2d("far", model.far).inputs(x).flatten(0, 1)
    expected = prune_weight(weight, 2 * inputs.T @ inputs / len(inputs), pattern="2:4").weight
    assert_close_weights(Conv2d("far", model.far).weight, expected)


@torch.no_grad()
def test_convnext_is_pruned_but_for_its_depthwise_convolutions():
    from transformers import ConvNextConfig, ConvNextModel

    torch.manual_seed(0)
    config = ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=2)
    model = ConvNextModel(config).eval()
    report = prune_model(model, [{"pixel_values": torch.randn(4, 3, 32, 32)}])
    skipped = {row.name for row in report.layers if row.skipped}
    assert skipped == {f"encoder.stages.{k}.layers.0.dwconv" for k in (0, 1)}
    between = model.encoder.stages[1].downsampling_layer[1]
    assert isinstance(between, nn.Conv2d)
    assert ((between.weight == 0).unflatten(1, (-1, 4)).sum(2) == 2).all()


def test_patch_embeddings_stand_outside_the_blocks(build):
    model = build("vit")
    patches = "vit.embeddings.patch_embeddings.projection"
    assert make_plan(model, HALF).outside == []
    assert [x.name for x in make_plan(model, HALF, targets="projection").outside] == [patches]


class Bare(nn.Module):
    """Uses the weights of its layers without calling them, on inputs with padding."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.layer = nn.Linear(8, 12)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        weight = self.layer.weight
        match self.form:
            case "W @ x":
                return weight @ x.transpose(1, 2)
            case "x @ W.T":
                return x @ weight.T
            case "matmul":
                return torch.matmul(weight, x.mT)
            case "linear":
                return functional.linear(x, weight)
            case _:
                return self.layer(x)


@pytest.mark.parametrize("form", ["W @ x", "x @ W.T", "matmul", "linear", "called"])
@torch.no_grad()
def test_a_weight_is_calibrated_by_its_product(form):
    torch.manual_seed(0)
    model, x = Bare(form), torch.randn(6, 9, 8)
    dense = model.layer.weight.clone()
    mask = torch.ones(6, 9, dtype=torch.long)
    mask[0, :5] = 0
    report = prune_model(model, [{"x": x, "attention_mask": mask}])
    inputs = x[mask.bool()]
    expected = prune_weight(dense, 2 * inputs.T @ inputs / len(inputs), pattern="2:4").weight
    assert_close_weights(model.layer.weight, expected)
    assert report.layers[0].tokens == len(inputs)


@pytest.mark.parametrize("family", ["mamba", "jamba", "falcon_mamba"])
@torch.no_grad()
def test_dt_proj_is_pruned_with_what_it_is_multiplied_with(family, build, batches):
    model, dense = build(family), build(family)
    report = prune_model(model, batches, targets="dt_proj", skip_indivisible=True, pattern="1:2")
    done = [row for row in report.pruned if row.name.endswith("dt_proj")]
    assert done
    assert done[0].tokens == sum(int(batch["attention_mask"].sum()) for batch in batches)
    mixer = dense.get_submodule(done[0].name.rpartition(".")[0])
    seen: list[Tensor] = []
    kept: list[Tensor] = []
    rank = mixer.dt_proj.in_features

    def of_x_proj(_: nn.Module, __: Any, output: Tensor) -> None:
        step = output[..., :rank]
        if family == "jamba":
            step = mixer.dt_layernorm(step)
        elif family == "falcon_mamba":
            variance = step.pow(2).mean(-1, keepdim=True)
            step = step * torch.rsqrt(variance + mixer.rms_eps)
        seen.append(step.flatten(0, 1)[kept[-1]])

    mixer.x_proj.register_forward_hook(of_x_proj)
    for batch in batches:
        kept.append(batch["attention_mask"].flatten().bool())
        dense(**batch)
    inputs = torch.cat(seen)
    hessian = 2 * inputs.T @ inputs / len(inputs)
    expected = prune_weight(mixer.dt_proj.weight, hessian, pattern="1:2").weight
    assert_close_weights(model.get_submodule(done[0].name).weight, expected)


MOE = ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "jamba"]


def expert_inputs(
    model: nn.Module, module: Any, batches: list[dict[str, Tensor]]
) -> dict[tuple[int, str], Tensor]:
    """What the matrices of each expert are given, by a plain loop; padding cut by hand."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    rows: dict[tuple[int, str], list[Tensor]] = {}

    def collect(_: nn.Module, args: Any, kwargs: Any) -> None:
        hidden, chosen = (*args, *kwargs.values())[:2]
        hidden, tokens = hidden.flatten(0, -2), batch["attention_mask"].flatten().bool()
        for e in range(module.num_experts):
            x = hidden[tokens & (chosen == e).any(1)]
            weight = getattr(module, first)[e]
            up = x @ (weight if module.is_transposed else weight.T)
            up = up + getattr(module, f"{first}_bias")[e] if module.has_bias else up
            inner = module._apply_gate(up) if module.has_gate else module.act_fn(up)
            rows.setdefault((e, first), []).append(x)
            rows.setdefault((e, "down_proj"), []).append(inner)

    handle = module.register_forward_pre_hook(collect, with_kwargs=True)
    for batch in batches:
        model(**batch)
    handle.remove()
    return {key: torch.cat(x).double() for key, x in rows.items()}


def first_experts(model: nn.Module) -> tuple[str, nn.Module]:
    return next((n, m) for n, m in model.named_modules() if hasattr(m, "is_transposed"))


@pytest.mark.parametrize("family", MOE)
@torch.no_grad()
def test_experts_are_pruned_with_the_tokens_routed_to_them(family, build, batches):
    model, dense = build(family), build(family)
    before = model.get_experts_implementation()
    targets = [layer.name for n, m in dense.named_modules() for layer in layers_of(n, m)]
    name, module = first_experts(dense)
    targets = [t for t in targets if t.startswith(f"{name}.")]
    report = prune_model(model, batches, targets=targets)
    assert model.get_experts_implementation() == before
    rows = {row.name: row for row in report.pruned}
    assert sorted(rows) == sorted(targets)

    inputs = expert_inputs(dense, module, batches)
    for (e, stack), x in inputs.items():
        row = rows[f"{name}.{e}.{stack}"]
        weight = getattr(module, stack)[e]
        ours = getattr(model.get_submodule(name), stack)[e]
        if module.is_transposed:
            weight, ours = weight.T, ours.T
        pool = torch.cat([other for (_, s), other in inputs.items() if s == stack])
        share = max(0.0, 1 - len(x) / x.shape[1])
        own = 2 * x.T @ x / max(1, len(x))
        hessian = (1 - share) * own + share * 2 * pool.T @ pool / len(pool)
        expected = prune_weight(weight.contiguous(), hessian.float(), pattern="2:4").weight
        assert row.tokens == len(x)
        assert row.shared_hessian == pytest.approx(share)
        assert_close_weights(ours, expected)
    # Nothing else was touched: routers, biases, all other layers.
    for (n, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert torch.equal(ours, theirs) or n.removeprefix(f"{name}.").endswith("_proj"), n


@torch.no_grad()
def test_an_expert_without_tokens_gets_the_hessian_of_all(build, batches, caplog):
    model = build("mixtral")
    router = model.model.layers[0].mlp.gate
    router.weight.zero_()  # ties go to the first two of four experts
    report = prune_model(model, batches, targets="experts")
    rows = {row.name: row for row in report.pruned}
    starved = [n for n, row in rows.items() if row.tokens == 0 and ".layers.0." in n]
    assert len(starved) == 4
    for name in starved:
        assert rows[name].shared_hessian == 1
        assert rows[name].sparsity == 0.5
        assert rows[name].to_dict()["shared_hessian"] == 1
        assert name in caplog.text


@torch.no_grad()
def test_portions_give_the_same_weights(build, batches, monkeypatch):
    whole, parts = build("qwen3_moe"), build("qwen3_moe")
    monkeypatch.setattr(hessians, "TOKENS_PER_COLUMN", 0.05)  # each by its own Hessian
    prune_model(whole, batches)
    monkeypatch.setattr(hessians, "HESSIAN_BYTES", 1)
    prune_model(parts, batches)
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.equal(a == 0, b == 0), name
        assert (a - b).norm() <= 2e-3 * b.norm(), name


@torch.no_grad()
def test_the_way_experts_run_is_restored_after_an_error(build, batches, monkeypatch):
    model = build("mixtral")
    before = model.get_experts_implementation()
    module = first_experts(model)[1]
    during = []

    def fail(*_: Any) -> None:
        during.append(module.config._experts_implementation)
        raise KeyboardInterrupt

    monkeypatch.setattr(HessianAccumulator, "update", fail)
    with pytest.raises(KeyboardInterrupt):
        prune_model(model, batches)
    assert during == ["eager"]
    assert model.get_experts_implementation() == before != "eager"
    assert not module._forward_pre_hooks
