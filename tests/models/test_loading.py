"""Models and tokenizers are found, or an error says which cannot be loaded, and why."""

import functools
import json
import pickle
import re
import shutil
import socketserver
import threading

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.utils import is_flash_attn_2_available

import export
from mrp_lightning import CausalLM, environment
from mrp_lightning.errors import DataError, FormatError, OptionError, TargetError
from mrp_lightning.models.checkpoint import why_not_readable
from mrp_lightning.models.loading import (
    find_tokenizer,
    load_config,
    load_model,
    load_tokenizer,
    tokenizer_files,
    tokenizer_from_files,
)
from mrp_lightning.models.locations import require_model
from mrp_lightning.text.sources import PUBLISHED, find_files
from mrp_sparse.formats.bitmask import BITMASK
from mrp_sparse.formats.bitmask4 import BITMASK4
from mrp_sparse.formats.sparse24 import SPARSE24


def test_a_model_may_come_without_a_tokenizer(tiny_llama, tmp_path):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    assert find_tokenizer(str(tmp_path)) is None
    assert find_tokenizer("someone/something") is None
    for source in (tmp_path / "absent", "someone/something"):
        with pytest.raises(FileNotFoundError, match=f"`tokenizer`: {source} gives no tokenizer"):
            load_tokenizer(source)


BERT = {"vocab.txt": "[UNK]\n[CLS]\n[SEP]\n[PAD]\n[MASK]\ndef"}
GPT2 = {"vocab.json": '{"a": 3, "b": 4, "ab": 5}', "merges.txt": "#version: 0.2\na b"}


@pytest.mark.parametrize(
    ("model_type", "files", "text", "ids"),
    [("bert", BERT, "def", [1, 5, 2]), ("gpt2", GPT2, "aba", [5, 3])],
)
def test_a_vocabulary_is_a_tokenizer(model_type, files, text, ids, tmp_path):
    for name, content in {**files, "config.json": json.dumps({"model_type": model_type})}.items():
        (tmp_path / name).write_text(content)
    assert find_tokenizer(str(tmp_path))(text).input_ids == ids


def test_several_chat_templates_stay_with_a_tokenizer(tiny_llama):
    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.chat_template = {"default": "{{ messages }}", "tool": "{{ tools }}"}
    files = tokenizer_files(tokenizer)
    assert files["additional_chat_templates/tool.jinja"] == b"{{ tools }}"
    assert tokenizer_from_files(files).chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("name", "text", "load"),
    [("tokenizer.json", "{", load_tokenizer), ("tokenizer_config.json", "{}", find_tokenizer)],
)
def test_a_tokenizer_that_cannot_be_loaded_is_named(tiny_llama, tmp_path, name, text, load):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"`tokenizer`: the tokenizer of {tmp_path} cannot be load"):
        load(str(tmp_path))


@pytest.fixture
def asked(monkeypatch):
    """What the hub, which is away, is asked for."""
    names = []

    def ask(pretrained_model_name_or_path, **_):
        names.append(pretrained_model_name_or_path)
        raise OSError("no hub")

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", ask)
    for auto in (AutoConfig, AutoTokenizer, AutoModelForCausalLM):
        monkeypatch.setattr(auto, "from_pretrained", ask)
    return names


@pytest.mark.parametrize("source", ["runs/absent", "a/b/c", "./absent", "~/absent", "/absent/x"])
def test_a_path_that_does_not_exist_is_not_asked_of_the_hub(source, asked, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=f"`model`: there is no directory {source}"):
        load_config(source)
    with pytest.raises(FileNotFoundError, match=f"`tokenizer`: {source} gives no tokenizer"):
        load_tokenizer(source)
    assert find_tokenizer(source) is None
    assert not asked


def test_the_hub_is_asked_for_what_can_be_an_id(asked, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for source in ("gpt2", "someone/something"):
        for load in (load_config, load_tokenizer):
            with pytest.raises(FileNotFoundError):
                load(source)
    assert asked == ["gpt2", "gpt2", "someone/something", "someone/something"]


@pytest.fixture
def mute_hub(monkeypatch):
    """A hub that hangs up on every request, and what it was asked."""
    asked: list[str] = []

    class Mute(socketserver.StreamRequestHandler):
        def handle(self):
            asked.append(self.rfile.readline().decode().strip())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Mute) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        environment._ask_hub.cache_clear()
        yield asked
        environment._ask_hub.cache_clear()
        server.shutdown()


def test_a_hub_that_cannot_be_reached_is_asked_once(mute_hub):
    for load in (load_config, load_tokenizer, load_config):
        with pytest.raises(FileNotFoundError, match=r"http://127\.0\.0\.1:\d+ cannot be reached"):
            load("someone/something")
    assert find_tokenizer("someone/something") is None
    with pytest.raises(FileNotFoundError, match="cannot be reached"):
        find_files([PUBLISHED["ptb"]], "test")
    assert [line.split()[:2] for line in mute_hub] == [["HEAD", "/"]]


def test_what_lies_in_the_cache_needs_no_hub(mute_hub, tiny_llama, tmp_path, monkeypatch):
    cached = tmp_path / "models--someone--something"
    shutil.copytree(tiny_llama, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_model("someone/something", None).config.hidden_size == 32
    assert find_tokenizer("someone/something") is not None
    assert len(mute_hub) == 1


QUANTIZED = [
    {"quant_method": "gptq", "bits": 4},
    {"quant_method": "bitsandbytes", "load_in_8bit": True},
    {"quant_method": "fp8"},
]


@pytest.mark.parametrize("settings", QUANTIZED, ids=lambda settings: settings["quant_method"])
def test_a_quantized_checkpoint_is_refused_before_its_weights_are_read(
    settings, tiny_llama, tmp_path, monkeypatch
):
    config = json.loads((tiny_llama / "config.json").read_text())
    config["quantization_config"] = settings
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: 1 / 0)
    message = rf"{re.escape(str(tmp_path))} is quantized \({settings['quant_method']}\).*16 bits"
    with pytest.raises(TargetError, match=message):
        load_model(str(tmp_path), None)


def test_what_can_be_read_is_not_refused_and_an_unknown_model_is_named(tiny_llama, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llamma"}')
    with pytest.raises(FormatError, match=f"`model`: {tmp_path} cannot be loaded.*`llamma`"):
        load_config(str(tmp_path))
    config = AutoConfig.from_pretrained(tiny_llama)
    assert why_not_readable(config) is None
    dequantized = {"quant_method": "mxfp4", "dequantize": True}
    ours = [{"quant_method": form.quant_method} for form in (BITMASK, BITMASK4, SPARSE24)]
    for settings in (*ours, dequantized):
        config.quantization_config = settings
        assert why_not_readable(config) is None


@pytest.fixture
def copy(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, tmp_path / "copy")
    return tmp_path / "copy"


def cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


@pytest.mark.parametrize(
    "damage",
    [cut, lambda _: b"", lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\n"],
    ids=["cut off", "empty", "a pointer"],
)
def test_a_damaged_safetensors_file_is_named(copy, damage):
    path = copy / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    size = f"{path.stat().st_size:,}"
    message = rf"(?s){re.escape(str(copy))}.*model\.safetensors: its {size} bytes are no whole"
    with pytest.raises(FormatError, match=message):
        load_model(str(copy), None)


@pytest.mark.parametrize("content", ['{"eos_token_id": ', "[]", '{"eos_token_id": ["</s>"]}'])
def test_a_damaged_generation_config_is_named(copy, content):
    (copy / "generation_config.json").write_text(content)
    for load_it in (lambda: load_model(str(copy), None), lambda: export.load(copy)):
        with pytest.raises(FormatError, match=r"generation_config\.json.* or fetch it again"):
            load_it()
    (copy / "generation_config.json").write_text('{"eos_token_id": [1, 2], "bos_token_id": null}')
    assert load_model(str(copy), None).generation_config.eos_token_id == [1, 2]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol 4")
def test_a_pickle_is_named_and_runs_nothing(copy, harmful):
    weights, pickled = load_file(copy / "model.safetensors"), copy / "pytorch_model.bin"
    (copy / "model.safetensors").unlink()
    torch.save(weights, pickled)
    assert load_model(str(copy), None).model.embed_tokens.weight.shape == (2048, 32)

    torch.save({**weights, "more": harmful}, pickled)
    with pytest.raises(FormatError, match=r"pytorch_model\.bin: .* calls posix\.mkdir, .* not run"):
        load_model(str(copy), None)
    pickled.write_bytes(pickle.dumps(harmful))
    with pytest.raises(FormatError, match=r"pytorch_model\.bin: it is no whole pickle of tensors"):
        load_model(str(copy), None)
    torch.save(weights, pickled)
    pickled.write_bytes(cut(pickled.read_bytes()))
    with pytest.raises(FormatError, match=r"pytorch_model\.bin: "):
        load_model(str(copy), None)


@pytest.mark.parametrize(("kind", "streaming"), [("whole", True), ("base", False)])
def test_blocks_beyond_the_configuration_are_counted(copy, kind, streaming):
    """transformers would leave them out, and name their tensors in a table alone."""
    model = load_model(str(copy), None)
    (model if kind == "whole" else model.model).save_pretrained(copy)
    config = json.loads((copy / "config.json").read_text()) | {"num_hidden_layers": 1}
    config["architectures"] = ["LlamaForCausalLM"]
    (copy / "config.json").write_text(json.dumps(config))
    message = (
        r"larger model than its .*: 1 of `model\.layers`, and the files hold 1 more\..*num_hid"
    )
    with pytest.raises(TargetError, match=message):
        CausalLM(copy, streaming=streaming)


def test_what_is_no_block_beyond_the_configuration_is_left_out(copy):
    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()  # is tied to it
    weights["model.layers.1.self_attn.masked_bias"] = torch.zeros(1)  # a buffer of old
    for name in [name for name in weights if "layers.1." in name]:
        weights[name.replace("layers.1.", "layers.2.")] = weights[name].clone()  # predicts further
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((copy / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (copy / "config.json").write_text(json.dumps(config))
    assert len(load_model(str(copy), None).model.layers) == 2


def test_an_empty_name_is_not_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    named = functools.partial(CausalLM, gguf_file="some.gguf")
    for load, name in ((CausalLM, ""), (load_config, " "), (load_tokenizer, ""), (named, " ")):
        with pytest.raises(OptionError, match=r"`model` or `tokenizer` is empty .*is `\.`"):
            load(name)


@pytest.mark.parametrize("streaming", [False, True])
def test_tensors_that_the_class_has_no_place_for_are_not_dropped(copy, streaming):
    weights = load_file(copy / "model.safetensors")
    save_file(weights | {"score.weight": torch.zeros(2, 32)}, copy / "model.safetensors")
    message = r"class LlamaForCausalLM has no place for, .*: score\.weight\. .*`architectures`"
    with pytest.raises(TargetError, match=message):
        CausalLM(copy, streaming=streaming)


def test_an_adapter_beside_a_model_is_named(copy, monkeypatch):
    """With peft, transformers would load the adapter; without, the model as if it had none."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: 1 / 0)
    (copy / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    message = r"adapter beside a model \(adapter_config\.json\).*merge_and_unload.*move adapter_con"
    with pytest.raises(FormatError, match=message):
        load_model(str(copy), None)
    (copy / "config.json").unlink()
    with pytest.raises(FormatError, match="holds a PEFT adapter, and no model"):
        require_model(str(copy))  # as commands do, before they load torch


@pytest.mark.skipif(is_flash_attn_2_available(), reason="flash-attn is installed")
@pytest.mark.parametrize("trust", [False, True])
def test_an_attention_kernel_that_is_not_here_is_named(copy, trust):
    config = json.loads((copy / "config.json").read_text())
    config["attn_implementation"] = "flash_attention_2"
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match="FlashAttention2"):
        load_model(str(copy), None, trust_remote_code=trust)
    model = load_model(str(copy), None, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
