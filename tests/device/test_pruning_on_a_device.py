"""Nothing is left behind on the CPU, or on the device: every run equals that of the CPU."""

from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import warm
from families import batches, build, runner
from second_device import NAME, assert_same, second_device, trainer_on
from torch import nn
from torch.utils.data import DataLoader

from callbacks import MRPCallback
from mrp_lightning import BlockTuning, CausalLM, HessianAccumulator, prune_weight
from mrp_lightning.calibration.offload import held_on_cpu
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.targets import blocks as blocks_module
from mrp_lightning.targets import plan as plan_module
from mrp_lightning.targets.plan import make_plan

CPU = torch.device("cpu")
# Attention, a scan, experts, a walk that runs again, an encoder with a decoder, images.
FAMILIES = ["llama", "mamba", "mixtral", "gemma3n_text", "t5", "vit"]


@pytest.fixture(autouse=True)
def _weights_in_disguise_are_dense(monkeypatch):
    """Their class is not that of a parameter, as sharded or quantized weights' is not."""
    for module in (plan_module, blocks_module):
        monkeypatch.setattr(module, "why_not_plain", lambda *_, **__: None)


STAND_IN = pytest.mark.skipif(torch.cuda.is_available(), reason="of the stand-in; here is a GPU")


@STAND_IN
def test_the_devices_do_not_mix(second):
    here, there = torch.ones(3), torch.ones(3, device=second)
    assert there.device == second
    assert (there + there).device == second
    assert torch.equal((there + 2 * there[0]).cpu(), 3 * here)
    for mix in (torch.add, torch.dot, torch.equal):
        with pytest.raises(RuntimeError, match="on one device"):
            mix(here, there)
    there.copy_(2 * here)
    there[torch.tensor([0])] = 5.0
    assert there.tolist() == [5.0, 2.0, 2.0]
    assert torch.tensor([1, 2], device=second).sum() == 3


@STAND_IN
def test_without_a_test_that_asks_the_device_is_not_there():
    assert str(torch.accelerator.current_accelerator(check_available=True)) != NAME


@pytest.mark.parametrize(
    ("method", "pattern"),
    [
        *((x, "2:4") for x in ("magnitude", "SS", "SM", "MS", "MM")),
        *((x, 0.6) for x in ("wanda", "SS", "SM", "wanda+M")),
    ],
)
def test_the_solver_stays_where_its_weight_is(second, method, pattern):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, 192, generator=generator)
    inputs = torch.randn(400, 192, generator=generator) * torch.linspace(0.1, 2, 192)

    def solve(device):
        accumulator = HessianAccumulator(columns=192)
        for part in inputs.to(device).chunk(3):
            accumulator.update(part)
        choice = {"pattern": pattern} if isinstance(pattern, str) else {"sparsity": pattern}
        hessian = accumulator.hessian()
        return prune_weight(weight.to(device), hessian, method=method, block_size=64, **choice)

    there, here = solve(second), solve(CPU)
    assert there.weight.device == second
    if second.type == "cuda":  # products in another order, which may turn a close choice
        assert (there.pruned.cpu() != here.pruned).float().mean() < 0.01
        assert there.loss == pytest.approx(here.loss, rel=5e-3)
    else:
        assert torch.equal(there.weight.cpu(), here.weight)
        assert there.loss == here.loss


def pruned(
    family: str,
    device: torch.device,
    *,
    offload: bool,
    method: str = "SM",
    sparsity: float | None = None,
    beyond: dict[str, Any] | None = None,
) -> dict[str, torch.Tensor]:
    model = build(family)
    # The others compute differently on different devices.
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    settings = Settings(
        pattern=None if sparsity else "2:4",
        sparsity=sparsity,
        method=method,
        offload=offload,
        **beyond or {},
    )
    plan = make_plan(model, settings.recipe.pattern)
    blocks = [block.module for block in plan.blocks]
    with held_on_cpu(model, lambda: blocks if offload else []):
        model.to(device)
    job = Job(
        model=model,
        forward=runner(model),
        batches=[{k: v.to(device) for k, v in batch.items()} for batch in batches(family)],
        plan=plan,
        settings=settings,
        device=device,
    )
    prune_model(job)
    ends = {p.device.type for block in blocks for p in block.parameters()}
    assert ends == {CPU.type if offload else device.type}
    return {layer.name: layer.weight.cpu() for block in plan.layers.values() for layer in block}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_walk_stays_on_its_device(second, family):
    # The masks and compensations have a test of their own, above.
    method = "SM" if family == "llama" else "wanda"
    expected = pruned(family, CPU, offload=False, method=method)
    assert len(expected) >= 4
    for offload in (False, True) if family in ("llama", "t5") else (True,):
        weights = pruned(family, second, offload=offload, method=method)
        # Room for the rounding of kernels that a CPU alone has; a weight is about 0.2.
        assert_same(weights, expected, second, atol=2e-3)


BEYOND = {
    "target": "dense",
    "allocation": "output",
    "tuning": BlockTuning(epochs=1, learning_rate=1e-4),
}


@pytest.fixture(scope="module")
def fresh():
    """A process of its own: autograd knows no device that comes after its first backward."""
    with ProcessPoolExecutor(1, mp_context=warm.context) as pool:
        yield pool


def compare_what_goes_beyond_single_layers(family):
    is_gpu = torch.cuda.is_available()
    with nullcontext(torch.device("cuda", 0)) if is_gpu else second_device() as device:
        choice = {"sparsity": 0.6, "beyond": BEYOND}
        expected = pruned(family, CPU, offload=False, **choice)
        weights = pruned(family, device, offload=family != "llama", **choice)
        assert_same(weights, expected, device, atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "mixtral", "t5"])
@pytest.mark.usefixtures("second")
def test_what_goes_beyond_single_layers_stays_on_the_device(fresh, family):
    fresh.submit(compare_what_goes_beyond_single_layers, family).result()


def windows() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    return DataLoader(list(torch.randint(3, 2048, (8, 24), generator=generator)), batch_size=2)


@pytest.mark.parametrize("offload", [False, True])
def test_lightnings_loops_run_on_the_device(second, tiny_llama, offload):
    """Calibrate, prune and evaluate, with as much on the device as is asked for."""
    perplexity, weights = {}, {}
    for device in (CPU, second):
        lm = CausalLM(tiny_llama, attn_implementation="eager", offload=offload)
        places = set()
        first, last = lm.model.model.layers
        last.register_forward_pre_hook(
            lambda *_, first=first, places=places: places.add(first.mlp.up_proj.weight.device.type)
        )
        prune = MRPCallback(pattern="2:4", offload=offload)
        trainer_on(device).predict(lm, windows(), callbacks=[prune])
        (metrics,) = trainer_on(device).test(lm, windows(), verbose=False)
        assert places == {CPU.type if offload else device.type}
        perplexity[device.type] = metrics["perplexity"]
        layers = lm.model.model.layers.modules()
        linears = (module for module in layers if isinstance(module, nn.Linear))
        weights[device.type] = {str(n): layer.weight.cpu() for n, layer in enumerate(linears)}
    rounding = 1e-6 if second.type == NAME else 1e-2
    assert perplexity[second.type] == pytest.approx(perplexity[CPU.type], rel=rounding)
    assert_same(weights[second.type], weights[CPU.type], second)
    for weight in weights[second.type].values():
        assert ((weight.unflatten(1, (-1, 4)) == 0).sum(2) == 2).all()


class BuiltLate(pl.LightningModule):
    """Makes its model when Lightning asks for it, and notes where the blocks are."""

    def __init__(self, source: Path) -> None:
        super().__init__()
        self.source, self.on_device = source, []

    def make(self) -> None:
        self.lm = CausalLM(self.source, attn_implementation="eager").model

    def on_predict_start(self) -> None:
        self.note()
        self.lm.model.layers[0].register_forward_pre_hook(lambda *_: self.note())

    def note(self) -> None:
        places = [layer.mlp.up_proj.weight.device.type for layer in self.lm.model.layers]
        self.on_device.append(sum(place != CPU.type for place in places))
        assert self.lm.model.embed_tokens.weight.device == self.device != CPU

    def predict_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.lm(batch).logits


class InSetup(BuiltLate):
    def setup(self, stage: str) -> None:
        self.make()


class InConfigureModel(BuiltLate):
    def configure_model(self) -> None:
        self.make()


@pytest.mark.parametrize("kind", [InSetup, InConfigureModel])
def test_blocks_that_are_made_late_never_come_to_the_device_all_at_once(second, tiny_llama, kind):
    module, prune = kind(tiny_llama), MRPCallback(pattern="2:4", offload=True)
    trainer_on(second).predict(module, windows(), callbacks=[prune])
    assert module.on_device[0] == 0
    assert max(module.on_device) == 1
    assert len(prune.report.pruned) == 14
    assert not {"configure_model", "_apply"} & set(module.__dict__)
