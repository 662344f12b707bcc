"""Checkpoints of any pattern, exported as bitmasks and in the hands of transformers."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import export
from export.to_sparse import main
from mrp_lightning.errors import FormatError
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.packed_format import NOTE

from .conftest import logits, refusal, thin_out


@pytest.mark.parametrize("form", [BITMASK, BITMASK4], ids=lambda form: form.option)
def test_a_checkpoint_of_no_pattern_becomes_bitmasks(form, llama, capsys):
    thin_out(llama, four_bits=form is BITMASK4)
    main([str(llama)])
    packed = llama.with_name(f"llama-{form.suffix}")
    assert f"14 {form.option} layers" in capsys.readouterr().out
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
    assert "already packed" in refusal([str(packed)], capsys)


def test_a_value_that_a_disk_changed_is_seen_where_asked_for(llama):
    thin_out(llama)
    main([str(llama)])
    packed = llama.with_name("llama-bitmask")
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


@pytest.mark.parametrize("kind", ["gpt2", "opt"])
def test_other_families_and_precisions(kind, pruned, ids, tmp_path):
    source = Path(shutil.copytree(pruned(kind, dtype=torch.float32), tmp_path / kind))
    thin_out(source)
    main([str(source)])
    assert torch.equal(logits(tmp_path / f"{kind}-bitmask", ids), logits(source, ids))


def test_columns_need_no_multiple(pruned, ids, tmp_path):
    source = Path(shutil.copytree(pruned(intermediate_size=60), tmp_path / "odd"))
    thin_out(source)
    main([str(source)])
    report = json.loads((tmp_path / "odd-bitmask" / "export_report.json").read_text())
    assert {row["dense_because"] for row in report["layers"]} == {None}
    assert torch.equal(logits(tmp_path / "odd-bitmask", ids), logits(source, ids))


def test_two_of_four_may_be_written_as_bitmasks(llama, ids):
    main([str(llama), "--format", "bitmask"])
    assert torch.equal(logits(llama.with_name("llama-bitmask"), ids), logits(llama, ids))


def test_what_would_get_no_smaller_is_refused_with_the_reason(llama, capsys):
    thin_out(llama, 0.02)
    shown = refusal([str(llama)], capsys)
    assert "has too few zeros in 10 of 14 layers" in shown
    assert "it would get no smaller: 9" in shown
    tensors = load_file(llama / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][:, ::2] = 0.0
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    main([str(llama), "--format", "bitmask", "--allow-partial"])
    report = json.loads((llama.with_name("llama-bitmask") / "export_report.json").read_text())
    assert report["totals"]["packed_layers"] == 5
