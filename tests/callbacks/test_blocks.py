"""Whole blocks: the shortened model against the dense model's own code that skips them."""

import copy
import json
from itertools import combinations

import pytest
import torch
from families import build
from quiet import QUIET
from thread_processes import together
from tiny_configs import FAMILIES, VOCABULARY
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from callbacks import MRPCallback
from mrp_lightning import CausalLM, OptionError, TargetError, Trainer
from mrp_lightning.narrowing.blocks import renumbered, shortening_plan
from mrp_lightning.processes import ALONE
from mrp_lightning.pruning import shortening
from mrp_lightning.pruning.job import Job
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.pruning.shortening import shorten_model
from mrp_lightning.records.report import PruningReport
from mrp_lightning.targets.plan import make_plan

SHORTENED = ["llama", "gemma2", "gpt2", "gptj", "opt", "mixtral", "smollm3"]
NOT_REPAIRED = {"gemma2", "mixtral"}  # a norm, and a sum of experts, come after the last layer
REFUSED = {
    "deepseek_v3": "cannot lose blocks: no configuration of it describes the blocks that stay",
    "jamba": "since their kind follows from their number",
    "gemma3n_text": "its configuration cannot say fewer of them",
    "bart": "not those of one list, but of model.model.encoder.layers, model",
}
LIST = {"gpt2": "transformer.h", "gptj": "transformer.h", "opt": "model.decoder.layers"}


def windows(count=16, length=32):
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(3))


def shortened(model, directory, sparsity=0.4, text=None, **options):
    """Prune a model, and give its report."""
    callback = MRPCallback(structure="blocks", sparsity=sparsity, save_dir=directory, **options)
    loader = DataLoader(windows() if text is None else text, batch_size=2)
    Trainer(**QUIET).predict(model, loader, callbacks=[callback])
    return callback.report


def skipped(model, names):
    """Copy a model, and let blocks return their hidden state as the first of what they return."""
    other, packed = copy.deepcopy(model), []
    for name in names:
        block = other.get_submodule(name)
        with block.register_forward_hook(lambda *call: packed.append(isinstance(call[2], tuple))):
            other(windows(1))
        block.forward = lambda x, *_, is_packed=packed[-1], **__: (x, None) if is_packed else x
    return other


@torch.no_grad()
def divergence(dense, other, text):
    p, q = (m(text).logits.double().log_softmax(-1).flatten(0, 1) for m in (dense, other))
    return float(F.kl_div(q, p, reduction="batchmean", log_target=True))


@pytest.mark.parametrize("family", SHORTENED)
def test_it_is_the_dense_code_with_these_blocks_skipped(family, tmp_path):
    model = build(family)
    dense, held_out = copy.deepcopy(model), windows()[12:]
    report = shortened(model, tmp_path / "short", text=windows())
    narrowed, (gone,) = report.narrowed, report.narrowed["removed"]
    by_hand = skipped(dense, [gone])
    assert narrowed["change"] == pytest.approx(divergence(dense, by_hand, held_out), rel=1e-4)
    repair = narrowed["repair"]
    path, _, number = gone.rpartition(".")
    assert path == LIST.get(family, "model.layers")
    places = [n for n in range(3) if n != int(number)]
    if family in NOT_REPAIRED or number == "0":
        assert not repair["layers"]
    for name in repair["layers"]:
        assert name.startswith(f"{path}.{int(number) - 1}.")
        new = name.replace(f".{int(number) - 1}.", f".{places.index(int(number) - 1)}.")
        weight = model.get_submodule(new).weight.detach()
        assert not torch.equal(weight, by_hand.get_submodule(name).weight)
        by_hand.get_submodule(name).weight.data.copy_(weight)
    assert repair["change"] == pytest.approx(divergence(dense, by_hand, held_out), rel=1e-4)
    assert repair["change"] <= narrowed["change"]

    loaded, told = type(model).from_pretrained(tmp_path / "short", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected = by_hand(held_out, use_cache=False).logits
        assert torch.equal(model(held_out, use_cache=False).logits, expected)
        assert torch.equal(loaded.eval()(held_out, use_cache=False).logits, expected)
    exactly = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    cached, plain = (
        loaded.generate(held_out[:1, :8], use_cache=use_cache, **exactly)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, plain)
    config = loaded.config
    assert config.num_hidden_layers == narrowed["kept"] == 2
    for key in ("layer_types", "no_rope_layers"):
        if (values := getattr(dense.config, key, None)) is not None:
            assert getattr(config, key) == [values[n] for n in places]
    saved = PruningReport.load(tmp_path / "short" / "pruning_report.json")
    assert saved.narrowed == narrowed
    assert narrowed["model_weights"] == sum(p.numel() for p in loaded.parameters())
    assert f"2 of 3 blocks, without {gone}" in (tmp_path / "short" / "README.md").read_text()


@pytest.fixture(scope="module")
def deep():
    """A LLaMA of five blocks, two of which hardly do anything, and its windows."""
    from transformers import AutoConfig

    torch.manual_seed(5)
    config = {**FAMILIES["llama"].config, "num_hidden_layers": 5, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **config)).eval()
    for k in (1, 3):
        for name in ("mlp.down_proj", "self_attn.o_proj"):
            model.model.layers[k].get_submodule(name).weight.data *= 0.2
    return model


def test_the_best_run_and_the_greedy_search(deep, tmp_path):
    """Against all pairs of blocks by the model's own forward."""
    held_out = windows()[12:]
    names = [f"model.layers.{k}" for k in range(5)]
    single = {(k,): divergence(deep, skipped(deep, [names[k]]), held_out) for k in range(5)}
    pairs = {
        pair: divergence(deep, skipped(deep, [names[k] for k in pair]), held_out)
        for pair in combinations(range(5), 2)
    }
    runs = {pair: change for pair, change in pairs.items() if pair[1] == pair[0] + 1}
    (first,) = min(single, key=single.get)
    greedy = min(change for pair, change in pairs.items() if first in pair)
    narrowed = shortened(copy.deepcopy(deep), tmp_path / "short").narrowed
    assert narrowed["run_change"] == pytest.approx(min(runs.values()), rel=1e-4)
    assert narrowed["greedy_change"] == pytest.approx(greedy, rel=1e-4)
    best = min(pairs, key=pairs.get)
    assert best == (1, 3)
    assert narrowed["removed"] == ["model.layers.1", "model.layers.3"]
    assert narrowed["change"] == narrowed["greedy_change"] < narrowed["run_change"]


def test_a_greedy_set_that_is_worse_than_the_best_run_is_left(deep, tmp_path, monkeypatch):
    monkeypatch.setattr(shortening, "_greedy", lambda model, limit: ([0, 4], 2 * limit))
    narrowed = shortened(copy.deepcopy(deep), tmp_path / "short").narrowed
    assert narrowed["change"] == narrowed["run_change"]
    one, two = (int(name[-1]) for name in narrowed["removed"])
    assert two == one + 1


def test_the_repair_solves_the_least_squares_problem(deep, tmp_path, monkeypatch):
    """Against a float64 solve on the hidden states of the model's own forwards."""
    monkeypatch.setattr(shortening, "_greedy", lambda *_: ([], float("nan")))
    model, fitted, damping = copy.deepcopy(deep), windows(64)[:48], 0.02
    narrowed = shortened(model, tmp_path / "short", text=windows(64), damping=damping).narrowed
    gap = [int(name[-1]) for name in narrowed["removed"]]
    (name,) = narrowed["repair"]["layers"]
    before = gap[0] - 1
    assert name == f"model.layers.{before}.mlp.down_proj"
    inputs, layer = [], deep.get_submodule(name)
    note = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].double()))
    with note, torch.no_grad():
        # The state at k enters block k, or the norm behind the last block.
        states = []
        for k in (before + 1, gap[-1] + 1):
            block = deep.model.layers[k] if k < 5 else deep.model.norm
            with block.register_forward_pre_hook(lambda _, args: states.append(args[0])):
                deep(fitted)
    x = inputs[0].flatten(0, 1)
    errors = (states[1] - states[0]).double().flatten(0, 1)
    ridge = (damping * x.square().sum(0).mean()) ** 0.5
    left = torch.cat([x, ridge * torch.eye(x.shape[1], dtype=x.dtype)])
    right = torch.cat([errors, torch.zeros(x.shape[1], errors.shape[1], dtype=x.dtype)])
    change = torch.linalg.lstsq(left, right).solution.T
    weight = model.model.layers[before].mlp.down_proj.weight.double()
    torch.testing.assert_close(weight, layer.weight.double() + change, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", REFUSED)
def test_models_whose_blocks_differ_by_number_are_refused(family, tmp_path):
    with pytest.raises(TargetError) as refused:
        shortened(build(family), tmp_path / "short")
    assert REFUSED[family] in str(refused.value)
    assert "`structure: blocks`" in str(refused.value)


def test_all_blocks_of_a_kind_may_go(tmp_path, monkeypatch):
    """With the last full attention of a Gemma 3 go the frequencies of its rotations."""
    model = build("gemma3_text")
    by_hand = skipped(model, ["model.layers.1"])
    only = shortening.Removal((1,), 0.0, 0.0)
    monkeypatch.setattr(shortening, "choose_blocks", lambda _: only)
    shortened(model, tmp_path / "short")
    loaded = type(model).from_pretrained(tmp_path / "short").eval()
    with torch.no_grad():
        expected = by_hand(windows(2), use_cache=False).logits
        assert torch.equal(model(windows(2), use_cache=False).logits, expected)
        assert torch.equal(loaded(windows(2), use_cache=False).logits, expected)


def by_number(block):
    own = block.forward
    return lambda *args, **kwargs: own(*args, **kwargs) * (1 + block.self_attn.layer_idx)


def test_a_block_that_reads_its_number_when_it_runs_is_recognised(tmp_path):
    model = build("llama")
    for block in model.model.layers:
        block.forward = by_number(block)
    with pytest.raises(TargetError, match="computes something else in its blocks when they are"):
        shortened(model, tmp_path / "short")
    assert len(model.model.layers) == model.config.num_hidden_layers == 3
    assert [block.self_attn.layer_idx for block in model.model.layers] == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tuning": True, "target": "dense"}, "Leave out `target`, `tuning`"),
        ({"method": "JM"}, "Leave out `method`"),
        ({"sparsity": None, "pattern": "2:4"}, "Leave out `pattern`"),
        ({"bits": 4}, "Leave out `bits`"),
        ({"block_size": 64, "tolerance": 0.1}, "Leave out `block_size`, `tolerance`"),
    ],
)
def test_what_has_no_meaning_for_blocks_is_refused(options, message):
    with pytest.raises(OptionError, match=message):
        MRPCallback(**{"structure": "blocks", "sparsity": 0.4} | options)


@pytest.mark.parametrize(("sparsity", "which"), [(0.1, "none"), (0.9, "all")])
def test_too_few_and_too_many_blocks(sparsity, which, tmp_path):
    with pytest.raises(OptionError, match=f"remove {which} of 3 blocks. Give at least 0.333"):
        shortened(build("llama"), tmp_path / "short", sparsity)


def test_streamed_blocks_are_refused(tmp_path):
    build("llama").save_pretrained(tmp_path / "dense")
    with pytest.raises(OptionError, match="`streaming` would read each from its file every time"):
        shortened(CausalLM(tmp_path / "dense", streaming=True), tmp_path / "short")


def test_one_window_is_compared_and_nothing_is_fitted(tmp_path):
    report = shortened(build("llama"), tmp_path / "short", text=windows(1))
    assert report.narrowed["repair"] == {"layers": [], "change": report.narrowed["change"]}


def test_an_interrupted_run_keeps_its_choice(deep, tmp_path, monkeypatch):
    whole = copy.deepcopy(deep)
    first = shortened(whole, tmp_path / "whole")

    def fail(*_):
        raise RuntimeError("stopped here")

    with monkeypatch.context() as patched:
        patched.setattr(shortening._Repairer, "repair", fail)
        with pytest.raises(RuntimeError, match="stopped here"):
            shortened(copy.deepcopy(deep), tmp_path / "short")
    monkeypatch.setattr(shortening, "choose_blocks", fail)
    resumed = copy.deepcopy(deep)
    again = shortened(resumed, tmp_path / "short")
    assert again.narrowed == first.narrowed
    for name, x in resumed.state_dict().items():
        assert torch.equal(x, whole.state_dict()[name]), name
    assert not (tmp_path / ".short.partial").exists()


def test_processes_choose_and_fit_the_same(deep):
    """Two processes with two batches each, against one with all of them."""
    text = windows(8).split(2)

    def prune(model, own, processes):
        settings = Settings(method="SM", sparsity=0.4, structure="blocks")
        plan = shortening_plan(model, 0.4, make_plan(model, settings.recipe.pattern))
        forward = model.forward
        job = Job(
            model=model,
            plan=plan,
            settings=settings,
            forward=lambda ids: forward(ids),
            batches=own,
            processes=processes,
        )
        return shorten_model(job)

    models = [copy.deepcopy(deep) for _ in range(3)]
    first, second = together(2, lambda p: prune(models[p.rank], text[p.rank :: 2], p))
    removal, repair = prune(models[2], text, ALONE)
    assert first[0] == second[0]
    assert first[0].blocks == removal.blocks
    assert first[1].weights.keys() == second[1].weights.keys() == repair.weights.keys()
    for name, weight in first[1].weights.items():
        assert torch.equal(weight, second[1].weights[name])


@pytest.mark.parametrize(
    ("name", "now"),
    [
        ("model.layers.10.mlp.down_proj", "model.layers.8.mlp.down_proj"),
        ("model.layers.2", "model.layers.2"),
        ("model.layers.4.mlp.down_proj", None),
        ("model.layers.30", "model.layers.28"),
        ("lm_head", "lm_head"),
    ],
)
def test_names_follow_the_numbers(name, now):
    assert renumbered(name, ["model.layers.3", "model.layers.4"]) == now


def test_a_second_run_goes_on(deep, tmp_path):
    shortened(copy.deepcopy(deep), tmp_path / "short")
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "sparse")
    loader = DataLoader(windows(), batch_size=2)
    Trainer(**QUIET).predict(CausalLM(tmp_path / "short"), loader, callbacks=[callback])
    (earlier,) = callback.report.provenance["pruned_before"]
    assert earlier == {"method": "SM", "structure": "blocks", "sparsity": 0.4}
    config = json.loads((tmp_path / "sparse" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
