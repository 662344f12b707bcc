"""The pruned model against a slow rewrite: full forwards, all inputs kept, one layer at a time."""

import time

import pytest
import torch
from slow_pruning import BLOCKS, TOLERANCE, assert_same_weights, inputs_of, prune_model, slow_prune
from torch import Tensor, nn

from mrp_lightning import prune_weight
from mrp_lightning.errors import NumericalWarning
from mrp_lightning.targets.layers import is_conv1d


@pytest.mark.parametrize("family", BLOCKS)
@torch.no_grad()
def test_gives_the_weights_of_a_slow_rewrite(family, build, batches):
    ours, theirs = build(family), build(family)
    report = prune_model(ours, batches, tolerance=TOLERANCE)
    slow_prune(theirs, BLOCKS[family], batches)
    assert_same_weights(ours, theirs)
    assert report.config["walk"] == "inject"
    assert report.totals["sparsity"] == 0.5
    assert all(row.skipped is None for row in report.layers)


@pytest.mark.parametrize(
    ("family", "method"),
    [("llama", "magnitude"), ("llama", "SS"), ("gpt2", "SM")],
)
@torch.no_grad()
def test_reports_the_true_loss_of_every_layer(family, method, build, batches):
    # In the first block, the pruned model and the dense one see the same inputs.
    model, dense = build(family), build(family)
    report = prune_model(model, batches, method=method, blocks=f"{BLOCKS[family]}.0")
    rows = {row.name: row for row in report.layers}
    assert len(rows) == {"llama": 7, "gpt2": 4}[family]
    for name, row in rows.items():
        layer = dense.get_submodule(name)
        x = inputs_of(dense, [layer], batches)[0]
        before, after = layer.weight.double(), model.get_submodule(name).weight.double()
        if is_conv1d(layer):
            before, after = before.T, after.T
        loss = (x @ (after - before).T).square().sum(1).mean()
        assert row.loss == pytest.approx(float(loss), rel=1e-3)
        assert row.relative_loss == pytest.approx(
            float(loss / (x @ before.T).square().sum(1).mean()), rel=1e-3
        )
        assert row.tokens == len(x)
        assert row.sparsity == pytest.approx(float((after == 0).float().mean()))


@pytest.mark.parametrize("family", ["llama", "bloom", "bart"])
@torch.no_grad()
def test_what_padding_holds_does_not_matter(family, build, batches):
    ours, theirs = build(family), build(family)
    if family == "bart":
        for batch in batches:  # as long as the encoder's, with padding of its own
            batch["decoder_input_ids"] = batch["input_ids"].flip(0)
            batch["decoder_attention_mask"] = batch["attention_mask"].flip(0)
    prune_model(ours, batches)
    for batch in batches:
        for ids, mask in (
            ("input_ids", "attention_mask"),
            ("decoder_input_ids", "decoder_attention_mask"),
        ):
            if ids in batch:
                batch[ids] = torch.where(batch[mask] == 1, batch[ids], 66 - batch[ids])
    prune_model(theirs, batches)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("family", ["bloom", "gpt2"])
@torch.no_grad()
def test_padding_changes_nothing(family, build, batches):
    # In float64 the sums of other batches decide between no two weights.
    ours, theirs = build(family).double(), build(family).double()
    batches = batches[1:]  # padded on the right, where no position moves
    lone = [
        {"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    # The sweep has no iteration whose end could turn rounding into another weight.
    prune_model(ours, batches, method="SS")
    prune_model(theirs, lone, method="SS")
    assert_same_weights(ours, theirs)


@torch.no_grad()
def test_offload_gives_the_same_bits_and_leaves_no_hook(build, batches):
    ours, theirs = build("t5"), build("t5")
    for batch in batches:
        batch["decoder_input_ids"] = batch["input_ids"][:, :7]
    prune_model(ours, batches)
    prune_model(theirs, batches, offload=True)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in theirs.modules())


@pytest.mark.parametrize(("peaks", "known"), [([5, 7], 7), ([5, 5], None), ([None, None], None)])
@torch.no_grad()
def test_what_it_took_is_that_of_the_walk(build, batches, monkeypatch, peaks, known):
    monkeypatch.setattr("mrp_lightning.pruning.sequential.peak_rss", lambda: peaks.pop(0))
    model = build("llama")
    forward, burnt = model.forward, []

    def slow_forward(*args, **kwargs):
        if not burnt:
            burnt.append(True)
            end = time.process_time() + 0.2
            while time.process_time() < end:
                pass
            time.sleep(0.2)
        return forward(*args, **kwargs)

    model.forward = slow_forward
    before = time.process_time()
    report = prune_model(model, batches, method="magnitude")
    assert 0.2 <= report.cpu_seconds <= time.process_time() - before
    assert report.peak_rss == known
    assert report.totals["cpu_seconds"] == report.cpu_seconds


def test_layers_that_no_forward_calls_are_reported():
    model = nn.Sequential(nn.Linear(8, 8))
    model[0].register_module("unused", nn.Linear(8, 8))
    report = prune_model(model, [{"input": torch.randn(16, 8)}])
    skipped = {row.name: row.skipped for row in report.layers if row.skipped}
    assert skipped == {"0.unused": "not called in the forward"}


@torch.no_grad()
def test_a_model_without_blocks_is_calibrated_in_one_dense_pass():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    dense = [module.weight.clone() for module in (model[0], model[2])]
    x = torch.randn(64, 16)
    report = prune_model(model, [{"input": part} for part in x.split(16)])
    hidden = torch.relu(torch.nn.functional.linear(x, dense[0], model[0].bias))
    for module, weight, inputs in zip((model[0], model[2]), dense, (x, hidden), strict=True):
        expected = prune_weight(weight, 2 * inputs.T @ inputs / 64, pattern="2:4").weight
        torch.testing.assert_close(module.weight, expected, rtol=1e-4, atol=1e-5)
    assert [row.name for row in report.layers] == ["0", "2"]


@torch.no_grad()
def test_a_layer_outside_the_blocks_sees_the_pruned_blocks(build, batches):
    model, theirs = build("llama"), build("llama")
    report = prune_model(model, batches, targets=["q_proj", "lm_head"])
    assert report.layers[-1].name == "lm_head"
    slow_prune(theirs, "model.layers", batches, name="q_proj")
    x = inputs_of(theirs, [theirs.lm_head], batches)[0]
    expected = prune_weight(theirs.lm_head.weight, (2 * x.T @ x / len(x)).float(), pattern="2:4")
    assert torch.equal(model.lm_head.weight == 0, expected.pruned)
    assert (model.lm_head.weight - expected.weight).norm() <= 2e-3 * expected.weight.norm()


@torch.no_grad()
def test_a_model_that_is_already_pruned_is_noted(build, batches):
    model = build("llama")
    prune_model(model, batches, method="magnitude")
    again = prune_model(model, batches)
    assert again.totals["already_pruned"] == 21
    assert again.totals["sparsity"] == 0.5
    assert {row.zeros.before for row in again.layers} == {0.5}
    assert again.totals["zeros_before"] == 0.5


@pytest.mark.parametrize("method", ["SM", "magnitude"])
@torch.no_grad()
def test_a_layer_whose_inputs_are_all_zero_stays_dense(method, build, batches, caplog):
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight.zero_()
    dead = model.model.layers[1].mlp.down_proj.weight.clone()
    report = prune_model(model, batches, method=method)
    skipped = {row.name: row.skipped for row in report.layers if row.skipped}
    assert skipped == {"model.layers.1.mlp.down_proj": "its inputs were zero in every token"}
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, dead)
    assert "All inputs of model.layers.1.mlp.down_proj are zero" in caplog.text
    assert report.totals["layers"] == 20


@torch.no_grad()
def test_copies_among_the_inputs_are_reported(build, batches):
    model = build("llama")
    columns = model.config.hidden_size
    model.model.embed_tokens.weight[:, columns - 4 :] = model.model.embed_tokens.weight[:, :4]
    with pytest.warns(NumericalWarning, match=r"layer `model\.layers\.0\..*copies of others"):
        report = prune_model(model, batches, pattern=None, sparsity=0.5)
    fallen = {row.name for row in report.layers if row.fallback_mask == "magnitude"}
    assert any(name.startswith("model.layers.0.") for name in fallen)
    assert {row.method for row in report.layers} == {"SM"}


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class Routed(nn.Module):
    """A block whose experts see the rows that a router picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 3)
        self.experts = nn.ModuleList(Expert() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 16)
        out = rows.clone()
        chosen = self.router(rows).topk(2, dim=1).indices
        for k, expert in enumerate(self.experts):
            picked = (chosen == k).any(1).nonzero()[:, 0].flip(0)
            out[picked] += expert(rows[picked])
        return out.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.positions = nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions.weight[: input_ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return x


@torch.no_grad()
def test_padding_stays_out_behind_routing(batches, caplog):
    def build() -> nn.Module:
        torch.manual_seed(0)
        return MixtureOfExperts()

    ours, theirs = build(), build()
    batches = batches[1:]  # padded on the right
    lone = [
        {"input_ids": ids[mask.bool()][None], "attention_mask": mask[mask.bool()][None]}
        for batch in batches
        for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    report = prune_model(ours, batches, method="SS")
    alone = prune_model(theirs, lone, method="SS")
    assert_same_weights(ours, theirs)
    assert [row.tokens for row in report.layers] == [row.tokens for row in alone.layers]
    assert sum(row.tokens for row in report.pruned if row.name.endswith("up")) == 2 * 2 * 47
    assert "padding" not in caplog.text
    # Routers are left alone unless they are named.
    assert {row.name for row in report.layers if row.skipped} == {
        "blocks.0.router",
        "blocks.1.router",
    }
    report = prune_model(build(), batches, method="SS", targets=["router"])
    assert {row.name for row in report.pruned} == {"blocks.0.router", "blocks.1.router"}
