"""Checkpoints of four bits, exported and in the hands of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import export
from export import Bitmask4Linear
from export.conversion.checkpoint import open_checkpoint
from export.conversion.selection import choose_layers
from export.to_sparse import main
from mrp_lightning import prune_weight
from mrp_lightning.errors import FormatError

from .conftest import Exported, onto_grid, refusal, write_report

FOUR_BITS = {"bits": 4, "group_size": 64}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def exported(exports: Any, tmp_path: Path) -> Exported:
    return exports("bitmask4", tmp_path)


@pytest.fixture
def coded(exported: Exported) -> Path:
    return exported.source


@pytest.fixture
def packed(exported: Exported) -> Path:
    return exported.packed


@pytest.mark.parametrize(
    ("config", "written"),
    [
        ({"bits": 3}, "bitmask4"),
        ({"group_size": 128}, "bitmask4"),
        ({"group_size": 32}, "bitmask"),
        ({"bits": 8}, "bitmask"),
        ({"bits": None, "sparsity": 0.5}, "bitmask"),
    ],
    ids=str,
)
def test_what_the_report_says_decides(coded, config, written):
    write_report(coded, {DOWN: (32, 64)}, **FOUR_BITS | config)
    layers = choose_layers(open_checkpoint(coded))
    assert {layer.form.option for layer in layers} == {written}


def test_the_grid_of_an_engine_is_none_of_four_bits(llama):
    """Its scales have the eight significant bits of bfloat16; those of bitmask4 have five."""
    tensors = load_file(llama / "model.safetensors")
    weight = tensors[f"{DOWN}.weight"]
    pruned = prune_weight(weight, torch.eye(64), pattern="2:4", grid="int4-g64").weight
    tensors[f"{DOWN}.weight"] = pruned
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    write_report(llama, {DOWN: (32, 64)}, pattern="2:4", grid="int4-g64")
    layers = choose_layers(open_checkpoint(llama))
    assert {layer.form.option for layer in layers} == {"packed"}


def test_a_report_of_bits_that_no_run_has_is_refused(coded):
    write_report(coded, {DOWN: (32, 64)}, **FOUR_BITS | {"bits": 5})
    with pytest.raises(FormatError, match="`config`: `bits` must be 3, 4 or 8; got 5"):
        choose_layers(open_checkpoint(coded))


@pytest.mark.parametrize("config", [{"bits": 8}, {"group_size": 30}])
def test_what_few_bits_cannot_be_packed_is_said(config, coded, capsys):
    tensors = load_file(coded / "model.safetensors")
    write_report(coded, {DOWN: (32, 64)}, **FOUR_BITS | config)
    tensors[f"{DOWN}.weight"].fill_(0.5)
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    shown = refusal([str(coded)], capsys)
    grid = {"bits": 4, "group_size": 64} | config
    assert f"grid of {grid['bits']} bits in groups of {grid['group_size']}; what is packed" in shown
    assert "export.to_gguf" in shown


def test_a_weight_off_the_grid_is_named(coded, capsys):
    tensors = load_file(coded / "model.safetensors")
    row = tensors[f"{DOWN}.weight"][3]
    row[row.nonzero()[0]] *= 1.0078125  # by one unit in the last place of bfloat16, or two
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    shown = refusal([str(coded)], capsys)
    assert "is not of four bits in 1 of 14 layers. Write `--format bitmask`" in shown
    assert f"{DOWN}: not of four bits: Row 3, columns 0 to 63" in shown
    main([str(coded), "--allow-partial", "--overwrite"])
    rows = json.loads((coded.with_name("llama-bitmask4") / "export_report.json").read_text())
    assert rows["totals"]["packed_layers"] == 13


def test_a_module_of_ones_own_takes_them(tmp_path):
    weight = onto_grid(torch.randn(8, 70) * (torch.rand(8, 70) < 0.5))
    names = ("weight", *Bitmask4Linear.FORMAT.companions)
    tensors = dict(zip(names, Bitmask4Linear.FORMAT.pack(weight), strict=True))
    save_file(
        {f"0.{name}": tensor for name, tensor in tensors.items()} | {"0.bias": torch.ones(8)},
        tmp_path / "model.safetensors",
    )
    modules = {"0": tensors["weight"].numel()}
    settings = {"quant_method": "mrp_bitmask4", "format_version": 1, "modules": modules}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    module = export.load_into(nn.Sequential(nn.Linear(70, 8)), tmp_path)
    x = torch.randn(20, 70)
    with torch.no_grad():
        assert torch.equal(module(x), nn.functional.linear(x, weight, torch.ones(8)))
