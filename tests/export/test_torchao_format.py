"""`--format torchao`: CUTLASS' layout on disk, on CPU kernels that stand in for the CUDA ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.sparse import SparseSemiStructuredTensor, SparseSemiStructuredTensorCUTLASS
from transformers import AutoModelForCausalLM

import export
from export.conversion.checkpoint import open_checkpoint
from export.to_sparse import main
from export.torchao_tensors import restore, why_not_storable
from mrp_lightning.errors import FormatError, OptionError

from .conftest import refusal

ROOT = Path(__file__).parents[2]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
PROTOTYPE = "ignore:The PyTorch API of SparseSemiStructuredTensor"

pytestmark = pytest.mark.filterwarnings(PROTOTYPE)


@pytest.fixture(params=["stand-in", pytest.param("cuda", marks=pytest.mark.gpu)])
def torchao(request: pytest.FixtureRequest) -> None:
    """torchao, and something on which its tensors can be multiplied."""
    pytest.importorskip("torchao.sparsity", reason="needs the extra `torchao`")
    if request.param == "stand-in":
        if torch.cuda.is_available():
            pytest.skip("here is the real one")
        request.getfixturevalue("torch_subclass_on_cpu")


@pytest.mark.parametrize("max_shard_size", ["5GB", "100KB"])
def test_it_is_written_and_loaded(torchao, max_shard_size, pruned, ids, tmp_path, capsys):
    source = pruned(max_shard_size=max_shard_size, **SIZES)
    main([str(source), "--format", "torchao", "--out", str(tmp_path / "out")])
    assert "0.5625" in capsys.readouterr().out
    shards = list(source.glob("*.safetensors"))
    pickles = list((tmp_path / "out").glob("*.bin"))
    assert len(pickles) == len(shards) == (1 if max_shard_size == "5GB" else 3)
    assert not list((tmp_path / "out").glob("*.safetensors*"))
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert report["totals"]["packed_layers"] == len(report["parity"]["operators"]) == 14
    assert report["parity"]["text"]["top1_agreement"] >= 0.995
    dense = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    stored = dict(open_checkpoint(tmp_path / "out").tensors())
    sparse = [n for n, t in stored.items() if isinstance(t, SparseSemiStructuredTensorCUTLASS)]
    assert len(sparse) == 14
    for name, tensor in stored.items():
        found, expected = restore(tensor), dense.pop(name)
        assert torch.equal(found.view(torch.int16), expected.view(torch.int16)), name
    assert not dense
    model = export.load(tmp_path / "out")
    for name in sparse:
        weight = model.get_submodule(name.removesuffix(".weight")).weight
        assert isinstance(weight, SparseSemiStructuredTensor)
    before = AutoModelForCausalLM.from_pretrained(source).to(model.device)
    with torch.no_grad():
        logits, expected = (m(ids.to(model.device)).logits.float() for m in (model, before))
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_layers_that_torchao_does_not_take_stay_dense(torchao, pruned, tmp_path):
    source = pruned(num_key_value_heads=1, **SIZES)  # 16 rows in k_proj and v_proj
    main([str(source), "--format", "torchao", "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    dense = {row["name"]: row["dense_because"] for row in report["layers"] if row["dense_because"]}
    assert dense == {
        f"model.layers.{k}.self_attn.{name}": "16×64 is not a multiple of 32×64"
        for k in (0, 1)
        for name in ("k_proj", "v_proj")
    }
    assert why_not_storable((64, 64), torch.float32) is not None
    assert why_not_storable((64, 64), torch.float16) is None


def test_a_model_without_a_layer_for_torchao_is_refused(torchao, pruned, tmp_path, capsys):
    for source in (pruned(dtype=torch.float32, **SIZES), pruned("gpt2", n_embd=64)):
        args = [str(source), "--format", "torchao", "--out", str(tmp_path / "out")]
        assert "no layer that can be packed" in refusal(args, capsys)
        assert not (tmp_path / "out").exists()


def test_the_file_holds_tensors_only(torchao, pruned, tmp_path):
    source = pruned(**SIZES)
    main([str(source), "--format", "torchao", "--out", str(tmp_path / "out")])
    file = tmp_path / "out" / "pytorch_model.bin"
    code = (  # in a process that has made no such tensor before
        "import torch; from export.loading import read;"
        "from export.torchao_tensors import restore;"
        f"tensors = read({str(file)!r});"
        "print(sum(int((restore(t) == 0).sum()) for n, t in tensors.items() if 'proj' in n))"
    )
    command = [sys.executable, "-W", PROTOTYPE, "-c", code]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    weights = load_file(source / "model.safetensors")
    assert int(shown) == sum(int((t == 0).sum()) for n, t in weights.items() if "proj" in n) > 0
    with pytest.raises(Exception, match="Weights only load failed"):
        torch.load(file, weights_only=True)
    torch.save({"weight": Path("code")}, file)
    with pytest.raises(Exception, match="Weights only load failed"):
        export.load(tmp_path / "out")


def test_what_is_wrong_is_told(torchao, pruned, tmp_path):
    main([str(pruned(**SIZES)), "--format", "torchao", "--out", str(tmp_path / "out")])
    with pytest.raises(OptionError, match=r"cannot run these layers:\n  model.layers.0"):
        export.load(tmp_path / "out", dtype=torch.float32)
    file = tmp_path / "out" / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"]["format_version"] = 2
    file.write_text(json.dumps(config))
    with pytest.raises(FormatError, match="`quantization_config.format_version` is 2"):
        export.load(tmp_path / "out")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here it is written")
def test_without_cuda_it_is_refused_with_the_next_step(llama, capsys):
    shown = refusal([str(llama), "--format", "torchao"], capsys)
    assert "are for CUDA devices, and this is 'cpu'" in shown
    assert "`--format packed`" in shown
    assert [path.name for path in llama.parent.iterdir()] == ["llama"]
    config = json.loads((llama / "config.json").read_text())
    settings = {"quant_method": "mrp_torchao24", "format_version": 1, "modules": []}
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(OptionError, match=r"cannot run here: .* `--format packed`"):
        export.load(llama)
