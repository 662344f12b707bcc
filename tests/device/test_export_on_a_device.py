"""Packed models on a device: nothing of them stays on the CPU, and they compute the same."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file
from shapes import SHAPES, packed_copy, prunable, random_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from export import continuation, generate
from export.conversion.checkpoint import open_checkpoint
from export.conversion.parity import check_parity
from export.conversion.selection import choose_layers
from export.conversion.writing import write_packed
from export.loading import load
from export.speed import Decoder, prefill
from export.to_sparse import main as to_sparse
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_sparse.eight_bit_head import EightBitLinear
from mrp_sparse.huggingface import expand_bitmasks
from mrp_sparse.own_module import load_into
from mrp_sparse.packed_linear import BitmaskLinear, Sparse24Linear

pytestmark = pytest.mark.usefixtures("short_library")
KINDS = {
    "llama": {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 64, "num_attention_heads": 4},
}


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    common = {"model_type": request.param, "vocab_size": 2048, "hidden_size": 32}
    common["tie_word_embeddings"] = True
    small = common | {"num_hidden_layers": 2, "max_position_embeddings": 1024}
    monkeypatch.setitem(SHAPES, request.param, small | KINDS[request.param])
    return request.param


def decoded(model, prompt):
    decoder = Decoder(model, prompt, new_tokens=4)
    tokens = [int(decoder.token)]
    for _ in range(4):
        decoder.step()
        tokens.append(int(decoder.token))
    decoder.rewind()
    assert int(decoder.token) == tokens[0]
    return tokens


@torch.no_grad()
def test_packed_and_dense_models_are_timed_where_they_are(second, kind):
    model = random_model(kind, torch.float32, second)
    assert {tensor.device for tensor in model.state_dict().values()} == {second}
    model.set_attn_implementation("eager")
    sparse, dense = packed_copy(model, prunable(model)), model
    prompt = torch.randint(2048, (2, 9)).to(second)[:1]
    here = [copy.deepcopy(m).to("cpu") for m in (sparse, dense)]
    for there, twin in zip((sparse, dense), here, strict=True):
        logits = prefill(there, prompt)
        assert logits.device == second
        if second.type == "cuda":
            torch.testing.assert_close(logits.cpu(), prefill(twin, prompt.cpu()))
        else:
            assert torch.equal(logits.cpu(), prefill(twin, prompt.cpu()))
            assert decoded(there, prompt) == decoded(twin, prompt.cpu())


def test_the_parity_gate_runs_on_the_device(second, kind, tmp_path):
    torch.manual_seed(0)
    random_model(kind, torch.bfloat16, torch.device("cpu")).save_pretrained(tmp_path / "pruned")
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(tmp_path / "pruned")
    source = open_checkpoint(tmp_path / "pruned")
    layers = choose_layers(source)
    (tmp_path / "packed").mkdir()
    for _ in write_packed(source, tmp_path / "packed", layers):
        pass
    parity = check_parity(source, tmp_path / "packed", layers, device=second)
    assert parity.failures == []
    assert len(parity.operators) == sum(layer.reason is None for layer in layers) > 0
    assert parity.text is not None
    # Kernels for many tokens sum in another order than dense products: within rounding, not bits.
    assert parity.text.confident_agreement == 1
    assert parity.text.max_difference < 0.01


def test_dense_weights_are_where_the_packed_ones_are(second, kind):
    here = packed_copy(*prunable_model(kind))
    there = copy.deepcopy(here).to(second)
    layers = [m for m in here.modules() if isinstance(m, Sparse24Linear)]
    assert layers
    others = [m for m in there.modules() if isinstance(m, Sparse24Linear)]
    for layer, other in zip(layers, others, strict=True):
        assert other.to_linear().weight.device == second
        assert torch.equal(other.to_linear().weight.cpu(), layer.to_linear().weight)


def prunable_model(kind):
    model = random_model(kind, torch.float32, torch.device("cpu"))
    return model, prunable(model)


@pytest.mark.parametrize("head_bits", [8, 16])
def test_bitmasks_are_dense_on_another_device(second, head_bits, tmp_path, caplog):
    """Dense products are faster there. On a CPU they stay packed."""
    source = tmp_path / "pruned"
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA, dtype=torch.float32)
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data *= torch.rand(module.weight.shape) < 0.5
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(source)
    out = tmp_path / "packed"
    form = ["--format=bitmask", f"--head-bits={head_bits}", "--device=cpu"]
    to_sparse([str(source), f"--out={out}", *form])
    caplog.clear()
    here = load(out)
    kinds = BitmaskLinear, EightBitLinear
    packed = [module for module in here.modules() if isinstance(module, kinds)]
    assert len(packed) == 28 + (head_bits == 8)
    assert expand_bitmasks(here) is here
    assert caplog.records == []
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        expected = copy.deepcopy(here)(ids).logits
        there = expand_bitmasks(copy.deepcopy(here).to(second))
        assert not [module for module in there.modules() if isinstance(module, kinds)]
        assert {tensor.device for tensor in there.state_dict().values()} == {second}
        logits = there(ids.to(second)).logits.cpu()
    assert (logits - expected).norm() < 0.01 * expected.norm()  # attention rounds otherwise there
    (record,) = caplog.records
    assert f"made dense: {len(packed)} packed layers" in record.message


def test_generate_writes_the_same_text_on_the_device(second, tmp_path, monkeypatch, capsys):
    model = AutoModelForCausalLM.from_pretrained(STDLIB_LLAMA, dtype=torch.float32)
    for module in model.model.modules():
        if isinstance(module, nn.Linear):
            module.weight.data.view(-1, 4)[:, ::2] = 0
    model.set_attn_implementation("eager")  # the stand-in has no other
    model.save_pretrained(tmp_path / "pruned")
    AutoTokenizer.from_pretrained(STDLIB_LLAMA).save_pretrained(tmp_path / "pruned")
    to_sparse([f"{tmp_path}/pruned", f"--out={tmp_path}/packed", "--device=cpu"])
    if second.type != "cuda":  # its tensors have no storage
        numbers = lambda model: sum(tensor.nbytes for tensor in model.parameters())  # noqa: E731
        monkeypatch.setattr(continuation, "storage_bytes", numbers)
    options = [f"{tmp_path}/packed", "--compare", f"{tmp_path}/pruned", "--eager"]
    capsys.readouterr()
    written = []
    for device in (torch.device("cpu"), second):
        monkeypatch.setattr(continuation, "device_named", lambda _, device=device: device)
        generate.main([*options, "--prompt", "import os", "--max-new-tokens", "6"])
        lines = capsys.readouterr().out.splitlines()
        written.append([line for line in lines if "tokens" not in line and "On " not in line])
        assert "times the tokens a second" in lines[-1]
    assert written[0] == written[1]
    assert sum("import os" in line for line in written[0]) == 2


def test_a_module_on_the_device_gets_the_dense_weights_of_bitmasks(second, tmp_path):
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), Conv1D(16, 32))

    source = made()
    for layer in (source[0], source[2]):
        layer.weight.data *= torch.rand(layer.weight.shape) < 0.5
    packed = copy.deepcopy(source)
    for name in ("0", "2"):
        packed.set_submodule(name, BitmaskLinear.from_linear(packed.get_submodule(name)))
    save_file(packed.state_dict(), tmp_path / "model.safetensors")
    kept = {name: packed.get_submodule(name).weight.numel() for name in ("0", "2")}
    settings = {"quant_method": "mrp_bitmask", "format_version": 1, "modules": kept}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    loaded = load_into(made().to(second), tmp_path)
    for name, tensor in source.state_dict().items():
        assert loaded.state_dict()[name].device == second
        assert torch.equal(loaded.state_dict()[name].cpu(), tensor)
