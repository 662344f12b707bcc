"""Whole experts: the narrower model, and which experts go, against routers written out here."""

import json
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import transformers
from families import batches, build
from quiet import QUIET
from slow_pruning import report_of, stopped_at
from thread_processes import together
from tiny_configs import FAMILIES
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import mrp_lightning
from callbacks import MRPCallback
from mrp_lightning import CausalLM, MethodError, OptionError, TargetError, Trainer
from mrp_lightning.narrowing.cutting import narrow
from mrp_lightning.narrowing.unit_parts import narrowing_plan
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.sequential import prune_model
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.pruning.units import ExpertRemover
from mrp_lightning.targets.plan import make_plan


def wider(monkeypatch, family, experts):
    """A tiny model with more experts than the families have."""
    config = FAMILIES[family].config
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    more = {name: experts for name in names if name in config}
    monkeypatch.setitem(FAMILIES, family, replace(FAMILIES[family], config={**config, **more}))
    return build(family)


def without_experts(model, inputs, directory=None, *, sparsity=0.25, **options):
    callback = MRPCallback(structure="experts", sparsity=sparsity, save_dir=directory, **options)
    loader = DataLoader([dict(x) for x in inputs], batch_size=None)
    Trainer(**QUIET).predict(model, loader, callbacks=[callback])
    return callback


def blocks_of(model):
    return (model.model if hasattr(model, "model") else model).layers


def experts_of(block):
    return block.mlp if hasattr(block, "mlp") else block.block_sparse_moe


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3", "qwen3_next"])
def test_the_saved_model_is_ordinary_and_gives_the_same(family, tmp_path):
    """It has what was in the dense one: the kept experts, and the rows of the router for them."""
    model, inputs = build(family), batches(family)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    callback = without_experts(model, inputs, tmp_path / "narrower")
    loaded, told = AutoModelForCausalLM.from_pretrained(
        tmp_path / "narrower", output_loading_info=True
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        for x in inputs:
            theirs, mine = loaded.eval()(**x).logits, model(**x).logits
            torch.testing.assert_close(theirs, mine, rtol=1e-6, atol=1e-6)
    narrowed, after = callback.report.narrowed, loaded.state_dict()
    assert (narrowed["units"], narrowed["kept"]) == (4, 3)
    assert narrowed["model_weights"] == sum(p.numel() for p in loaded.parameters())
    for name, value in narrowed["config"].items():
        assert getattr(loaded.config, name) == value == 3
    kept: dict[str, list[tuple[int, ...]]] = {}
    for name, old in before.items():
        new = after[name]
        if new.shape == old.shape:
            assert torch.equal(new, old)
            continue
        sets = [s for s in combinations(range(4), 3) if torch.equal(old[list(s)], new)]
        if bool((old != 0).any()):  # DeepSeek's correction is zero in all
            kept.setdefault(name.split(".mlp.")[0], []).extend(sets)
    assert len(kept) == narrowed["blocks"] == len(callback.report.pruned)
    for sets in kept.values():
        assert len(sets) >= 2
        assert len(set(sets)) == 1


def mixtral(logits, top_k):
    weights, chosen = logits.softmax(-1).topk(top_k)
    return weights / weights.sum(-1, keepdim=True), chosen


def olmoe(logits, top_k):
    return logits.softmax(-1).topk(top_k)


def gpt_oss(logits, top_k):
    weights, chosen = logits.topk(top_k)
    return weights.softmax(-1), chosen


ROUTERS = {"mixtral": mixtral, "olmoe": olmoe, "gpt_oss": gpt_oss}


def textbook(family, module, x, kept):
    """What the experts give, token by token, in float64, with a router of the kept ones alone."""
    router = module.router if family == "gpt_oss" else module.gate
    experts, out = module.experts, torch.zeros_like(x)
    kept = list(kept)
    logits = x @ router.weight.double()[kept].T
    if family == "gpt_oss":
        logits = logits + router.bias.double()[kept]
    weights, chosen = ROUTERS[family](logits, router.top_k)
    for t, token in enumerate(x):
        for weight, place in zip(weights[t], chosen[t], strict=True):
            e = kept[int(place)]
            up, down = (p.double()[e] for p in (experts.gate_up_proj, experts.down_proj))
            if family == "gpt_oss":
                inner = token @ up + experts.gate_up_proj_bias.double()[e]
                gate, linear = inner[::2].clamp(max=7), inner[1::2].clamp(-7, 7)
                inner = (linear + 1) * gate * torch.sigmoid(1.702 * gate)
                given = inner @ down + experts.down_proj_bias.double()[e]
            else:
                gate, linear = (up @ token).chunk(2)
                given = down @ (torch.nn.functional.silu(gate) * linear)
            out[t] += weight * given
    return out


def inputs_of(module, model, inputs):
    """The tokens that a module is given, without padding."""
    seen = []
    hook = module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for x in inputs:
            model(**x)
    hook.remove()
    rows = [y[x["attention_mask"] != 0] for x, y in zip(inputs, seen, strict=True)]
    return torch.cat(rows).double()


@pytest.mark.parametrize("family", ROUTERS)
def test_they_are_those_without_which_the_block_changes_least(family, monkeypatch):
    """In the first block, and in the second on what the narrower first one gives."""
    model, inputs = wider(monkeypatch, family, 5), batches(family)
    dense = wider(monkeypatch, family, 5)
    callback = without_experts(model, inputs, sparsity=0.4)
    for k in (0, 1):
        module = experts_of(blocks_of(dense)[k])
        # The blocks before it are the narrower ones, and its own attention is dense.
        x = inputs_of(experts_of(blocks_of(model)[k]), model, inputs)
        with torch.no_grad():
            every = textbook(family, module, x, range(5))
            losses = {}
            for kept in combinations(range(5), 3):
                lost = textbook(family, module, x, kept) - every
                losses[kept] = float(lost.square().sum(1).mean())
        row = callback.report.pruned[k]
        stack = experts_of(blocks_of(model)[k]).experts.down_proj
        kept = next(s for s in losses if torch.equal(module.experts.down_proj[list(s)], stack))
        assert row.loss == pytest.approx(losses[kept], rel=1e-3)
        assert row.relative_loss == pytest.approx(
            losses[kept] / float(every.square().sum(1).mean()), rel=1e-3
        )
        assert row.tokens == len(x)
        better = [other for other, loss in losses.items() if loss < losses[kept] * (1 - 1e-4)]
        assert not [other for other in better if len({*other} & {*kept}) == 2]
        if len(better) == 0:
            assert losses[kept] == min(losses.values())


@pytest.mark.parametrize(
    ("family", "options", "error", "message"),
    [
        ("mixtral", {"sparsity": 0.75}, OptionError, "leave 1, fewer than the 2.* at most 0.5"),
        ("mixtral", {"sparsity": 0.1}, OptionError, "remove none. Give at least 0.25"),
        ("llama", {}, TargetError, "it has no experts that transformers stacks"),
        ("llama4_text", {}, TargetError, "it has no experts that transformers stacks"),
        ("jamba", {"sparsity": 0.5}, TargetError, "it changes which weights there are"),
        ("mixtral", {"method": "wanda"}, MethodError, "no other method than SM; got wanda"),
        ("mixtral", {"damping": 0.1}, OptionError, "`damping` is added to Hessians, and .* none"),
    ],
)
def test_what_cannot_be_is_refused(family, options, error, message, tmp_path):
    model = build(family)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(error, match=message):
        without_experts(model, batches(family), tmp_path / "narrower", **options)
    assert not (tmp_path / "narrower").exists()
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def test_a_model_whose_experts_are_all_needed(monkeypatch):
    model = wider(monkeypatch, "mixtral", 2)
    with pytest.raises(OptionError, match="each token is sent to 2 of them"):
        without_experts(model, batches("mixtral"), sparsity=0.5)


def test_a_router_that_needs_equal_groups_of_experts(monkeypatch):
    config = {**FAMILIES["deepseek_v3"].config, "n_group": 2, "topk_group": 2}
    monkeypatch.setitem(FAMILIES, "deepseek_v3", replace(FAMILIES["deepseek_v3"], config=config))
    with pytest.raises(TargetError, match="without some of its experts does not run"):
        without_experts(build("deepseek_v3"), batches("deepseek_v3"), sparsity=0.5)


def test_experts_that_are_zero_are_refused():
    """A removed expert is told by its zeros while the blocks are walked."""
    model = build("mixtral")
    with torch.no_grad():
        experts_of(blocks_of(model)[0]).experts.down_proj[2] = 0
    with pytest.raises(TargetError, match="are zero already"):
        without_experts(model, batches("mixtral"))


def test_it_aims_at_the_dense_model_is_tuned_and_goes_on(tmp_path):
    """An interrupted run ends with the bits of one that was not."""
    tuning = mrp_lightning.BlockTuning(epochs=1, learning_rate=1e-3, batch_size=2)
    options = {"target": "dense", "tuning": tuning, "sparsity": 0.5}
    windows = torch.randint(3, 64, (16, 16), generator=torch.Generator().manual_seed(1))
    inputs = [{"input_ids": x} for x in windows.split(4)]
    model, dense = build("mixtral"), build("mixtral")
    whole = without_experts(model, inputs, tmp_path / "whole", **options)
    assert any(block.epoch for block in whole.report.blocks)
    assert all(row.target is not None for row in whole.report.pruned)
    assert whole.report.pruned[0].target.loss == pytest.approx(whole.report.pruned[0].loss)
    assert whole.report.pruned[1].target.loss != pytest.approx(whole.report.pruned[1].loss)
    for block, old in zip(blocks_of(model), blocks_of(dense), strict=True):
        rows = {tuple(row.tolist()) for row in experts_of(old).gate.weight}
        assert all(tuple(row.tolist()) in rows for row in experts_of(block).gate.weight)
        every = experts_of(old).experts.down_proj
        assert not any(
            torch.equal(e, o) for e in experts_of(block).experts.down_proj for o in every
        )

    with stopped_at(2, ExpertRemover):
        without_experts(build("mixtral"), inputs, tmp_path / "narrower", **options)
    resumed = build("mixtral")
    again = without_experts(resumed, inputs, tmp_path / "narrower", **options)
    assert again.report.resumed_blocks == 2
    for name, x in resumed.state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name


def test_experts_then_zeros(tmp_path):
    """What is left is pruned like any other model."""
    inputs = batches("mixtral")
    without_experts(build("mixtral"), inputs, tmp_path / "first")
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "second")
    loader = DataLoader(inputs, batch_size=None)
    Trainer(**QUIET).predict(CausalLM(tmp_path / "first"), loader, callbacks=[callback])
    config = json.loads((tmp_path / "second" / "config.json").read_text())
    assert config["num_local_experts"] == 3
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "second")
    stack = experts_of(blocks_of(loaded)[0]).experts.down_proj
    assert stack.shape[0] == 3
    assert float((stack == 0).float().mean()) == 0.5


def test_processes_remove_the_same(monkeypatch):
    """Three processes, one of them without a batch, against one with all of them."""
    inputs = batches("mixtral")[:2]

    def prune(model, mine, processes):
        settings = Settings(method="SM", sparsity=0.4, structure="experts", target="dense")
        plan = make_plan(model, settings.recipe.pattern)
        plan = narrowing_plan(model, "experts", 0.4, plan)
        job = Job(
            model=model,
            plan=plan,
            settings=settings,
            forward=lambda batch: model(**batch),
            batches=mine,
            batch_of=lambda batch: batch,
            processes=processes,
        )
        prune_model(job)
        narrow(plan.structure, model.config)
        return model.state_dict(), report_of(job)

    models = [wider(monkeypatch, "mixtral", 5) for _ in range(4)]
    found = together(3, lambda p: prune(models[p.rank], inputs[p.rank :: 3], p))
    one, report = prune(models[3], inputs, mrp_lightning.processes.ALONE)
    for state, theirs in found:
        for row, alone in zip(theirs.layers, report.layers, strict=True):
            assert row.loss == pytest.approx(alone.loss, rel=1e-4)
            assert row.tokens == alone.tokens
        for name, x in state.items():
            assert torch.equal(x, one[name]), name


def test_a_batch_that_does_not_reach_the_block_is_left_out():
    found = []
    inputs = batches("mixtral")[:2]
    for given in (inputs, [inputs[0], None, inputs[1]]):
        model = build("mixtral")
        settings = Settings(method="SM", sparsity=0.5, structure="experts")
        plan = make_plan(model, settings.recipe.pattern)
        job = Job(
            model=model,
            plan=narrowing_plan(model, "experts", 0.5, plan),
            settings=settings,
            forward=lambda batch, model=model: None if batch is None else model(**batch),
            batches=given,
        )
        prune_model(job)
        found.append((model.state_dict(), [row.tokens for row in report_of(job).layers]))
    (state, tokens), (other, same) = found
    assert tokens == same
    for name, x in state.items():
        assert torch.equal(x, other[name]), name
