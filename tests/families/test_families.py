"""Every family of lab/benchmarks/families.py against its own full forward, on tiny models."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import batches, build, runner
from full_forwards import CheckedRun, prune_and_compare
from models import COLUMNS, row
from tiny_configs import FAMILIES
from torch import Tensor, nn

from mrp_lightning.calibration.walk_choice import choose_walk
from mrp_lightning.calibration.walks import Inject
from mrp_lightning.pruning import sequential
from mrp_lightning.targets.layers import is_conv1d

# They hand something from block to block beside the hidden state: T5 its position bias, Gemma 3n
# and 4 the keys and values that later blocks share, RWKV its state.
RERUN = {"t5", "gemma3n_text", "gemma4_text", "rwkv"}
# Blocks of one model get different masks or rotary tables.
OWN_ARGUMENTS = ["gemma2", "gpt_oss", "modernbert"]
# By what is handed to their blocks: positions, rotary tables, states, experts, encoders.
ONE_OF_EACH_KIND = [
    *("llama", "opt", "bloom", "gpt_oss", "mamba", "rwkv", "gemma3n_text", "bert", "t5"),
]
# Linear layers that may stay dense: routers, and Mamba's dt_proj, whose module is never called.
MAY_STAY_DENSE = re.compile(r".*\.(router|gate|shared_expert_gate|dt_proj)")
TOLERANCE = 1e-5


def linear_layers_of_blocks(run: CheckedRun) -> dict[str, nn.Module]:
    """Found without the plan: by what stands in a block's name."""
    return {
        f"{block.name}.{name}": module
        for block in run.plan.blocks
        for name, module in block.module.named_modules()
        if isinstance(module, nn.Linear) or is_conv1d(module)
    }


def is_2_of_4(module: nn.Module) -> bool:
    weight = module.weight.T if is_conv1d(module) else module.weight
    return bool(((weight.unflatten(1, (-1, 4)) == 0).sum(2) == 2).all())


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_run_as_in_full_forwards_of_the_model_pruned_so_far(family):
    run = prune_and_compare(family)
    assert list(run.errors) == [block.name for block in run.plan.blocks]
    assert run.error <= TOLERANCE
    assert run.listener.walk == ("rerun" if family in RERUN else "inject")

    rows = {row.name: row for row in run.rows}
    for name, module in linear_layers_of_blocks(run).items():
        if rows[name].skipped is None:
            assert is_2_of_4(module), name
            assert rows[name].sparsity == 0.5
        else:
            assert MAY_STAY_DENSE.fullmatch(name), name

    # What is left is an ordinary model.
    for module in run.model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    with torch.no_grad():
        for batch in batches(family):
            assert run.model(**batch).logits.isfinite().all()


@pytest.mark.parametrize("family", ONE_OF_EACH_KIND)
def test_without_padding_and_without_a_cache(family):
    use_cache = False if FAMILIES[family].auto == "AutoModelForCausalLM" else None
    run = prune_and_compare(family, padding=False, use_cache=use_cache)
    assert run.error <= TOLERANCE
    tokens = {row.tokens for row in run.rows if row.skipped is None}
    # 12, 9 and 16 in two sequences each; experts see those that are routed to them.
    assert 2 * (12 + 9 + 16) in tokens


@pytest.mark.parametrize("family", ["llama", "jamba", "gemma3n_text"])
def test_with_a_cache(family):
    assert prune_and_compare(family, use_cache=True).error <= TOLERANCE


@pytest.mark.parametrize("family", ["opt_350m", "gemma3_text", "jamba", "bart"])
def test_stored_inputs_give_the_bits_of_full_reruns(family, monkeypatch):
    ours = prune_and_compare(family).model
    monkeypatch.setattr(sequential, "choose_walk", rerun)
    theirs = prune_and_compare(family)
    assert theirs.listener.walk == "rerun"
    for (name, a), b in zip(ours.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def rerun(forward: Any, given: Any, blocks: Any, **_: Any) -> Any:
    from mrp_lightning.calibration.walks import Rerun

    return Rerun(forward, given, blocks)


class FirstBlocksArguments(Inject):
    """The classic mistake: every block gets the arguments of block 0 beside its hidden state."""

    def output(self, k: int, i: int) -> Any:
        first: dict[str, Any] = {}

        def note(_: nn.Module, args: Any, kwargs: Any) -> None:
            first.update(args=args, kwargs=kwargs)

        def mistake(_: nn.Module, args: Any, kwargs: Any) -> Any:
            own = {name: kwargs[name] for name in ("hidden_states",) if name in kwargs}
            return (*args[:1], *first["args"][1:]), {**first["kwargs"], **own}

        handles = [self.blocks[0].module.register_forward_pre_hook(note, with_kwargs=True)]
        if k:
            pre = self.blocks[k].module.register_forward_pre_hook(mistake, with_kwargs=True)
            handles.append(pre)
        try:
            return super().output(k, i)
        finally:
            for handle in handles:
                handle.remove()


def make_the_mistake(*args: Any, **kwargs: Any) -> Inject:
    walk = choose_walk(*args, **kwargs)
    assert isinstance(walk, Inject)
    return FirstBlocksArguments(
        walk.forward, walk.batches, walk.blocks, walk.containers, walk.store
    )


@pytest.mark.parametrize(
    ("family", "is_wrong"), [*((f, True) for f in OWN_ARGUMENTS), ("llama", False), ("bert", False)]
)
def test_the_first_blocks_arguments_for_all_would_be_found_out(family, is_wrong, monkeypatch):
    monkeypatch.setattr(sequential, "choose_walk", make_the_mistake)
    error = prune_and_compare(family, padding=False).error
    assert error > 0.02 if is_wrong else error <= TOLERANCE


def test_the_first_blocks_arguments_break_hybrids_with_padding(monkeypatch):
    # Attention is handed the 2-D mask of the recurrent blocks.
    monkeypatch.setattr(sequential, "choose_walk", make_the_mistake)
    with pytest.raises(RuntimeError):
        prune_and_compare("jamba")


@torch.no_grad()
def test_the_tiny_models_are_built_alike_every_time():
    first, second = build("gpt_oss"), build("gpt_oss")
    batch = batches("gpt_oss")[0]
    logits: list[Tensor] = [runner(model)(batch).logits for model in (first, second)]
    assert torch.equal(*logits)


PAGE = (Path(__file__).parents[2] / "lab" / "results" / "models.md").read_text()
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("|")
]


def test_the_page_has_all_families():
    assert TABLE[0] == COLUMNS
    assert [line[0] for line in TABLE[2:]] == list(FAMILIES)


@pytest.mark.parametrize("family", ["gemma3_text", "t5"])
def test_a_row_is_what_a_run_gives(family):
    (shown,) = [line for line in TABLE if line[0] == family]
    *pruned, error = row(family)
    assert shown[:-1] == pruned
    # The last bits are those of the machine.
    assert float(error) <= 1e-5
    assert float(shown[-1]) <= 1e-5
