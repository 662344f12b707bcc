"""A run on the grid of an engine keeps its scales, however it was interrupted or shared out."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_pruning import stopped_at
from thread_processes import together
from transformers import AutoModelForCausalLM

from callbacks import MRPCallback
from mrp_lightning import BlockTuning, CausalLM, Trainer, prune_weight
from mrp_lightning.journal.journal import journal_path
from mrp_lightning.processes import ALONE
from mrp_lightning.pruning import block
from mrp_lightning.records.grid_file import NAME, load_parameters
from mrp_lightning.solver.grid import GRIDS, decompose, grid_of_bits
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.pruning import prune
from mrp_lightning.solver.recipe import Recipe

TUNING = BlockTuning(epochs=1, learning_rate=3e-3, batch_size=2)
NAMES = ["q3_k", "q4_1", "q4_k"]
ROWS = {"intermediate_size": 256}
"""Rows of `down_proj` are blocks of 256 weights, as q3_k and q4_k need."""


@pytest.fixture
def run(llama, loader, quiet, tmp_path):
    """Quantise a small model in bfloat16, which is in `dense`, into another directory."""
    llama(**ROWS).bfloat16().save_pretrained(tmp_path / "dense")

    def run(name, source="dense", streaming=False, **options):
        module = CausalLM(tmp_path / source, streaming=streaming)
        callback = MRPCallback(**options, save_dir=tmp_path / name)
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
        return tmp_path / name

    return run


def assert_exact(directory, grid, count):
    """The codes of the kept scales give the bits of the checkpoint, for so many layers."""
    saved = AutoModelForCausalLM.from_pretrained(directory)
    parameters = load_parameters(directory / NAME)
    assert len(parameters) == count
    for name, of_layer in parameters.items():
        weight = saved.get_submodule(name).weight
        codes = grid.codes_of(weight, of_layer)
        assert codes is not None, name
        assert torch.isin(codes.float(), torch.tensor(grid.codebook).float()).all()
        assert torch.equal(grid.values(codes, of_layer).to(weight.dtype), weight)


def assert_same(directory, other):
    ours, theirs = load_file(directory / NAME), load_file(other / NAME)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.mark.parametrize(("name", "streaming"), [("q4_1", False), ("q4_k", True)])
def test_kept_scales_give_the_checkpoint_also_if_tuned_interrupted_or_streamed(
    name, streaming, run, tmp_path
):
    options = {"grid": name, "tuning": TUNING, "targets": "down_proj"}
    whole = run("whole", **options)
    assert_exact(whole, GRIDS[name], 2)
    manifest = json.loads((whole / ".mrp_files.json").read_text())["files"]
    report = json.loads((whole / "pruning_report.json").read_text())
    assert NAME in manifest
    assert NAME in report["files"]
    with stopped_at(1):
        run("parts", streaming=streaming, **options)
    parts = run("parts", streaming=streaming, **options)
    resumed = json.loads((parts / "pruning_report.json").read_text())["totals"]
    assert resumed["resumed_blocks"] == 1
    assert_same(parts, whole)
    assert not list(tmp_path.glob(".*"))


def test_a_block_whose_scales_are_damaged_is_pruned_again(run, tmp_path, caplog):
    options = {"grid": "q4_0", "targets": "down_proj"}
    whole = run("whole", **options)
    with stopped_at(1):
        run("parts", **options)
    (file,) = journal_path(tmp_path / "parts").glob("*-grid.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    assert_same(run("parts", **options), whole)
    assert f"{file} is damaged or missing" in caplog.text
    assert not list(tmp_path.glob(".*"))


def test_layers_that_a_second_run_leaves_keep_their_scales(run):
    """So two grids can share a model; grids of `bits`, whose values give them back, keep none."""
    run("first", grid="q3_k", targets="down_proj")
    both = run("both", "first", grid="iq4_nl", targets="self_attn")
    parameters = load_parameters(both / NAME)
    of_mlp = {name: x for name, x in parameters.items() if "mlp" in name}
    saved = AutoModelForCausalLM.from_pretrained(both)
    assert len(of_mlp) == 2
    assert len(parameters) == 10
    for name, of_layer in parameters.items():
        grid = GRIDS["q3_k" if "mlp" in name else "iq4_nl"]
        assert grid.codes_of(saved.get_submodule(name).weight, of_layer) is not None
    again = run("again", "both", bits=4, targets="down_proj")
    assert all("self_attn" in name for name in load_parameters(again / NAME))
    assert not (run("plain", bits=4, targets="down_proj") / "grid").exists()


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_rows_that_processes_share_are_gathered(name, problem_of_rows):
    weight, matrix = problem_of_rows
    recipe = Recipe.of(method="SM", grid=name)

    def solve(processes):
        return prune(weight, InputHessian(matrix), recipe, processes=processes)

    alone = solve(ALONE)
    for one in together(3, solve):
        for solution in (one, alone):
            codes = GRIDS[name].codes_of(solution.weight, solution.grid_parameters)
            assert codes is not None


@pytest.fixture
def problem_of_rows():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1024, 256, generator=generator)
    weight = torch.randn(11, 256, generator=generator)
    return weight.bfloat16(), 2 * inputs.T @ inputs / len(inputs)


def test_other_weights_and_other_scales_are_refused(problem_of_rows):
    weight, matrix = problem_of_rows
    solution = prune(weight, InputHessian(matrix), Recipe.of(method="SM", grid="q3_k"))
    grid, parameters = GRIDS["q3_k"], solution.grid_parameters
    assert grid.codes_of(solution.weight, parameters) is not None
    changed = solution.weight.clone()
    changed[5, 70] *= 1.5
    assert grid.codes_of(changed, parameters) is None
    assert grid.codes_of(solution.weight[:, :240], parameters) is None
    for damaged in (
        parameters.map(lambda scales: scales[:-1]),
        parameters.map(lambda scales: scales * 1.01),
        parameters.map(lambda scales: scales * 0),
        parameters.map(lambda scales: scales / 0),
    ):
        assert grid.codes_of(solution.weight, damaged) is None
    for name in ("q4_0", "iq4_nl", "int4-g64"):
        assert GRIDS[name].codes_of(solution.weight, parameters) is None
    bits = prune(weight, InputHessian(matrix), Recipe.of(method="SM", bits=4))
    assert (
        grid_of_bits(4, zero_has_a_code=True).codes_of(bits.weight, bits.grid_parameters)
        is not None
    )


def test_a_damaged_file_is_named(tmp_path):
    from mrp_lightning.errors import FormatError

    file = tmp_path / "parameters.safetensors"
    file.write_bytes(b"\1" * 50)
    with pytest.raises(FormatError, match="parameters.safetensors is not as mrp-lightning"):
        load_parameters(file)
    save_file({"layer.other": torch.ones(2, 2)}, file)
    with pytest.raises(FormatError, match="parameters.safetensors is not as mrp-lightning"):
        load_parameters(file)
    assert load_parameters(tmp_path / "none.safetensors") == {}


TWO_EPOCHS = BlockTuning(epochs=2, learning_rate=3e-3, batch_size=2)


@pytest.mark.parametrize(
    ("dtype", "options", "sparsity"),
    [
        (torch.bfloat16, {"pattern": "2:4", "bits": 4, "group_size": 16}, 0.5),
        (
            torch.float32,
            {"sparsity": 0.7, "bits": 3, "method": "JM", "tuning": TWO_EPOCHS, "target": "dense"},
            0.7,
        ),
        (torch.bfloat16, {"bits": 4, "tuning": TWO_EPOCHS}, 0),
    ],
)
def test_what_is_saved_lies_on_its_grid(
    dtype, options, sparsity, llama, loader, quiet, tmp_path, caplog
):
    caplog.set_level("INFO")
    llama().to(dtype).save_pretrained(tmp_path / "dense")
    callback = MRPCallback(**options, save_dir=tmp_path / "out")
    precision = "bf16-true" if dtype is torch.bfloat16 else "32-true"
    module = CausalLM(tmp_path / "dense")
    Trainer(precision=precision, **quiet).predict(module, loader, callbacks=[callback])
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.dtype is dtype
    grid = grid_of_bits(options["bits"], options.get("group_size", 64))
    for row in callback.report.layers:
        weight = saved.get_submodule(row.name).weight
        decompose(grid, weight)
        assert float((weight == 0).float().mean()) >= sparsity - 1e-3
        assert row.sparsity == pytest.approx(sparsity, abs=1e-3)
        assert row.grid.bits == options["bits"]
        assert row.grid.zeros_loss + row.grid.grid_loss == pytest.approx(row.loss)
        assert (row.grid.zeros_loss == 0) == (sparsity == 0 and "target" not in options)
    if "tuning" in options:
        assert all(b.error_after <= b.error_before for b in callback.report.blocks)
    report = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
    assert report["config"]["bits"] == options["bits"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"quantised to {options['bits']} bits" in card
    assert f"  bits: {options['bits']}\n" in card
    amount = {0.5: "2:4" if "pattern" in options else "50%", 0.7: "70%", 0: ""}[sparsity]
    said = "+".join(filter(None, [amount, f"{options['bits']}bit"]))
    assert f"Pruned 14 layers to {said} with" in caplog.text


def test_a_layer_gets_what_prune_weight_gives(llama, loader, quiet):
    """Of the first block, whose inputs are the dense model's."""
    model, before = llama(), llama()
    seen = []
    layer = before.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in loader:
            before(batch)
    x = torch.cat(seen)
    callback = MRPCallback(sparsity=0.5, bits=4)
    Trainer(**quiet).predict(model, loader, callbacks=[callback])
    found = prune_weight(layer.weight, 2 * x.T @ x / len(x), sparsity=0.5, bits=4)
    pruned = model.model.layers[0].self_attn.q_proj.weight
    assert (pruned == found.weight).float().mean() > 0.99
    row = callback.report.layers[0]
    assert row.grid.zeros_loss == pytest.approx(found.zeros_loss, rel=1e-3)
    assert row.grid.grid_loss == pytest.approx(found.grid_loss, rel=0.05)


def test_tuned_weights_are_put_on_the_grid_last(llama, loader, quiet, monkeypatch):
    """What a block had after tuning is rounded, and by less than by nearest rounding."""
    tuned, hessians = {}, {}
    put = block.put_layers_on_grid

    def spy(layers, inputs, *args, **options):
        tuned.update({layer.name: layer.weight.clone() for layer in layers})
        hessians.update({layer.name: inputs.hessian for layer in layers})
        return put(layers, inputs, *args, **options)

    monkeypatch.setattr(block, "put_layers_on_grid", spy)
    model = llama()
    callback = MRPCallback(sparsity=0.5, bits=4, group_size=16, tuning=TWO_EPOCHS)
    Trainer(**quiet).predict(model, loader, callbacks=[callback])
    assert len(tuned) == 14
    for row in callback.report.layers:
        before, after = tuned[row.name], model.get_submodule(row.name).weight.detach()
        decompose(grid_of_bits(4, 16), after)  # which raises where it is on none
        assert bool((after[before == 0] == 0).all())
        change, hessian = (after - before).double(), hessians[row.name]
        lost = float(((change @ hessian.double()) * change).sum()) / 2
        assert row.grid.grid_loss == pytest.approx(lost, rel=1e-4)
        nearest = before.clone()
        for start in range(0, before.shape[1], 16):  # with the usual scale, and no error feedback
            group = nearest[:, start : start + 16]
            scale = group.abs().amax(1, keepdim=True).clamp_min(1e-9) / 8
            group.copy_((group / scale).round() * scale)
        change = (nearest - before).double()
        assert lost < float(((change @ hessian.double()) * change).sum()) / 2
