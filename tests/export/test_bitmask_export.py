"""Checkpoints of any pattern, and of four bits, as bitmasks and in the hands of transformers."""

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
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import NOTE

from .conftest import Exported, onto_grid, refusal, thin_out, write_report


@pytest.mark.parametrize("form", [BITMASK, BITMASK4], ids=lambda form: form.option)
def test_a_checkpoint_of_no_pattern_becomes_bitmasks(form, exports, tmp_path, capsys):
    made = exports(form.option, tmp_path)
    llama, packed = made.source, made.packed
    report = json.loads((packed / "export_report.json").read_text())
    assert report["format"] == form.option
    assert report["parity"]["failures"] == []
    assert len(report["parity"]["operators"]) == 14
    stored, dense = (load_file(path / "model.safetensors") for path in (packed, llama))
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert (settings["quant_method"], settings["format_version"]) == (form.quant_method, 1)
    for row in report["layers"]:
        weight = f"{row['name']}.weight"
        tensors = [stored.pop(name) for name in (weight, *form.companion_names(weight))]
        assert tensors[0].dtype == (torch.uint8 if form is BITMASK4 else torch.bfloat16)
        assert row["kept"] == int((dense.pop(weight) != 0).sum())
        assert row["packed_bytes"] == sum(tensor.nbytes for tensor in tensors) < row["dense_bytes"]
        assert settings["modules"].pop(row["name"]) == tensors[0].numel()
    assert not settings["modules"]
    assert stored.keys() - {NOTE} == dense.keys()
    main([str(llama), "--format", form.option, "--check-only"])
    assert f"14 {form.option} layers" in capsys.readouterr().out
    assert "already packed" in refusal([packed], capsys)


def test_a_value_that_a_disk_changed_is_seen_where_asked_for(exports, tmp_path):
    packed = exports("bitmask", tmp_path).packed
    export.load(packed, verify=True)
    file = packed / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8 + int.from_bytes(content[:8], "little")] ^= 1  # behind the header
    file.write_bytes(content)
    export.load(packed)  # the places still fit their values
    with pytest.raises(FormatError, match=r"model\.safetensors differ from the checksums"):
        export.load(packed, verify=True)
    (packed / ".mrp_files.json").unlink()
    with pytest.raises(FormatError, match=r"not listed there. Copy .* with its hidden files"):
        export.load(packed, verify=True)


def test_what_would_get_no_smaller_is_refused_with_the_reason(llama, capsys):
    thin_out(llama, 0.02)
    shown = refusal([llama], capsys)
    assert "has too few zeros in 10 of 14 layers" in shown
    assert "it would get no smaller: 9" in shown


FOUR_BITS = {"bits": 4, "group_size": 64}
DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def exported(exports: Any, tmp_path: Path) -> Exported:
    return exports("bitmask4", tmp_path)


@pytest.fixture
def coded(exported: Exported) -> Path:
    return exported.source


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


def test_what_few_bits_cannot_be_packed_is_said(coded, capsys):
    tensors = load_file(coded / "model.safetensors")
    write_report(coded, {DOWN: (32, 64)}, bits=4, group_size=30)
    tensors[f"{DOWN}.weight"].fill_(0.5)
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    shown = refusal([coded], capsys)
    assert "grid of 4 bits in groups of 30; what is packed" in shown
    assert "export.to_gguf" in shown


def test_a_weight_off_the_grid_is_named(coded, capsys):
    tensors = load_file(coded / "model.safetensors")
    row = tensors[f"{DOWN}.weight"][3]
    row[row.nonzero()[0]] *= 1.0078125  # by one unit in the last place of bfloat16, or two
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    shown = refusal([coded], capsys)
    assert "is not of four bits in 1 of 14 layers. Write `--format bitmask`" in shown
    assert f"{DOWN}: not of four bits: Row 3, columns 0 to 63" in shown
    main([str(coded), "--skip", DOWN, "--overwrite"])
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
