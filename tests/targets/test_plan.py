"""Which blocks and layers are chosen."""

import logging

import pytest
import torch
from torch import nn

from mrp_lightning.errors import PatternError, TargetError
from mrp_lightning.solver.grid import GRIDS
from mrp_lightning.solver.patterns import make_pattern
from mrp_lightning.targets import blocks
from mrp_lightning.targets.blocks import alike, find_blocks, matches, refuse_not_finite
from mrp_lightning.targets.layers import Conv1D
from mrp_lightning.targets.plan import Plan, make_plan

HALF = make_pattern(0.5, None)


def names(plan: Plan) -> list[str]:
    layers = [layer for block in plan.blocks for layer in plan.layers[block.name]]
    return [layer.name for layer in (*layers, *plan.outside)]


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("q_proj", True),
        ("attn.q_proj", True),
        ("layers.1", True),
        ("model.layers", True),
        ("layers.*.q_proj", True),
        ("*_proj", True),
        ("proj", False),
        ("layers.11", False),
        ("layer", False),
        ("q_proj.attn", False),
    ],
)
def test_a_pattern_is_a_run_of_whole_parts(pattern, matched):
    assert matches("model.layers.1.attn.q_proj", pattern) is matched


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        (r"re:.*q_proj$", True),
        (r"re:model\.layers\.\d\.", True),
        (r"re:.*\.(q|k)_proj", True),
        (r"re:q_proj", False),  # from the start, as llm-compressor matches
        (r"re:.*attn$", False),  # the module that holds it is another name
        (r"re:(?!model\.layers\.1).*q_proj", False),
    ],
)
def test_a_regular_expression_is_for_the_name_in_the_checkpoint(pattern, matched):
    assert matches("model.layers.1.attn.q_proj", pattern) is matched
    assert matches("net.model.layers.1.attn.q_proj", pattern, "net.") is matched


@pytest.mark.parametrize(
    ("family", "lists"),
    [
        ("llama", {"model.layers": 3}),
        ("opt", {"model.decoder.layers": 3}),
        ("bloom", {"transformer.h": 3}),
        ("gpt2", {"transformer.h": 3}),
        ("mamba", {"backbone.layers": 2}),
        ("bart", {"model.encoder.layers": 2, "model.decoder.layers": 2}),
        ("t5", {"encoder.block": 2, "decoder.block": 2}),  # each holds a ModuleList of its own
    ],
)
def test_blocks_are_the_outermost_lists(family, lists, build):
    blocks = find_blocks(build(family))
    chains = [block.chain for block in blocks]
    assert {chain: chains.count(chain) for chain in dict.fromkeys(chains)} == lists
    assert blocks[1].name == f"{blocks[0].chain}.1"


def test_lists_of_bare_layers_are_no_blocks():
    mlp = nn.Module()
    mlp.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    assert find_blocks(mlp) == []
    assert names(make_plan(mlp, HALF)) == ["layers.0", "layers.1", "layers.2"]


def test_blocks_by_name(build):
    model = build("bart")
    assert {b.chain for b in find_blocks(model, ["decoder.layers"])} == {"model.decoder.layers"}
    assert [b.name for b in find_blocks(model, ["encoder.layers.1"])] == ["model.encoder.layers.1"]
    sequential = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2)))
    model = nn.ModuleDict({"trunk": sequential, "head": nn.Linear(4, 4)})
    assert names(make_plan(model, HALF, blocks="trunk")) == ["trunk.0.0", "trunk.1.0"]


def test_compiled_blocks_keep_their_names(build):
    model = build("llama")
    model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    whole = torch.compile(model, backend="eager")
    plan = make_plan(whole, HALF)
    assert names(plan) == names(make_plan(build("llama"), HALF))
    assert plan.blocks[1].module is model.model.layers[1]._orig_mod


def test_layers_outside_the_blocks_need_a_name_of_their_own(build):
    model = build("llama")
    assert not any("lm_head" in name for name in names(make_plan(model, HALF)))
    assert not any("lm_head" in name for name in names(make_plan(model, HALF, targets="*")))
    chosen = names(make_plan(model, HALF, targets=["lm_head", "k_proj"]))
    assert chosen == [*(f"model.layers.{k}.self_attn.k_proj" for k in range(3)), "lm_head"]


def test_targets_and_ignore(build):
    chosen = names(make_plan(build("llama"), HALF, targets=["mlp"], ignore=["layers.1", "up_proj"]))
    assert chosen == [
        f"model.layers.{k}.mlp.{name}" for k in (0, 2) for name in ("gate_proj", "down_proj")
    ]


def test_regular_expressions_among_plain_names(build):
    chosen = names(
        make_plan(build("llama"), HALF, targets=["re:.*[qk]_proj$", "up_proj"], ignore="re:.*1.*k_")
    )
    assert chosen == [
        f"model.layers.{k}.{name}"
        for k in range(3)
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
        if (k, name) != (1, "self_attn.k_proj")
    ]
    with pytest.raises(TargetError, match=r"`ignore` matched nothing.*'re:q_proj'"):
        make_plan(build("llama"), HALF, ignore=["re:q_proj"])


@pytest.mark.parametrize("argument", ["targets", "ignore", "blocks"])
def test_what_is_no_regular_expression(argument, build):
    wrong = {argument: ["re:*.q_proj", "q_proj", "re:(k_proj"]}
    message = rf"`{argument}`.*'re:\*\.q_proj' \(nothing to repeat.*'re:\(k_proj' \(missing \)"
    with pytest.raises(TargetError, match=message):
        make_plan(build("llama"), HALF, **wrong)


def test_a_head_tied_to_the_embedding_is_left_alone(build):
    with pytest.raises(TargetError, match=r"(?s)lm_head: its weight is tied to .*embed_tokens"):
        make_plan(build("opt"), HALF, targets=["lm_head"])


def test_a_weight_with_two_layers_is_pruned_with_the_first(build):
    model = build("llama")
    model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    plan = make_plan(model, HALF, targets="up_proj")
    assert names(plan) == [f"model.layers.{k}.mlp.up_proj" for k in (0, 1)]
    assert "layers.0.mlp.up_proj, with which it is pruned or stays dense" in plan.skipped[0].reason


def test_a_model_without_layers_says_so():
    with pytest.raises(TargetError, match=r"no nn\.Linear"):
        make_plan(nn.Sequential(nn.Embedding(4, 4)), HALF)


def test_conv1d_is_seen_transposed_and_written_in_place(build):
    module = build("gpt2").transformer.h[0].mlp.c_fc
    layer, parameter = Conv1D("c_fc", module), module.weight
    assert layer.weight.shape == (128, 32) == module.weight.T.shape
    new = torch.randn(128, 32)
    layer.write_(new)
    assert module.weight is parameter
    assert torch.equal(module.weight, new.T)
    assert module.weight.requires_grad


def test_attention_of_torch_is_reported(caplog):
    caplog.set_level(logging.INFO)
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    )
    plan = make_plan(model, HALF)
    skipped = [s.name for s in plan.skipped]
    assert skipped == [f"layers.{k}.self_attn.in_proj_weight" for k in (0, 1)]
    assert "inside torch's attention, which shows no input" in plan.skipped[0].reason


def test_a_layer_without_weights_stays_as_it_is():
    plan = make_plan(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 0), nn.Linear(0, 4)), HALF)
    assert names(plan) == ["0"]
    assert {s.name: s.reason for s in plan.skipped} == dict.fromkeys("12", "it has no weights")


def test_weights_that_are_not_finite_are_all_named(build):
    model = build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 1] = torch.nan
        model.model.layers[2].self_attn.q_proj.weight[:2, 3] = torch.inf
    message = r"layers\.0\.mlp\.up_proj: 1\n  model\.layers\.2\.self_attn\.q_proj: 2$"
    with pytest.raises(TargetError, match=rf"(?s)^NaN or Inf in 2 layers to prune.*{message}"):
        make_plan(model, HALF)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan  # in no layer to prune
        model.model.embed_tokens.weight[0, :3] = -torch.inf
    beside = r"  model\.embed_tokens\.weight: 3\n  model\.norm\.weight: 1$"
    with pytest.raises(
        TargetError, match=rf"(?s)^NaN or Inf in 2 layers to prune and 2 parameters.*{beside}"
    ):
        make_plan(model, HALF)
    ignored = r"  model\.layers\.0\.mlp\.up_proj\.weight: 1\n"  # as wrong in what is left dense
    with pytest.raises(
        TargetError, match=rf"(?s)^NaN or Inf in 1 layer to prune and 3 parameters.*{ignored}"
    ):
        make_plan(model, HALF, ignore=["up_proj"])
    assert make_plan(model.to("meta"), HALF, allow_meta=True).num_layers == 21


def test_a_packed_layer_says_the_next_step(build):
    model = build("llama")
    packed = nn.Module()
    packed.register_buffer("weight_meta", torch.zeros(4, 4, dtype=torch.uint8))
    model.model.layers[1].mlp.up_proj = packed
    message = r"layers\.1\.mlp\.up_proj: it is a packed Module; call `model\.dequantize\(\)` first"
    with pytest.raises(TargetError, match=message):
        make_plan(model, HALF)


def test_recurrent_weights_are_listed():
    model = nn.ModuleDict({"tokens": nn.Embedding(9, 8), "rnn": nn.LSTM(8, 16, 2)})
    model["head"] = nn.Linear(16, 9)
    skipped = {s.name: s for s in make_plan(model, HALF).skipped}
    matrices = {f"rnn.{name}": p for name, p in model["rnn"].named_parameters() if p.ndim == 2}
    assert {name: s.shape for name, s in skipped.items()} == {
        name: tuple(p.shape) for name, p in matrices.items()
    }
    assert len(skipped) == 4
    assert {s.reason for s in skipped.values()} == {"LSTM is not a linear layer"}
    with pytest.raises(TargetError, match=r"all were left out:\n  rnn.weight_ih_l0: GRU is not"):
        make_plan(nn.ModuleDict({"rnn": nn.GRU(8, 16)}), HALF)


def test_matrices_of_a_block_that_no_layer_holds_are_listed():
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(8, 8)
            self.cell = nn.GRUCell(8, 8)
            self.positions = nn.Embedding(4, 8)
            self.norm = nn.LayerNorm((4, 8))
            self.mixing = nn.Parameter(torch.randn(8, 8))
            self.decay = nn.Parameter(torch.randn(1, 1, 8))
            self.bias_table = nn.Parameter(torch.randn(4, 8))

    model = nn.Module()
    model.blocks = nn.ModuleList(Part() for _ in range(2))
    model.outside = nn.Parameter(torch.randn(8, 8))
    model.rnn = nn.GRU(8, 8)
    inside = ("mixing", "cell.weight_ih", "cell.weight_hh")
    plan = make_plan(model, HALF)
    assert [s.name for s in plan.skipped] == [
        *(f"blocks.{k}.{n}" for k in (0, 1) for n in inside),
        "rnn.weight_ih_l0",
        "rnn.weight_hh_l0",
    ]
    plan = make_plan(model, HALF, ignore=["cell", "blocks.1", "rnn"])
    assert [s.name for s in plan.skipped] == ["blocks.0.mixing"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"targets": ["layers.0.self_attn.q_porj"]}, "model.layers.0.self_attn.q_proj"),
        ({"pattern": make_pattern(None, "2:5")}, "model.layers.*.self_attn.q_proj ("),
        ({"meta": True}, "model.layers.0.mlp.up_proj: its weight is on the meta device"),
    ],
)
def test_errors_call_layers_what_the_plan_calls_them(options, said, build):
    model = nn.ModuleDict({"model": build("llama")})
    plan = make_plan(model, HALF, prefix="model.")
    assert names(plan)[0] == "model.layers.0.self_attn.q_proj"
    if options.pop("meta", False):
        model["model"].model.layers[0].mlp.up_proj.to("meta")
    with pytest.raises((TargetError, PatternError)) as refused:
        make_plan(model, options.pop("pattern", HALF), prefix="model.", **options)
    assert said in str(refused.value)
    assert "model.model." not in str(refused.value)


@pytest.mark.parametrize(
    ("columns", "pattern", "blamed"),
    [
        (320, "2:4", r"`grid` q3_k does not fit 1 layer\."),
        (258, "2:4", r"`pattern` 2:4 and `grid` q3_k do not fit 1 layer\."),
        (512, "3:5", r"`pattern` 3:5 does not fit 1 layer\."),
    ],
)
def test_what_does_not_fit_is_blamed(columns, pattern, blamed):
    model = nn.Sequential(nn.Linear(columns, 8))
    with pytest.raises(PatternError, match=blamed):
        make_plan(model, make_pattern(None, pattern), grid=GRIDS["q3_k"])


def test_layers_that_differ_in_numbers_only_are_counted():
    reasons = {"layers.0.up": "small", "layers.1.up": "small", "layers.1.down": "small", "h": "big"}
    assert alike(reasons) == [
        ("layers.*.up (2 layers)", "small"),
        ("layers.1.down", "small"),
        ("h", "big"),
    ]


class Routed(nn.Module):
    """Four experts, in a list or stacked, a router, the gate of a shared expert, and a map."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        if stacked:  # as JetMoE has them, with another router inside
            self.experts = nn.ModuleDict(
                {"stack": nn.Module(), "router": nn.ModuleDict({"layer": nn.Linear(8, 4)})}
            )
            self.experts.stack.weight = nn.Parameter(torch.randn(4, 8, 8))
        self.router, self.shared_gate, self.kv_proj = (nn.Linear(8, n) for n in (4, 1, 6))


@pytest.mark.parametrize("stacked", [False, True])
def test_routers_are_what_chooses_experts(stacked):
    """And not each layer beside them, as JetMoE's keys and values."""
    model = nn.Module()
    model.layers = nn.ModuleList(Routed(stacked) for _ in range(2))
    plan = make_plan(model, HALF)
    routers = ["experts.router.layer"] * stacked + ["router", "shared_gate"]
    assert [layer.name for layer in plan.skipped if "routes" in layer.reason] == [
        f"layers.{block}.{name}" for block in (0, 1) for name in routers
    ]
    assert {"layers.0.kv_proj", "layers.1.kv_proj"} <= {*names(plan)}


@pytest.mark.parametrize("shape", [(), (0,), (0, 4), (23,), (11, 4), (3, 50), (5, 2, 3)], ids=str)
def test_all_parts_are_counted(shape, monkeypatch):
    monkeypatch.setattr(blocks, "_VALUES_AT_ONCE", 8)
    sizes, ask = [], torch.isfinite
    monkeypatch.setattr(torch, "isfinite", lambda part: sizes.append(part.numel()) or ask(part))
    values = torch.zeros(shape)
    refuse_not_finite([], [("w", nn.Parameter(values))])
    row = values[0].numel() if values.ndim and len(values) else 1
    assert sum(sizes) == values.numel()
    assert max(sizes) <= max(8, row)
    if not values.numel():
        return
    values.view(-1)[:: max(1, values.numel() - 1)] = torch.nan  # the first and the last one
    count = min(2, values.numel())
    with pytest.raises(TargetError, match=rf"^NaN or Inf in 1 parameter(?s:.*)\n  w: {count}$"):
        refuse_not_finite([], [("w", nn.Parameter(values))])
