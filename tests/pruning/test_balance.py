"""Columns are balanced for a grid: which modules are linked, by which factors, to what effect."""

import pytest
import scipy.optimize
import torch
from slow_pruning import Dying, Killed, inputs_of, prune_model
from torch import nn

from mrp_lightning.errors import OptionError, SaveError, TargetError
from mrp_lightning.journal.journal import Journal
from mrp_lightning.pruning import balance
from mrp_lightning.pruning.balance import Probe
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.targets.blocks import find_blocks

GRID = {"bits": 4, "group_size": 16, "balance": True}
ALONE = {"pattern": None, "method": "SM"}

LINKS = {
    "llama": {
        "input_layernorm": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "post_attention_layernorm": "mlp.gate_proj mlp.up_proj",
        "self_attn.v_proj": "self_attn.o_proj",
        "mlp.up_proj": "mlp.down_proj",
    },
    # ReLU passes factors on, GELU does not.
    "opt": {
        "self_attn_layer_norm": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "final_layer_norm": "fc1",
        "self_attn.v_proj": "self_attn.out_proj",
        "fc1": "fc2",
    },
    "bloom": {
        "input_layernorm": "self_attention.query_key_value",
        "post_attention_layernorm": "mlp.dense_h_to_4h",
    },
    "gpt2": {"ln_1": "attn.c_attn", "ln_2": "mlp.c_fc"},
    # Padding is masked between the norm and the layer.
    "mamba": {"norm": "mixer.in_proj"},
    # A router and experts read the other norm.
    "mixtral": {
        "input_layernorm": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "self_attn.v_proj": "self_attn.o_proj",
    },
    # Its norms multiply by one plus their weights.
    "gemma3_text": {
        "input_layernorm": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "pre_feedforward_layernorm": "mlp.gate_proj mlp.up_proj",
        "self_attn.v_proj": "self_attn.o_proj",
        "mlp.up_proj": "mlp.down_proj",
    },
    # Attention and MLP read one norm.
    "falcon": {"input_layernorm": "self_attention.query_key_value mlp.dense_h_to_4h"},
}


def probe_of(model, batch):
    """A probe of the first block, on what the model gives it."""
    block, calls = find_blocks(model)[0].module, []
    hook = block.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    model(**batch, use_cache=False)
    hook.remove()
    args, kwargs = calls[0]

    def run():
        output = block(*args, **kwargs)
        return output[0] if isinstance(output, tuple) else output

    return Probe(block, run)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in LINKS), ("llama", torch.bfloat16)]
)
@torch.no_grad()
def test_links_are_found_without_names(family, dtype, build, batches):
    model = build(family).to(dtype)
    before = {name: p.clone() for name, p in model.named_parameters()}
    links = probe_of(model, batches[2]).links()
    assert {x.producer: " ".join(x.readers) for x in links} == LINKS[family]
    norms = {x.producer for x in links if "norm" in x.producer}
    assert {x.producer for x in links if x.adds_one} == (
        norms if family == "gemma3_text" else set()
    )
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name


@torch.no_grad()
def test_columns_of_grouped_heads_read_the_rows_of_their_group(build, batches):
    model = build("llama")
    config = model.config
    width, groups = config.head_dim, config.num_key_value_heads
    (link,) = (x for x in probe_of(model, batches[2]).links() if x.readers[0].endswith("o_proj"))
    rows = torch.arange(groups * width).view(groups, 1, width)
    shared = rows.expand(-1, config.num_attention_heads // groups, -1)
    assert link.rows == tuple(shared.flatten().tolist())


@torch.no_grad()
def test_parameters_that_others_hold_are_not_scaled(build, batches):
    model = build("llama")
    block = model.model.layers[0]
    probe = probe_of(model, batches[2])
    run = probe._run
    shared = {id(block.input_layernorm.weight), id(block.mlp.down_proj.weight)}
    names = {link.producer for link in Probe(block, run, shared).links()}
    assert names == {"post_attention_layernorm", "self_attn.v_proj"}


@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        *((x, torch.float64, 1e-6) for x in ("llama", "opt", "gemma3_text", "mamba")),
        *(("gemma3n_text", torch.float32, 1e-4), ("llama", torch.bfloat16, 0.03)),
    ],
)
@torch.no_grad()
def test_the_dense_model_computes_the_same(family, dtype, tolerance, build, batches, monkeypatch):
    """Nothing is put on the grid: of the run, only its factors are applied.

    Blocks of Gemma 3n share keys and values, so that v feeds layers of several blocks.
    """
    model = build(family).to(dtype)
    for name, p in model.named_parameters():
        if p.ndim == 1:  # tiny models begin with ones or zeros
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            p += 0.3 * noise.to(dtype)
    before = {name: p.clone() for name, p in model.named_parameters()}
    logits = model(**batches[2]).logits
    monkeypatch.setattr("mrp_lightning.pruning.block.LayerSolver.prune", lambda *_: [])
    with pytest.raises(TargetError, match="Pruned nothing"):
        prune_model(model, batches[2:], **ALONE, beyond=GRID)
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed
    for producer, readers in LINKS.get(family, {}).items():
        for name in (producer, *readers.split()):
            assert any(x.endswith(f".0.{name}.weight") for x in changed), name
    error = (model(**batches[2]).logits - logits).norm() / logits.norm()
    assert error < tolerance


class Sharing(nn.Module):
    """Blocks of two layers; the second block also reads what the first layer of the first gives."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x, shared):
            y = self.up(x)
            shared.append(y)
            read = torch.tanh(shared[0]).mean(-1, keepdim=True) if len(shared) > 1 else 0
            return x + self.down(y) + read

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(), self.Block()])

    def forward(self, input_ids, **_):
        x, shared = nn.functional.one_hot(input_ids % 32, 32).float(), []
        for block in self.blocks:
            x = block(x, shared)
        return x


@torch.no_grad()
def test_what_later_blocks_read_is_not_scaled(batches, monkeypatch):
    torch.manual_seed(0)
    model = Sharing()
    expected = model(**batches[2])
    monkeypatch.setattr("mrp_lightning.pruning.block.LayerSolver.prune", lambda *_: [])
    with pytest.raises(TargetError, match=r"`balance` found no input|Pruned nothing"):
        prune_model(model, batches[2:], **ALONE, beyond=GRID)
    torch.testing.assert_close(model(**batches[2]), expected)


@pytest.mark.parametrize("limit", [None, 1.0])
@torch.no_grad()
def test_features_that_are_clipped_are_not_scaled(limit):
    """On this batch nothing reaches the limit, until it is scaled by more than two."""
    torch.manual_seed(0)
    block = nn.ModuleDict({"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
    x = torch.randn(20, 32)
    block["up"].weight *= 0.3 / block["up"](x).abs().max()
    block["up"].bias.zero_()

    def run():
        features = block["up"](x)
        return block["down"](features if limit is None else features.clamp(-limit, limit))

    assert len(Probe(block, run).links()) == (1 if limit is None else 0)


def uneven(model):
    """Scale channels by factors that cancel, so that the function of the model stays."""
    generator = torch.Generator().manual_seed(5)
    for block in find_blocks(model):
        modules = dict(block.module.named_modules())
        for producer, readers in LINKS["llama"].items():
            weight = modules[producer].weight
            factors = torch.exp(torch.randn(len(weight), generator=generator) / 2)
            factors /= factors.log().mean().exp()
            weight /= factors if weight.ndim == 1 else factors[:, None]
            for name in readers.split():
                columns = modules[name].weight
                if columns.shape[1] > len(factors):  # two heads to a group
                    factors = factors.view(2, 1, -1).expand(-1, 2, -1).flatten()
                columns *= factors
    return model


@torch.no_grad()
def test_the_function_stays_and_the_factors_are_those_of_a_textbook(build, batches):
    """One pass of full forwards, an inverse and a Cholesky factor in float64."""
    model = uneven(build("llama").double())
    logits = model(**batches[2]).logits
    block = model.model.layers[1]
    modules = dict(block.named_modules())

    def textbook(names, energy, fold=lambda x: x):
        x = inputs_of(model, [modules[names[0]]], batches)[0].double()
        hessian = 2 * x.T @ x / len(x)
        hessian += 0.01 * hessian.diagonal().mean() * torch.eye(len(hessian))
        d = torch.linalg.cholesky(hessian.inverse()).T.diagonal() ** -2
        s = fold(d) ** 0.1 * fold(energy) ** -0.4
        return s / s.log().mean().exp()

    def energy(name, rows=1.0):
        return (modules[name].weight / rows).square().sum(0)

    def by_group(x):  # two heads read one group
        return x.view(2, 2, -1).sum(1).flatten()

    # Rows of v and up count as their own readers balance them.
    of_v = textbook(["self_attn.o_proj"], energy("self_attn.o_proj"), by_group)[:, None]
    of_up = textbook(["mlp.down_proj"], energy("mlp.down_proj"))[:, None]
    q, k, v = (f"self_attn.{x}_proj" for x in "qkv")
    gate, up = "mlp.gate_proj", "mlp.up_proj"
    scales = {
        "input_layernorm": textbook([q], energy(q) + energy(k) + energy(v, of_v)),
        "post_attention_layernorm": textbook([gate], energy(gate) + energy(up, of_up)),
    }
    expected = {norm: modules[norm].weight / s for norm, s in scales.items()}
    expected[v] = modules[v].weight * scales["input_layernorm"] / of_v
    found = {}

    def keep(model, *_):
        found.update({n: p.clone() for n, p in model.named_parameters()})

    # The weights as they are balanced, before the first of them is put on its grid.
    def apply(factors, block):
        balance.apply_factors(factors, block)
        keep(block.module)
        if block.name.endswith("layers.1"):
            found["logits"] = model(**batches[2]).logits
            raise Enough

    class Enough(Exception):  # noqa: N818 (a message to the test)
        pass

    options = {"beyond": {**GRID, "damping": 0.01}}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Enough):
        patch.setattr("mrp_lightning.pruning.survey.apply_factors", apply)
        patch.setattr("mrp_lightning.pruning.block.LayerSolver.prune", lambda *_: [])
        prune_model(model, batches, **ALONE, **options)
    for norm, weight in expected.items():
        torch.testing.assert_close(found[f"{norm}.weight"], weight, rtol=2e-3, atol=0)
    torch.testing.assert_close(found["logits"], logits)


def test_the_factors_have_the_least_loss_of_their_formula():
    """Against a numerical minimum, for two groups of one input."""
    generator = torch.Generator().manual_seed(3)
    d, c = torch.rand(2, 12, dtype=torch.double, generator=generator).add(0.05).pow(2)
    p = balance._NORM

    def loss(logs):
        u = logs.mul(2).exp()
        groups = (c * u).view(2, 6) ** (p / 2)
        return (groups.sum(1) ** (2 / p) * (d / u).view(2, 6).sum(1)).sum()

    def with_gradient(logs):
        x = torch.tensor(logs, requires_grad=True)
        (value := loss(x)).backward()
        return value.item(), x.grad.numpy()

    closed = d.log() / (p + 2) - c.log() * p / (2 * p + 4)
    best = scipy.optimize.minimize(with_gradient, torch.zeros(12).double().numpy(), jac=True)
    assert float(loss(closed)) == pytest.approx(best.fun, rel=1e-4)
    assert float(loss(closed)) < 0.8 * float(loss(torch.zeros(12)))


@torch.no_grad()
def test_a_model_is_quantised_alike_however_its_channels_are_scaled(build):
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(3, 64, (4, 48), generator=generator) for _ in range(4)]
    batches = [{"input_ids": x, "attention_mask": torch.ones_like(x)} for x in ids]
    dense = build("llama")(**batches[0]).logits

    def quantised(model, **settings):
        beyond = {**GRID, "damping": 1e-7, **settings}
        prune_model(model, batches, **ALONE, beyond=beyond)
        return model(**batches[0]).logits

    plain, scaled = quantised(build("llama")), quantised(uneven(build("llama")))
    unbalanced = quantised(uneven(build("llama")), balance=False)
    error, apart = (float((x - y).square().sum()) for x, y in ((plain, dense), (plain, scaled)))
    assert apart < 0.05 * error
    assert error < 0.7 * float((unbalanced - dense).square().sum())


@pytest.mark.parametrize(
    "beyond", [GRID, {**GRID, "target": "dense", "tuning": True}], ids=["own", "tuned"]
)
@torch.no_grad()
def test_a_run_that_was_killed_goes_on_with_the_same_bits(beyond, build, batches, tmp_path):
    options = {**ALONE, "beyond": beyond}
    whole, resumed, said = build("llama"), build("llama"), []
    prune_model(whole, batches, **options, say=said.append)
    assert "Balanced the columns of 21 layers." in said
    with pytest.raises(Killed), Dying.open(tmp_path / "out", {}) as journal:
        prune_model(build("llama"), batches, journal=journal, **options)
    with Journal.open(tmp_path / "out", {}) as journal, pytest.MonkeyPatch.context() as patch:
        patch.setattr(balance, "_links", None)  # factors are read, not measured
        report = prune_model(resumed, batches, journal=journal, **options)
    assert report.resumed_blocks == 2
    for (name, a), b in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b), name
    journal.remove()
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_lost_factors_are_measured_again_and_all_blocks_pruned_again(
    build, batches, tmp_path, caplog
):
    options = {**ALONE, "beyond": GRID}
    with pytest.raises(Killed), Dying.open(tmp_path / "out", {}) as journal:
        prune_model(build("llama"), batches, journal=journal, **options)
    (journal.path / "kept-survey.safetensors").write_bytes(b"lost")
    with Journal.open(tmp_path / "out", {}) as journal:
        report = prune_model(build("llama"), batches, journal=journal, **options)
    assert report.resumed_blocks == 0
    assert (
        "kept-survey.safetensors is damaged or missing. All blocks are pruned again." in caplog.text
    )


def test_a_disk_that_is_full_is_named(tmp_path):
    with Journal.open(tmp_path / "out", {}) as journal:
        (journal.path / "kept-survey.safetensors.partial").mkdir()  # in the way
        with pytest.raises(SaveError, match=r"cannot be written.*Make room there"):
            journal.kept("survey", lambda: {"a.rows": torch.ones(2)})


def test_balance_needs_a_grid_and_something_to_scale(build, batches):
    with pytest.raises(OptionError, match="`balance` scales columns for the groups of a grid"):
        Settings(method="SM", sparsity=0.5, balance=True)
    with pytest.raises(OptionError, match="`head_grid` alone.*`balance`"):
        Settings(method="SM", head_grid="q4_0", balance=True)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x):
            return self.second(torch.tanh(self.first(x)))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Block(), Block()])

        def forward(self, input_ids, **_):
            x = nn.functional.one_hot(input_ids % 32, 32).float()
            for block in self.blocks:
                x = x + block(x)
            return x

    with torch.no_grad(), pytest.raises(TargetError, match="no input.*a linear layer that feeds"):
        prune_model(Model(), batches, **ALONE, beyond=GRID)
