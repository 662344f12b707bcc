"""Pruning towards the dense model's outputs, against a slow rewrite that keeps two whole models."""

import pytest
import torch
from slow_pruning import BLOCKS, TOLERANCE, assert_same_weights, inputs_of, prune_model, slow_prune
from torch import Tensor, nn

DENSE = {"target": "dense"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
@torch.no_grad()
def test_gives_the_weights_of_a_slow_rewrite(family, build, batches):
    ours, theirs, dense = build(family), build(family), build(family)
    report = prune_model(ours, batches, tolerance=TOLERANCE, beyond=DENSE)
    slow_prune(theirs, BLOCKS[family], batches, dense)
    assert_same_weights(ours, theirs)
    assert report.config["walk"] == "inject"
    assert all(row.target.own is None for row in report.layers)


@torch.no_grad()
def test_full_reruns_give_the_same_weights(build, batches, monkeypatch):
    from mrp_lightning.calibration.walks import Rerun
    from mrp_lightning.pruning import sequential

    ours, theirs = build("llama"), build("llama")
    prune_model(ours, batches, beyond=DENSE)
    monkeypatch.setattr(
        sequential,
        "choose_walk",
        lambda forward, given, blocks, store, processes: Rerun(forward, given, blocks, store),
    )
    report = prune_model(theirs, batches, beyond=DENSE)
    assert report.config["walk"] == "rerun"
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


@torch.no_grad()
def test_offload_gives_the_same_bits_and_leaves_no_hook(build, batches):
    ours, theirs = build("t5"), build("t5")
    for batch in batches:
        batch["decoder_input_ids"] = batch["input_ids"][:, :7]
    prune_model(ours, batches, beyond=DENSE)
    prune_model(theirs, batches, beyond=DENSE, offload=True)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in theirs.modules())


@torch.no_grad()
def test_the_first_block_is_pruned_as_without(build, batches):
    ours, theirs = build("llama"), build("llama")
    report = prune_model(ours, batches, beyond=DENSE)
    plain = prune_model(theirs, batches)
    first, second = ("model.layers.0.", "model.layers.1.mlp.")
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if name.startswith(first):
            assert torch.equal(a, b)
        if name.startswith(second):
            assert not torch.equal(a, b)
    rows = {row.name: row for row in report.layers}
    for row in plain.layers:
        assert row.target is None
        if ".0." in row.name:
            assert rows[row.name].loss == rows[row.name].target.loss == row.loss


@pytest.mark.parametrize("method", ["JM", "SS"])
@torch.no_grad()
def test_a_pruned_model_keeps_its_zeros(method, build, batches):
    model = build("llama")
    prune_model(model, batches, method="magnitude", pattern=None, sparsity=0.5)
    before = {name: each.clone() for name, each in model.named_parameters()}
    half = {"method": method, "pattern": None, "sparsity": 0.5}
    report = prune_model(model, batches, beyond=DENSE | {"bits": 4, "group_size": 8}, **half)
    assert report.totals["removed"] == report.totals["weights"] // 2
    for row in report.layers:
        after, weight = model.get_submodule(row.name).weight, before[f"{row.name}.weight"]
        assert not after[weight == 0].any()
        assert not torch.equal(after, weight)
    # Tokens of later blocks differ from the dense model's: the target is not the weight.
    assert any(row.target.loss != row.loss for row in report.layers)


@torch.no_grad()
def test_the_reported_losses_are_against_the_dense_weight(build, batches):
    model, dense = build("llama"), build("llama")
    report = prune_model(model, batches, beyond=DENSE)
    row = next(row for row in report.layers if row.name == "model.layers.1.self_attn.q_proj")
    after, before = (m.model.layers[1].self_attn.q_proj for m in (model, dense))
    x = inputs_of(model, [after], batches)[0]
    change = after.weight.double() - before.weight.double()
    loss = (x @ change.T).square().sum(1).mean()
    assert row.loss == pytest.approx(float(loss), rel=1e-3)
    energy = (x @ before.weight.double().T).square().sum(1).mean()
    assert row.relative_loss == pytest.approx(float(loss / energy), rel=1e-3)
    assert row.target.loss < row.loss


class Routed(nn.Module):
    """A block with a layer on all tokens, and one on those that a router picks."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.all = nn.Linear(16, 2), nn.Linear(16, 16)
        self.some = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.all(x).relu()
        rows = x.reshape(-1, 16)
        picked = (self.router(rows).argmax(1) == 0).nonzero()[:, 0]
        out = rows.clone()
        out[picked] += self.some(rows[picked]).relu()
        return out.view_as(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 16)
        self.blocks = nn.ModuleList(Routed() for _ in range(2))
        self.head = nn.Linear(16, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@torch.no_grad()
def test_layers_whose_tokens_do_not_pair_keep_their_own_target_and_say_so(batches):
    model = Model()
    report = prune_model(model, batches, targets=["all", "some", "head"], beyond=DENSE)
    rows = {row.name: row for row in report.pruned}
    for k in (0, 1):
        assert rows[f"blocks.{k}.all"].target.own is None
        assert rows[f"blocks.{k}.all"].target.loss is not None
        assert "do not pair" in rows[f"blocks.{k}.some"].target.own
        assert rows[f"blocks.{k}.some"].target.loss is None
    assert rows["head"].target.own == "it is outside the blocks"
    assert rows["head"].to_dict()["target"]["own"] == "it is outside the blocks"


FAMILIES = ["bart", "bloom", "falcon_h1", "gpt_oss", "mamba", "rwkv", "t5"]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_dense_stream_is_what_the_dense_model_computes(family, monkeypatch):
    """Each dense run of a block gives what it gives in a full forward of a dense twin."""
    import families

    from mrp_lightning.calibration.walks import DenseStream, hidden_of

    model, twin = families.build(family), families.build(family)
    batches = families.batches(family)
    run, run_twin = families.runner(model), families.runner(twin)
    names = {module: name for name, module in model.named_modules()}
    worst, seen = [], DenseStream.output

    def compare(stream, k, i):
        output = seen(stream, k, i)
        if output is not None:
            found = []
            block = twin.get_submodule(names[stream._walk.blocks[k].module])
            handle = block.register_forward_hook(
                lambda _, __, out: found.append(hidden_of(out).clone())
            )
            run_twin(batches[i])
            handle.remove()
            worst.append(float((hidden_of(output) - found[0]).norm() / found[0].norm()))
        return output

    monkeypatch.setattr(DenseStream, "output", compare)
    report = prune_model(model, batches, forward=run, beyond=DENSE)
    assert max(worst) <= 1e-5
    assert len(report.pruned) > 0
    if family == "gpt_oss":
        experts = [row for row in report.pruned if ".experts." in row.name]
        assert experts
        assert all("do not pair" in row.target.own for row in experts)
