"""A user's own LightningModule: pruned, packed by the names in its report, and loaded again."""

import copy
import json
import shutil

import lightning
import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.pytorch_utils import Conv1D

import export
from callbacks import MRPCallback
from export.to_sparse import main
from mrp_lightning.errors import FormatError, OptionError
from mrp_sparse.packed_linear import Bitmask4Linear

from .conftest import refusal, write_report


class Block(nn.Module):
    """A linear layer, a square `Conv1D`, which stores its transpose, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.square = nn.Linear(16, 32), Conv1D(32, 32)
        self.conv, self.down = nn.Conv2d(8, 8, 1), nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.square(torch.relu(self.up(x)))
        y = y + self.conv(y.view(-1, 8, 2, 2)).flatten(1)
        return x + self.down(torch.relu(y))


class Own(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head, self.tied = nn.Linear(16, 8), nn.Linear(16, 8)
        self.tied.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) + self.tied(x)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)


@pytest.fixture(scope="module")
def _pruned(tmp_path_factory):
    """A pruned module, and a directory with what pruning and exporting wrote."""
    torch.manual_seed(0)
    module, root = Own(), tmp_path_factory.mktemp("own")
    for conv1d in (block.square for block in module.blocks):
        nn.init.normal_(conv1d.bias)
    callback = MRPCallback(pattern="2:4", save_dir=root / "own")
    trainer = lightning.Trainer(callbacks=[callback], **QUIET)
    trainer.predict(module, DataLoader(torch.randn(64, 16), batch_size=16))
    main([str(root / "own")])
    return module, root


@pytest.fixture
def pruned(_pruned, tmp_path):
    module, root = _pruned
    return module, shutil.copytree(root, tmp_path / "both") / "own"


def test_it_is_packed_and_loaded_bit_by_bit(pruned, capsys):
    module, directory = pruned
    main([str(directory), "--check-only"])
    assert "logits not compared: the module is your own" in capsys.readouterr().out
    out = directory.with_name("own-sparse24")
    report = json.loads((out / "export_report.json").read_text())
    reasons = {row["name"]: row["dense_because"] for row in report["layers"]}
    packed = [name for name, reason in reasons.items() if reason is None]
    assert sorted(packed) == [f"blocks.{k}.{n}" for k in (0, 1) for n in ("down", "square", "up")]
    assert reasons["blocks.0.conv"] == "its weight has 4 dimensions; the format packs matrices"
    assert len(report["parity"]["operators"]) == 6
    stored = load_file(out / "model.safetensors")
    assert stored["blocks.0.up.weight"].shape == (32, 8)
    other = export.load_into(Own(), out)
    for name in packed:
        layer = other.get_submodule(name)
        assert isinstance(layer, export.Sparse24Linear)
        expected = module.get_submodule(name).weight.detach()
        expected = expected.T if name.endswith("square") else expected
        assert torch.equal(layer.dense_weight().view(torch.int32), expected.view(torch.int32))
    x = torch.randn(5, 16)
    assert torch.allclose(other(x), module(x), rtol=1e-5, atol=1e-5)


def test_a_module_that_does_not_fit_is_left_as_it_is(pruned):
    _, directory = pruned
    out = directory.with_name("own-sparse24")
    other = Own()
    other.blocks[1].down = nn.Identity()
    other.extra, other.head = nn.Linear(2, 2), nn.Linear(16, 9)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(FormatError) as error:
        export.load_into(other, out)
    for problem in (
        "blocks.1.down: the module has no linear layer of this name",
        "blocks.1.down.weight: not in the module",
        "extra.weight: missing from the file",
        "head.weight: the shape is (8, 16) in the file and (9, 16) in the module",
    ):
        assert problem in str(error.value)
    assert other.state_dict().keys() == before.keys()
    assert all(torch.equal(t, before[n]) for n, t in other.state_dict().items())
    tensors = load_file(out / "model.safetensors")
    tensors["blocks.0.up.weight_meta"][0, 0] = 0
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(FormatError, match="blocks.0.up.weight_meta: damaged, 2 of 128 nibbles"):
        export.load_into(Own(), out)


def test_a_module_without_data_is_refused(pruned):
    """Copies to the meta device do nothing: the module would come back without its weights."""
    _, directory = pruned
    with torch.device("meta"):
        module = Own()
    message = "`module`: expected a module with data, .* on the meta device, such as blocks.0.up.w"
    with pytest.raises(OptionError, match=message):
        export.load_into(module, directory)


def test_layers_of_the_report_must_be_2_of_4(pruned, capsys):
    _, directory = pruned
    tensors = load_file(directory / "model.safetensors")
    tensors["blocks.0.up.weight"][0, :4] = 1.0
    save_file(tensors, directory / "model.safetensors")
    shown = refusal([directory, "--format", "packed", "--overwrite"], capsys)
    assert "says, in 1 of 8 layers" in shown
    out = directory.with_name("skipped")
    main([str(directory), "--format", "packed", "--skip", "blocks.0", "--out", str(out)])
    report = json.loads((out / "export_report.json").read_text())
    assert report["totals"]["packed_layers"] == 3


def test_the_fast_path_of_torchs_encoder_is_told(tmp_path, caplog, monkeypatch):
    encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    kept = torch.tensor([1.0, 0.0, 0.0, 1.0]).repeat(8)
    encoder.linear2.weight.data.mul_(kept)
    save_file(encoder.state_dict(), tmp_path / "model.safetensors")
    write_report(tmp_path, {"linear2": (16, 32)}, pattern="2:4")
    main([str(tmp_path), "--out", f"{tmp_path}-packed"])
    other = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    export.load_into(other, f"{tmp_path}-packed")
    assert "set_fastpath_enabled(False)" in caplog.text
    monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
    with torch.no_grad():
        x = torch.randn(2, 3, 16)
        assert torch.allclose(other(x), encoder(x), rtol=1e-5, atol=1e-6)


class Wide(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(2)
        )

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return batch


@pytest.mark.parametrize("activations", [None, "exact", "int8"])
def test_only_the_user_rounds_the_activations_of_a_module_of_ones_own(activations, tmp_path):
    """Its loss on text is unknown."""
    torch.manual_seed(0)
    callback = MRPCallback(sparsity=0.5, bits=4, save_dir=tmp_path / "own")
    trainer = lightning.Trainer(callbacks=[callback], **QUIET)
    trainer.predict(Wide(), DataLoader(torch.randn(256, 64), batch_size=64))
    main([str(tmp_path / "own"), *(["--activations", activations] if activations else [])])
    other = export.load_into(Wide(), tmp_path / "own-bitmask4")
    layers = [m for m in other.modules() if isinstance(m, Bitmask4Linear)]
    assert {layer.eight_bit_activations for layer in layers} == {activations == "int8"}
