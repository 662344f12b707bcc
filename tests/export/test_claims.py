"""What a pruning report claims of a layer is held against its weights before anything is packed."""

import re
from pathlib import Path

import families
import pytest
import torch
from safetensors.torch import load_file, save_file

from export.conversion.checkpoint import open_checkpoint
from export.conversion.selection import Claim, choose_layers
from export.to_sparse import main
from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.records.report import PruningReport
from mrp_lightning.records.rows import LayerReport
from mrp_lightning.solver.patterns import SemiStructured, Unstructured
from mrp_lightning.targets.plan import make_plan

from .conftest import refusal

UP = "model.layers.0.mlp.up_proj"


def test_where_a_pattern_is_broken_is_found():
    weight = torch.tensor([[0.0, 1, 0, 1, 0, 0, 0, 1], [1, 0, 1, 0, 1, 0, 0, 0]])
    claim = Claim(0.5, SemiStructured(2, 4))
    assert claim.breach(weight) is None
    weight[1, 5:7] = torch.tensor([-1e-30, torch.nan])
    assert claim.breach(weight) == "1 of 4 groups are not 2:4"
    assert claim.breach(weight[:, :6]) == "its 6 columns do not split into groups of 4"


def test_too_few_zeros_are_found():
    weight = torch.ones(4, 1000)
    weight[:, :300] = -0.0
    assert Claim(0.3, None).breach(weight) is None
    assert Claim(float(torch.tensor(0.3)), None).breach(weight) is None  # a float32, as in reports
    weight[2, 7:17] = 1.0
    assert Claim(0.3, None).breach(weight) == "29.75% of it is zero, expected 30.00%"


@pytest.fixture
def pruned(tmp_path: Path):
    """Prune the tiny model of a family; write it with its report."""

    def write(family: str, shape, **config) -> Path:
        model = families.build(family)
        plan = make_plan(model, shape, skip_indivisible=True)
        layers = [*(layer for block in plan.layers.values() for layer in block), *plan.outside]
        rows = []
        for layer in layers:
            scores = layer.weight.abs()
            layer.write_(layer.weight.masked_fill(shape.select(scores, 0), 0.0))
            sparsity = float((layer.weight == 0).float().mean())
            rows.append(LayerReport(name=layer.name, shape=layer.weight.shape, sparsity=sparsity))
        model.save_pretrained(tmp_path / "model")
        PruningReport({"method": "magnitude", **config}, rows).save(tmp_path / "model")
        return tmp_path / "model"

    return write


def damage(directory: Path, name: str, index: tuple) -> None:
    """Give weights of a tensor other values than zero."""
    tensors = load_file(directory / "model.safetensors")
    tensors[name][index] = 0.5
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_a_layer_that_breaks_the_pattern_of_the_report_is_named(pruned, capsys):
    source = pruned("llama", SemiStructured(2, 4), pattern="2:4")
    main([str(source), "--check-only"])
    damage(source, f"{UP}.weight", (slice(3, 5), slice(8, 12)))
    for options in (["--check-only"], [], ["--format", "bitmask"]):
        shown = refusal([source, *options], capsys)
        assert "is not what its pruning_report.json says, in 1 of" in shown
        assert re.search(rf"{UP}: 2 of \d+ groups are not 2:4", shown)
        assert "--skip" in shown
        assert [path.name for path in source.parent.iterdir()] == ["model"]


def test_it_may_stay_dense(pruned):
    source = pruned("llama", SemiStructured(2, 4), pattern="2:4")
    damage(source, f"{UP}.weight", (3, slice(8, 12)))
    found = choose_layers(open_checkpoint(source), skip=["layers.0.mlp.up_proj"])
    assert [x.name for x in found if x.reason and x.name != "lm_head"] == [UP]


def test_fewer_zeros_than_the_report_has(pruned):
    source = pruned("llama", Unstructured(0.5), sparsity=0.5)
    assert all(x.breach is None for x in choose_layers(open_checkpoint(source)))
    damage(source, f"{UP}.weight", (0, slice(None)))
    with pytest.raises(PatternError, match=rf"{UP}: 48\.\d\d% of it is zero, expected 50\.00%"):
        choose_layers(open_checkpoint(source))


def test_layers_that_are_stored_transposed(pruned):
    source = pruned("gpt2", SemiStructured(2, 4), pattern="2:4")
    assert not any(x.breach for x in choose_layers(open_checkpoint(source)))
    damage(source, "transformer.h.0.mlp.c_fc.weight", (slice(0, 4), 5))
    with pytest.raises(PatternError, match=r"h\.0\.mlp\.c_fc: \d+ of \d+ groups are not 2:4"):
        choose_layers(open_checkpoint(source))


def test_columns_that_are_gone_are_no_zeros(pruned):
    source = pruned("llama", SemiStructured(2, 4), structure="neurons", sparsity=0.5)
    damage(source, f"{UP}.weight", (0, slice(None)))
    assert all(x.breach is None for x in choose_layers(open_checkpoint(source)))


def test_a_narrower_model_has_nothing_to_pack(pruned):
    source = pruned("llama", Unstructured(0.01), structure="neurons", sparsity=0.25)
    with pytest.raises(PatternError, match=r"narrower by `structure: neurons`: .* smaller and de"):
        choose_layers(open_checkpoint(source))


def test_a_report_of_another_model_is_refused(pruned):
    source = pruned("llama", SemiStructured(2, 4), pattern="2:4")
    report = source / "pruning_report.json"
    report.write_text(report.read_text().replace("mlp.up_proj", "mlp.fc1"))
    with pytest.raises(PatternError, match=r"does not have: model\.layers\.0\.mlp\.fc1, .*another"):
        choose_layers(open_checkpoint(source))
    report.write_text(report.read_text().replace('"name": "', '"name": 5, "former": "'))
    with pytest.raises(FormatError, match=r"`layers\[0\]\.name` is 5, expected a valid string"):
        choose_layers(open_checkpoint(source))
