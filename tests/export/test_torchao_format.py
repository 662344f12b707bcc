"""`--format torchao`, on CPU kernels that stand in for those of CUDA."""

import json

import pytest
import torch
from torch.sparse import SparseSemiStructuredTensor
from transformers import AutoModelForCausalLM

import export
from export.loading import why_not_torchao as why_not
from export.to_sparse import main
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.targets.layers import is_linear

from .conftest import refusal

SIZES = {"hidden_size": 64, "intermediate_size": 128}

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemiStructuredTensor")


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
    main([str(source), "--format", "packed", "--out", str(tmp_path / "packed")])
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) == (1 if max_shard_size == "5GB" else 3)
    for file in files:  # only the configuration differs
        assert file.read_bytes() == (tmp_path / "packed" / file.name).read_bytes()
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert report["totals"]["packed_layers"] == len(report["parity"]["operators"]) == 14
    assert report["parity"]["text"]["top1_agreement"] >= 0.995
    model = export.load(tmp_path / "out")
    weights = [module.weight for module in model.model.layers.modules() if is_linear(module)]
    assert len(weights) == 14
    assert all(isinstance(weight, SparseSemiStructuredTensor) for weight in weights)
    before = AutoModelForCausalLM.from_pretrained(source).to(model.device)
    with torch.no_grad():
        logits, expected = (m(ids.to(model.device)).logits.float() for m in (model, before))
    assert (logits - expected).norm() < 0.02 * expected.norm()


def test_layers_that_torchao_does_not_take_stay_dense(torchao, pruned, tmp_path):
    source = pruned(num_key_value_heads=1, **SIZES)  # 16 rows in k_proj and v_proj
    main([str(source), "--format", "torchao", "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    dense = {row["name"]: row["dense_because"] for row in report["layers"] if row["dense_because"]}
    # 16×64 fits the tiles of cuSPARSELt, and not those of CUTLASS.
    reason = why_not((16, 64), torch.bfloat16)
    names = [f"model.layers.{k}.self_attn.{name}" for k in (0, 1) for name in ("k_proj", "v_proj")]
    assert dense == (dict.fromkeys(names, reason) if reason else {})
    assert why_not((64, 64), torch.float32) is not None
    assert why_not((64, 64), torch.float16) is None


def test_a_model_without_a_layer_for_torchao_is_refused(torchao, pruned, tmp_path, capsys):
    for source in (pruned(dtype=torch.float32, **SIZES), pruned("gpt2", n_embd=64)):
        args = [str(source), "--format", "torchao", "--out", str(tmp_path / "out")]
        assert "no layer that can be packed" in refusal(args, capsys)
        assert not (tmp_path / "out").exists()


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
    shown = refusal([llama, "--format", "torchao"], capsys)
    assert "are for CUDA devices, and this is 'cpu'" in shown
    assert "`--format packed`" in shown
    assert [path.name for path in llama.parent.iterdir()] == ["llama"]
    config = json.loads((llama / "config.json").read_text())
    settings = {"quant_method": "mrp_torchao24", "format_version": 1, "modules": []}
    (llama / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    with pytest.raises(OptionError, match=r"cannot run here: .* `--format packed`"):
        export.load(llama)
