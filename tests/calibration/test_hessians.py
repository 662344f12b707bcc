import pytest
import torch
from slow_pruning import prune_model
from thread_processes import together
from torch import Tensor, nn
from torch.nn import functional

from mrp_lightning.calibration.hessians import Calibration, InputsDiffer, Products
from mrp_lightning.calibration.padding import Padding, taken
from mrp_lightning.calibration.walks import every_layer_called
from mrp_lightning.targets.layers import Layer, Linear


class Attention(nn.Module):
    """Three layers on one input, two more on inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.changed, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.swap = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.q(x) + self.k(x) + self.v(x + 1 if self.swap else x)
        x += 1
        return self.out(y) + self.changed(x)


def layers_of(model: nn.Module) -> list[Layer]:
    return [Linear(name, module) for name, module in model.named_children()]


@torch.no_grad()
def test_layers_share_a_hessian_only_if_they_share_the_very_input():
    model = Attention()
    calibration = Calibration(layers_of(model), Padding(model))
    inputs = torch.randn(3, 5, 8)
    with calibration.hooked():
        for x in inputs:
            model(x.clone())
            calibration.end_batch()
    groups = {group.layers[0].name: group for group in calibration.groups}
    assert [[x.name for x in g.layers] for g in groups.values()] == [
        ["q", "k", "v"],
        ["out"],
        ["changed"],
    ]
    flat = inputs.flatten(0, 1)
    for name, x in (("q", flat), ("changed", flat + 1)):
        torch.testing.assert_close(groups[name].accumulator.hessian(), 2 * x.T @ x / 15)


@torch.no_grad()
def test_operands_of_a_product_are_known_by_name():
    layer, x = nn.Linear(8, 8), torch.randn(5, 8)
    weight, bias, seen = layer.weight, layer.bias, []
    with Products([Linear("", layer)], lambda _, inputs: seen.append(inputs)):
        functional.linear(bias=bias, weight=weight, input=x)
        functional.linear(x, bias=bias, weight=weight)
        torch.matmul(other=weight.T, input=x)
        torch.mm(x, out=torch.empty(5, 8), mat2=weight.T)
        x.matmul(other=weight.T)
    assert len(seen) == 5
    assert all(inputs is x for inputs in seen)


@torch.no_grad()
def test_inputs_that_part_in_a_later_batch_are_noticed():
    model = Attention()
    calibration = Calibration(layers_of(model), Padding(model))
    with calibration.hooked():
        model(torch.randn(5, 8))
        calibration.end_batch()
        model.swap = True
        with pytest.raises(InputsDiffer):
            model(torch.randn(5, 8))


@torch.no_grad()
def test_a_layer_that_is_called_more_often_than_its_group_is_noticed():
    model = Attention()
    calibration = Calibration(layers_of(model), Padding(model))
    with calibration.hooked():
        model(torch.randn(5, 8))
        model.q(torch.randn(5, 8))
        with pytest.raises(InputsDiffer):
            calibration.end_batch()


@pytest.mark.parametrize(
    ("shares", "is_alike"), [((3, 2, 0), True), ((0, 5, 0), True), ((3, 2), False)]
)
@torch.no_grad()
def test_processes_sum_up_the_same_groups(shares, is_alike):
    inputs, models = torch.randn(5, 7, 8), [Attention() for _ in shares]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    models[1].swap = not is_alike
    starts = [sum(shares[:rank]) for rank in range(len(shares))]

    def run(processes):
        rank = processes.rank
        calibration = Calibration(layers_of(models[rank]), Padding(models[rank]))
        with calibration.hooked():
            for x in inputs[starts[rank] : starts[rank] + shares[rank]]:
                models[rank](x.clone())
                calibration.end_batch()
        if not is_alike:
            with pytest.raises(InputsDiffer):
                calibration.sum_over(processes, differ=False)
            return None
        calibration.sum_over(processes, differ=False)
        return calibration

    flat = inputs.flatten(0, 1)
    for calibration in filter(None, together(len(shares), run)):
        groups = [[x.name for x in group.layers] for group in calibration.groups]
        assert groups == [["q", "k", "v"], ["out"], ["changed"]]
        assert calibration.not_called == []
        accumulator = calibration.groups[0].accumulator
        assert accumulator.num_tokens == 35
        torch.testing.assert_close(accumulator.hessian(), 2 * flat.T @ flat / 35)


@torch.no_grad()
def test_all_processes_know_that_inputs_differ_in_one():
    model = Attention()

    def run(processes):
        calibration = Calibration(layers_of(model), Padding(model))
        with pytest.raises(InputsDiffer):
            calibration.sum_over(processes, differ=processes.rank == 1)
        return True

    assert together(2, run) == [True, True]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4), (2, 3, 2, 4), (2, 1, 3, 4)])
@torch.no_grad()
def test_padding_is_cut_from_inputs_of_any_shape(shape):
    model = Masked()
    padding = Padding(model)
    x, mask = torch.randn(shape), torch.tensor([[0, 1, 1], [1, 1, 0]])
    expected = x.reshape(6, -1, 4)[mask.flatten().bool()].reshape(-1, 4)
    for call in (lambda: model(x, mask), lambda: model(x, attention_mask=mask)):
        seen = []

        def note(module, args, seen=seen):
            seen.append(taken(args[0], padding.rows(args[0], module, "layer")))

        model.layer.register_forward_pre_hook(note)
        with padding.watch():
            padding.start_batch(None)
            call()
        assert torch.equal(seen[0].reshape(-1, 4), expected)


def _pairs(is_token: Tensor) -> Tensor:
    """Which pairs (batch, 1, queries, keys) a causal attention uses among tokens."""
    length = is_token.shape[1]
    return (
        torch.ones(length, length).tril().bool()
        & is_token[:, None, None]
        & is_token[:, None, :, None]
    )


@pytest.mark.parametrize(
    "form",
    [
        lambda t: torch.where(t, 0.0, -torch.inf),
        _pairs,
        lambda t: _pairs(t).long(),
        lambda t: torch.where(_pairs(t), 0.0, torch.finfo(torch.float32).min),
        lambda t: torch.where(_pairs(t), -3.0, -1e4)[:, 0],
    ],
)
@pytest.mark.parametrize("rows", [[[0, 1, 1], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]])
@torch.no_grad()
def test_masks_of_scores_and_of_pairs_show_the_same_padding(rows, form):
    is_token = torch.tensor(rows).bool()
    x, model = torch.randn(2, 3, 4), nn.Sequential(nn.Linear(4, 4))
    padding = Padding(model)
    padding.start_batch({"attention_mask": form(is_token)})
    kept = padding.rows(x, model[0], "0")
    assert torch.equal(taken(x, kept).reshape(-1, 4), x[is_token])


@torch.no_grad()
def test_rows_that_cannot_be_matched_with_the_mask_are_said():
    model = Masked()
    padding = Padding(model)
    padding.start_batch({"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 0]])})
    x = torch.randn(5, 4)
    assert padding.rows(x, model.layer, "experts.0.up") is None
    assert padding.unmatched == {"experts.0.up": ((5, 4), (2, 3))}


LENGTHS = (4, 6)


def encoder(*, batch_first: bool = True) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=batch_first).eval()
    for bias in (p for name, p in model.named_parameters() if name.endswith("bias")):
        nn.init.normal_(bias)
    return model


def padded(*, batch_first: bool = True, length: int = 6) -> dict[str, Tensor]:
    x = torch.randn(2, length, 8)
    is_padding = torch.tensor([[n >= tokens for n in range(length)] for tokens in LENGTHS])
    return {"src": x if batch_first else x.transpose(0, 1), "src_key_padding_mask": is_padding}


def inputs_one_by_one(model: nn.TransformerEncoder, x: Tensor) -> dict[str, Tensor]:
    """The inputs of all layers, by name, of the tokens of a batch (batch, length, columns)."""
    found: dict[str, list[Tensor]] = {}
    for sequence, length in zip(x, LENGTHS, strict=True):
        state = sequence[:length]
        for k, layer in enumerate(model.layers):
            attended, _ = layer.self_attn(state, state, state, need_weights=False)
            state = layer.norm1(state + attended)
            found.setdefault(f"layers.{k}.linear1", []).append(state)
            given = layer.linear1(state).relu()
            found.setdefault(f"layers.{k}.linear2", []).append(given)
            state = layer.norm2(state + layer.linear2(given))
    return {name: torch.cat(parts) for name, parts in found.items()}


@pytest.mark.parametrize("length", [6, 8])
@pytest.mark.parametrize("batch_first", [True, False])
@torch.no_grad()
def test_all_layers_are_calibrated_on_the_tokens(batch_first, length):
    model, batch = encoder(batch_first=batch_first), padded(batch_first=batch_first, length=length)
    padding = Padding(model)
    linears = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear]
    calibration = Calibration([Linear(*named) for named in linears], padding)
    with every_layer_called(), padding.watch(), calibration.hooked():
        padding.start_batch(batch)
        model(**batch)
        calibration.end_batch()
    x = batch["src"] if batch_first else batch["src"].transpose(0, 1)
    expected = inputs_one_by_one(model, x)
    hessians = {group.layers[0].name: group.accumulator.hessian() for group in calibration.groups}
    assert hessians.keys() == expected.keys() == dict(linears).keys()
    for name, given in expected.items():
        torch.testing.assert_close(hessians[name], 2 * given.T @ given / sum(LENGTHS))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_encoder_with_padding_is_pruned_block_by_block():
    model = encoder()
    report = prune_model(model, [padded() for _ in range(3)])
    assert report.config["walk"] == "inject"
    left = {row.name: row.skipped for row in report.layers if row.skipped}
    parts = ("in_proj_weight", "out_proj")
    assert left.keys() == {f"layers.{k}.self_attn.{part}" for k in (0, 1) for part in parts}
    assert "inside torch's attention" in left["layers.0.self_attn.out_proj"]
    assert {row.tokens for row in report.pruned} == {3 * sum(LENGTHS)}
    assert torch.backends.mha.get_fastpath_enabled()


class Own(nn.Module):
    """A block that calls its mask otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mlp = nn.Linear(8, 8)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, key_padding_mask=hidden)[0]
        return x + self.mlp(x)


@pytest.mark.parametrize("is_padded", [True, False])
def test_padding_that_only_an_attention_knows_is_warned_of(is_padded, caplog):
    batch = padded()
    mask = batch["src_key_padding_mask"] & is_padded
    model = Own()
    prune_model(model, [{"x": batch["src"], "hidden": mask}] * 2)
    assert caplog.text.count("it counts as tokens") == is_padded
