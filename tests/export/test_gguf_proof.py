"""A GGUF file is compared with the files of the checkpoint, whatever the configuration says."""

import functools
import json
import shutil

import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("accelerate", reason="needs the extra `gguf`")

import gguf
from gguf_files import tensors_of, values_of

from callbacks import MRPCallback
from export.gguf import file as gguf_file
from export.gguf.types import Encoded, encode
from export.to_gguf import main
from mrp_lightning import CausalLM, Trainer

from . import conftest
from .conftest import change

HEAD, TABLE = "lm_head.weight", "model.embed_tokens.weight"


def configure(directory, **values):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def tensors_in(file):
    return {name: values_of(tensor) for name, tensor in tensors_of(file).items()}


refusal = functools.partial(conftest.refusal, command=main)


@pytest.fixture
def model(tiny_llama, tmp_path):
    """A tiny LLaMA with tied embeddings, to be changed."""
    directory = shutil.copytree(tiny_llama, tmp_path / "model")
    assert json.loads((directory / "config.json").read_text())["tie_word_embeddings"]
    return directory


@pytest.fixture
def other_head(model):
    """The model with a head of its own, and with a configuration that still ties it."""
    table = load_file(model / "model.safetensors")[TABLE]
    noise = torch.randn(table.shape, generator=torch.Generator().manual_seed(0))
    change(model, **{HEAD: 0.5 * table + 0.01 * noise})
    return model


def test_a_head_that_differs_from_the_embeddings_is_written(other_head, tmp_path):
    out = tmp_path / "out.gguf"
    main([str(other_head), "--type", "f32", "--out", str(out)])
    stored, source = tensors_in(out), load_file(other_head / "model.safetensors")
    assert torch.equal(stored["output.weight"], source[HEAD])
    assert torch.equal(stored["token_embd.weight"], source[TABLE])


def test_also_where_the_other_file_has_none(model, tmp_path, tiny_llama):
    tied, out = tmp_path / "tied.gguf", tmp_path / "out.gguf"
    main([str(model), "--type", "f32", "--out", str(tied)])
    assert "output.weight" not in tensors_in(tied)
    table = load_file(model / "model.safetensors")[TABLE]
    change(model, **{HEAD: -table})
    main([str(model), "--type", "f32", "--like", str(tied), "--out", str(out)])
    assert torch.equal(tensors_in(out)["output.weight"], -table)


def test_also_after_a_pruning_that_puts_it_on_a_grid(other_head, tmp_path):
    windows = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))
    callback = MRPCallback(sparsity=0.5, head_grid="q8_0", save_dir=tmp_path / "run")
    trainer = Trainer(**QUIET)
    loader = torch.utils.data.DataLoader(windows, batch_size=4)
    trainer.predict(CausalLM(other_head), loader, callbacks=[callback])
    main([str(tmp_path / "run")])
    stored = tensors_of(tmp_path / "run.gguf")
    assert stored["output.weight"].tensor_type.name == "Q8_0"
    source = load_file(tmp_path / "run" / "model.safetensors")
    values = tensors_in(tmp_path / "run.gguf")
    assert torch.equal(values["output.weight"].to(source[HEAD].dtype), source[HEAD])
    assert torch.equal(values["token_embd.weight"], source[TABLE].float())
    assert not torch.equal(source[HEAD], source[TABLE])


def test_only_a_head_in_the_files_gives_the_embeddings(model, tmp_path):
    """transformers ties the other way then."""
    table = load_file(model / "model.safetensors")[TABLE]
    change(model, **{HEAD: table, TABLE: None})
    main([str(model), "--type", "f32", "--out", str(tmp_path / "out.gguf")])
    stored = tensors_in(tmp_path / "out.gguf")
    assert torch.equal(stored["token_embd.weight"], table)
    assert "output.weight" not in stored


def test_a_tensor_that_the_model_lacks_is_named(model, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    change(model, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    main([str(model), "--out", str(out)])  # transformers computes it
    change(model, **{"score.weight": torch.ones(2, 4)})
    error = refusal([model, "--out", out, "--overwrite"], capsys)
    assert "that its class LlamaForCausalLM has no place for" in error
    assert "score.weight" in error


def test_float32_under_a_configuration_of_bfloat16_is_not_rounded_unsaid(model, tmp_path, capsys):
    configure(model, dtype="bfloat16")
    out = tmp_path / "out.gguf"
    main([str(model), "--type", "auto", "--out", str(out)])
    assert "Each holds the weights of the checkpoint to the bit." in capsys.readouterr().out
    assert torch.equal(
        tensors_in(out)["token_embd.weight"], load_file(model / "model.safetensors")[TABLE]
    )
    main([str(model), "--type", "bf16", "--out", str(out), "--overwrite"])
    assert "were rounded, by up to 0." in capsys.readouterr().out


def test_tokens_without_embeddings_are_named(model, tmp_path, capsys):
    file = model / "tokenizer.json"
    content = json.loads(file.read_text())
    rows = len(load_file(model / "model.safetensors")[TABLE])
    content["added_tokens"].append(content["added_tokens"][0] | {"id": rows, "content": "<new>"})
    file.write_text(json.dumps(content))
    error = refusal([model, "--out", tmp_path / "out.gguf"], capsys)
    assert f"1 token without an embedding, as the model has {rows:,}: '<new>' ({rows})" in error
    assert f"resize_token_embeddings({rows + 1})" in error


def test_metadata_of_another_file_must_be_those_of_the_checkpoint(model, tmp_path, capsys):
    like = tmp_path / "like.gguf"
    main([str(model), "--out", str(like)])
    configure(model, rms_norm_eps=1e-3, rope_parameters={"rope_type": "linear", "factor": 2.0})
    error = refusal([model, "--like", like, "--out", tmp_path / "out.gguf"], capsys)
    assert "llama.attention.layer_norm_rms_epsilon: " in error
    assert "the checkpoint's 0.001" in error
    configure(model, rms_norm_eps=1e-6, hidden_act="relu")
    error = refusal([model, "--like", like, "--out", tmp_path / "out.gguf"], capsys)
    assert "`hidden_act` is 'relu'" in error


BREAKS = {
    "another tensor": lambda encoded: Encoded(encoded.content[::-1].copy(), encoded.kind),
    "in place of": lambda encoded: Encoded(encoded.content[:-1], encoded.kind),
}


@pytest.mark.parametrize("message", BREAKS)
def test_a_file_that_holds_another_tensor_is_no_success(
    message, model, tmp_path, capsys, monkeypatch
):
    def broken(name, *arguments):
        encoded = encode(name, *arguments)
        return BREAKS[message](encoded) if name == "blk.1.ffn_up.weight" else encoded

    monkeypatch.setattr(gguf_file, "encode", broken)
    error = refusal([model, "--out", tmp_path / "out.gguf"], capsys, 1)
    (line,) = (line for line in error.splitlines() if "model.layers.1.mlp.up_proj.weight: " in line)
    assert message in line
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_without_a_tensor_is_no_success(model, tmp_path, capsys, monkeypatch):
    add = gguf.GGUFWriter.add_tensor

    def lossy(writer, name, *arguments, **options):
        if name != "blk.0.attn_norm.weight":
            add(writer, name, *arguments, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", lossy)
    error = refusal([model, "--out", tmp_path / "out.gguf"], capsys, 1)
    assert "model.layers.0.input_layernorm.weight: missing" in error


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
    return tensors_of(out)


def test_each_tensor_of_the_files_is_in_the_file(gpt2, capsys):
    stored = convert(gpt2)
    shown = capsys.readouterr().out
    assert "Each holds the weights of the checkpoint to the bit." in shown
    assert "Note" not in shown
    weight = load_file(gpt2 / "model.safetensors")["transformer.h.0.mlp.c_fc.weight"]
    assert torch.equal(torch.from_numpy(stored["blk.0.ffn_up.weight"].data.copy()), weight.T)
    assert "output.weight" not in stored


def test_what_no_metadata_state_is_refused(gpt2, capsys):
    paths = [gpt2, "--like", gpt2.with_name("like.gguf"), "--out", gpt2.with_name("out.gguf")]
    configure(gpt2, architectures=["OwnForCausalLM"])
    assert "`architectures` names OwnForCausalLM" in refusal(paths, capsys)
    configure(gpt2, auto_map={"AutoModelForCausalLM": "own.Own"}, activation_function="relu")
    error = refusal(paths, capsys)
    assert "`activation_function` 'relu'" in error
    assert "`auto_map` gives code" in error


def test_what_cannot_be_compared_is_named(gpt2, capsys):
    configure(gpt2, scale_attn_by_inverse_layer_idx=True)
    convert(gpt2)
    note = "Note: `scale_attn_by_inverse_layer_idx` True of config.json was not compared: llama.cpp"
    assert note in capsys.readouterr().out
