"""Checkpoints of any pattern, exported as bitmasks and in the hands of transformers."""

import json
import shutil
from pathlib import Path

import lightning
import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import export
from callbacks import MRPCallback
from export import BitmaskLinear
from export.to_sparse import main
from mrp_lightning.errors import FormatError

from .conftest import logits, refusal, thin_out


def test_a_checkpoint_of_no_pattern_becomes_bitmasks(llama, capsys):
    thin_out(llama)
    main([str(llama)])
    packed = llama.with_name("llama-bitmask")
    assert "14 bitmask layers" in capsys.readouterr().out
    report = json.loads((packed / "export_report.json").read_text())
    assert report["format"] == "bitmask"
    assert report["parity"]["failures"] == []
    assert len(report["parity"]["operators"]) == 14
    stored = load_file(packed / "model.safetensors")
    for row in report["layers"]:
        weight = load_file(llama / "model.safetensors")[f"{row['name']}.weight"]
        values, bits = (stored[f"{row['name']}.{key}"] for key in ("weight", "weight_bits"))
        assert row["kept"] == values.numel() == int((weight != 0).sum())
        assert row["packed_bytes"] == values.nbytes + bits.nbytes < row["dense_bytes"]
    settings = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert settings["quant_method"] == "mrp_bitmask"
    assert settings["format_version"] == 1
    assert set(settings["modules"]) == {row["name"] for row in report["layers"]}
    main([str(llama), "--format", "bitmask", "--check-only"])
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


class Own(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(19, 19) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return x

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


def test_a_module_of_ones_own_is_packed_and_loaded(tmp_path):
    torch.manual_seed(0)
    module = Own()
    callback = MRPCallback(sparsity=0.6, save_dir=tmp_path / "own")
    trainer = lightning.Trainer(callbacks=[callback], **QUIET)
    trainer.predict(module, DataLoader(torch.randn(64, 19), batch_size=16))
    main([str(tmp_path / "own")])
    loaded = export.load_into(Own(), tmp_path / "own-bitmask")
    assert all(isinstance(block, BitmaskLinear) for block in loaded.blocks)
    x = torch.randn(3, 19)
    assert torch.equal(loaded(x), module(x))
