"""A GGUF file of a family that is not known here: its metadata are taken, some compared."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("accelerate", reason="needs the extra `gguf`")

import gguf

from export.to_gguf import main

SIZES = {"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 1024}


@pytest.fixture
def gpt2(tmp_path):
    """A GPT-2, and the file that llama.cpp's converter makes of it: matrices are transposed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **SIZES))
    model.save_pretrained(tmp_path / "gpt2")
    writer = gguf.GGUFWriter(tmp_path / "like.gguf", "gpt2")
    writer.add_context_length(1024)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_layer_norm_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(64)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, 1)
    for name, parameter in model.named_parameters():
        values = parameter.detach()
        values = values.T.contiguous() if ".c_" in name and values.ndim == 2 else values
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, values.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "gpt2"


def convert(directory):
    out = directory.with_name("out.gguf")
    like = directory.with_name("like.gguf")
    main([str(directory), "--like", str(like), "--type", "f32", "--out", str(out)])
    return {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}


def configure(directory, **values):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_each_tensor_of_the_files_is_in_the_file(gpt2, capsys):
    stored = convert(gpt2)
    shown = capsys.readouterr().out
    assert "Each holds the weights of the checkpoint to the bit." in shown
    assert "Note" not in shown
    weight = load_file(gpt2 / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(torch.from_numpy(stored["blk.0.ffn_up.weight"].data.copy()), weight.T)
    assert "output.weight" not in stored


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "relu"}, "`activation_function` 'relu'"),
        ({"auto_map": {"AutoModelForCausalLM": "own.Own"}}, "`auto_map` gives code"),
        ({"architectures": ["OwnForCausalLM"]}, "`architectures` names OwnForCausalLM"),
    ],
)
def test_what_no_metadata_state_is_refused(change, message, gpt2, capsys):
    configure(gpt2, **change)
    with pytest.raises(SystemExit) as ended:
        convert(gpt2)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_compared_is_named(gpt2, capsys):
    configure(gpt2, scale_attn_by_inverse_layer_idx=True)
    convert(gpt2)
    note = "Note: `scale_attn_by_inverse_layer_idx` True of config.json was not compared: llama.cpp"
    assert note in capsys.readouterr().out
