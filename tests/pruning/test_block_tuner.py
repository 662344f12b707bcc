"""Tuning blocks after they are pruned, against plain torch on full forwards of two whole models."""

import zlib

import pytest
import torch
from slow_pruning import BLOCKS, Batches, prune_model
from torch import Tensor, nn

from mrp_lightning.calibration.walks import hidden_of
from mrp_lightning.errors import DataError, OptionError, TargetError
from mrp_lightning.pruning.settings import BlockTuning

# Six windows in three batches, of which the last is held out, and one batch a step.
TUNING = BlockTuning(epochs=3, learning_rate=1e-3, batch_size=1)


def block_output(model: nn.Module, name: str, batch: dict[str, Tensor]) -> Tensor:
    """What a block returns in a full forward, the rows that are tokens."""
    found = []
    handle = model.get_submodule(name).register_forward_hook(
        lambda _, __, output: found.append(hidden_of(output))
    )
    model(**batch)
    handle.remove()
    return found[0]


def relative_error(model: nn.Module, dense: nn.Module, name: str, batches: Batches) -> float:
    """On the last window."""
    batch = batches[-1]
    with torch.no_grad():
        ours, theirs = (block_output(m, name, batch)[-1:].double() for m in (model, dense))
    kept = batch["attention_mask"][-1:].bool()
    return float((ours - theirs)[kept].square().sum() / theirs[kept].square().sum())


def tune_slowly(model: nn.Module, dense: nn.Module, name: str, batches: Batches) -> float:
    """The last block that is pruned so far; the held-out error afterwards."""
    block = model.get_submodule(name)
    weights = [m.weight for m in block.modules() if isinstance(m, nn.Linear)]
    zeros = [w.detach() == 0 for w in weights]
    optimizer = torch.optim.Adam(weights, lr=TUNING.learning_rate)
    steps = 3 * TUNING.epochs
    order = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    best = relative_error(model, dense, name, batches)
    snapshot = [w.detach().clone() for w in weights]
    done = 0
    for _ in range(TUNING.epochs):
        for i in torch.randperm(len(batches), generator=order).tolist():
            batch = {k: v[:1] if i == 2 else v for k, v in batches[i].items()}
            with torch.no_grad():
                target = block_output(dense, name, batch)
            kept = batch["attention_mask"].bool()
            loss = (block_output(model, name, batch) - target)[kept].square().sum()
            for group in optimizer.param_groups:
                group["lr"] = TUNING.learning_rate * (1 - done / steps)
            for w, gradient, zero in zip(
                weights, torch.autograd.grad(loss, weights), zeros, strict=True
            ):
                w.grad = gradient.masked_fill(zero, 0)
            optimizer.step()
            done += 1
        error = relative_error(model, dense, name, batches)
        if error < best:
            best, snapshot = error, [w.detach().clone() for w in weights]
    with torch.no_grad():
        for w, kept_weight in zip(weights, snapshot, strict=True):
            w.copy_(kept_weight)
    return best


def test_gives_the_weights_of_plain_torch(build, batches):
    ours, theirs, dense = build("llama"), build("llama"), build("llama")
    name = "model.layers.0"
    report = prune_model(ours, batches, blocks=name, beyond={"tuning": TUNING})
    prune_model(theirs, batches, blocks=name)
    before = relative_error(theirs, dense, name, batches)
    after = tune_slowly(theirs, dense, name, batches)
    (row,) = report.blocks
    assert row.name == name
    assert row.error_before == pytest.approx(before, rel=1e-4)
    assert row.error_after == pytest.approx(after, rel=1e-3)
    assert row.error_after < row.error_before
    assert row.epoch in (1, 2, 3)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a == 0, b == 0), name
        # Adam's first steps turn the sign of a tiny gradient into a whole step.
        assert (a - b).norm() <= 1e-2 * b.norm(), name


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((x, torch.float32) for x in ("opt", "gemma3_text", "gpt2")),
        ("llama", torch.bfloat16),
    ],
)
def test_reports_the_held_out_errors_of_the_finished_model(family, dtype, build, batches):
    model, dense = build(family).to(dtype), build(family).to(dtype)
    report = prune_model(model, batches, beyond={"tuning": TUNING, "target": "dense"})
    rows = {row.name: row for row in report.blocks}
    assert len(rows) == len(model.get_submodule(BLOCKS[family]))
    for name, row in rows.items():
        error = relative_error(model, dense, name, batches)
        assert row.error_after == pytest.approx(error, rel=2e-3)
        assert row.error_after <= row.error_before
    assert any(row.epoch for row in rows.values())
    assert {row.sparsity for row in report.layers} == {0.5}
    for row in report.layers:
        weight = model.get_submodule(row.name).weight
        weight = weight.T if family == "gpt2" else weight
        assert weight.dtype == dtype
        assert bool(((weight.unflatten(1, (-1, 4)) == 0).sum(2) >= 2).all())


def test_a_block_that_gets_no_better_stays_as_it_was_pruned(build, batches):
    ours, theirs = build("llama"), build("llama")
    report = prune_model(ours, batches, beyond={"tuning": BlockTuning(learning_rate=10.0)})
    prune_model(theirs, batches)
    assert [(row.epoch, row.error_before) for row in report.blocks] == [
        (0, row.error_after) for row in report.blocks
    ]
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_same_run_gives_the_same_bits_and_leaves_the_model_as_it_was(build, batches):
    ours, theirs = build("llama"), build("llama")
    ours.lm_head.weight.requires_grad_(False)
    flags = [p.requires_grad for p in ours.parameters()]
    prune_model(ours, batches, beyond={"tuning": TUNING})
    prune_model(theirs, batches, beyond={"tuning": TUNING}, offload=True)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [p.requires_grad for p in ours.parameters()] == flags
    assert all(p.grad is None for p in ours.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in ours.modules())


def test_only_weights_of_pruned_layers_move(build, batches):
    model, plain = build("opt"), build("opt")
    choice = {"blocks": "model.decoder.layers.0", "ignore": ["fc2"]}
    prune_model(model, batches, beyond={"tuning": TUNING}, **choice)
    prune_model(plain, batches, **choice)
    moved = {
        name
        for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True)
        if not torch.equal(a, b)
    }
    layers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj")
    assert moved == {f"model.decoder.layers.0.{name}.weight" for name in (*layers, "fc1")}


@pytest.mark.parametrize("family", ["t5", "mixtral", "jamba", "bart"])
def test_families_with_other_walks_and_layers_are_tuned(family):
    import families

    model, batches = families.build(family), families.batches(family)
    runner = families.runner(model)
    report = prune_model(model, batches, forward=runner, beyond={"tuning": TUNING})
    assert all(row.error_after <= row.error_before for row in report.blocks)
    assert any(row.epoch for row in report.blocks)
    for row in report.pruned:
        *owner, last = row.name.split(".")
        if last in ("gate_up_proj", "down_proj") and owner[-1].isdigit():  # of a stack of experts
            weight = model.get_submodule(".".join(owner[:-1])).get_parameter(last)[int(owner[-1])]
        else:
            weight = model.get_submodule(row.name).weight
        assert bool(((weight.unflatten(1, (-1, 4)) == 0).sum(2) >= 2).all()), row.name


def test_what_writes_over_what_gradients_need_is_refused():
    import families

    model = families.build("rwkv")
    with pytest.raises(TargetError, match=r"through rwkv\.blocks\.0: .*inplace operation"):
        prune_model(
            model,
            families.batches("rwkv"),
            forward=families.runner(model),
            beyond={"tuning": TUNING},
        )


def test_what_cannot_be_tuned_is_refused_before_work_starts(build, batches):
    model = build("llama")
    weights = [p.clone() for p in model.parameters()]
    beyond = {"tuning": TUNING}

    def forward(batch):
        with torch.no_grad():
            return model(**batch)

    with pytest.raises(TargetError, match=r"none come through model\.layers\.0: "):
        prune_model(model, batches, forward=forward, beyond=beyond)
    one = [{name: value[:1] for name, value in batches[2].items()}]
    with pytest.raises(DataError, match="at least 2, got 1"):
        prune_model(model, one, beyond=beyond)
    for a, b in zip(model.parameters(), weights, strict=True):
        assert torch.equal(a, b)
    assert all(p.requires_grad for p in model.parameters())
    with pytest.raises(TargetError, match=r"float16.* model\.layers\.0\.self_attn\.q_proj, "):
        prune_model(model.half(), batches, beyond=beyond)


def test_all_options_out_of_range_are_listed():
    with pytest.raises(OptionError) as caught:
        BlockTuning(epochs=0, learning_rate=-1.0, batch_size=2.5, held_out=1.0)
    for name in ("epochs", "learning_rate", "batch_size", "held_out"):
        assert f"`tuning.{name}` must be" in str(caught.value)


def test_how_windows_are_batched_changes_rounding_only(build):
    ids = torch.randint(3, 64, (8, 16), generator=torch.Generator().manual_seed(3))
    models = [build("llama"), build("llama")]
    tuning = BlockTuning(epochs=2, learning_rate=1e-3, batch_size=7)
    errors = []
    for model, size in zip(models, (8, 1), strict=True):
        batches = [{"input_ids": part} for part in ids.split(size)]
        name = "model.layers.0"
        report = prune_model(model, batches, blocks=name, beyond={"tuning": tuning})
        errors.append((report.blocks[0].error_before, report.blocks[0].error_after))
        assert report.blocks[0].epoch
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert (a - b).norm() <= 1e-2 * b.norm()


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"hidden": x + self.linear(x)}


class NamedStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Named(), Named()])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)["hidden"]
        return x


def test_blocks_that_return_something_else_are_refused_before_anything_is_pruned():
    model, batches = NamedStack(), [{"x": torch.randn(2, 5, 8)} for _ in range(2)]
    with pytest.raises(TargetError, match=r"Leave `tuning` out.*: blocks\.0, blocks\.1\."):
        prune_model(model, batches, beyond={"tuning": TUNING})
    assert all(bool((block.linear.weight != 0).all()) for block in model.blocks)
    assert len(prune_model(model, batches).pruned) == 2


@pytest.mark.parametrize(("windows", "fraction"), [(8, 0.95), (2, 0.9)])
def test_a_window_remains_to_train_on(windows, fraction, build):
    ids = torch.randint(3, 64, (windows, 16), generator=torch.Generator().manual_seed(3))
    tuning = BlockTuning(epochs=1, held_out=fraction)
    batches = [{"input_ids": ids}]
    report = prune_model(
        build("llama"), batches, blocks="model.layers.0", beyond={"tuning": tuning}
    )
    assert report.blocks[0].error_before is not None
