"""GGUF files, against the same tensors and tokenizer as a Hugging Face directory."""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from quiet import QUIET
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks import MRPCallback
from mrp_lightning import CausalLM, TextDataModule, Trainer
from mrp_lightning.commands.main import main
from mrp_lightning.errors import DependencyError, FormatError, OptionError
from mrp_lightning.models.gguf import reading
from mrp_lightning.models.loading import load_config, load_tokenizer
from mrp_lightning.upstream.other_names import bounded_gguf

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("accelerate", reason="needs the extra `gguf`")

import gguf
from gguf_files import write

TEXT = "def compute(value):\n    return value + 1\n"


@pytest.fixture
def several(tiny_gguf, tmp_path) -> Path:
    for name in ("a.gguf", "b.gguf"):
        shutil.copy(tiny_gguf, tmp_path / name)
    return tmp_path


def test_a_file_is_the_model_that_it_was_made_from(tiny_gguf, tiny_llama, several):
    expected = AutoModelForCausalLM.from_pretrained(tiny_llama)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
    ids = torch.tensor([tokenizer(TEXT).input_ids])
    shutil.copy(tiny_llama / "config.json", several)  # named beside it, the file is read
    for source in ((tiny_gguf,), (tiny_gguf.parent,), (several, "b.gguf")):
        loaded = CausalLM(str(source[0]), dtype="float32", gguf_file=(*source, None)[1])
        assert torch.equal(loaded(ids), expected(ids).logits)
        assert loaded.tokenizer(TEXT).input_ids == tokenizer(TEXT).input_ids
    default = CausalLM(tiny_gguf)
    assert default.model.dtype is torch.bfloat16
    for name, tensor in default.model.state_dict().items():
        assert torch.equal(tensor, expected.state_dict()[name].bfloat16()), name


def test_a_pruned_file_is_an_ordinary_directory(tiny_gguf, tmp_path):
    out = tmp_path / "pruned"
    module = CausalLM(tiny_gguf, dtype="float32")
    data = TextDataModule(__file__, num_samples=2, sequence_length=32)
    for save_dir in (tiny_gguf.parent, out):
        callback = MRPCallback(pattern="2:4", save_dir=save_dir, overwrite=True)
        with nullcontext() if save_dir is out else pytest.raises(FileExistsError, match="save_dir"):
            Trainer(**QUIET).predict(module, datamodule=data, callbacks=[callback])
    assert [path.name for path in tiny_gguf.parent.iterdir()] == ["tiny.gguf"]
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert "quantization_config" not in config
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype is torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, module.model.state_dict()[name].bfloat16()), name
    assert float((loaded.model.layers[1].mlp.up_proj.weight == 0).float().mean()) == 0.5
    assert AutoTokenizer.from_pretrained(out)(TEXT) == module.tokenizer(TEXT)


def test_a_lightning_checkpoint_does_not_need_the_file(tiny_gguf, tmp_path):
    module = CausalLM(tiny_gguf.parent, gguf_file=tiny_gguf.name)
    checkpoint = {"hyper_parameters": dict(module.hparams)}
    module.on_save_checkpoint(checkpoint)
    again = CausalLM(**checkpoint["hyper_parameters"])
    again.on_load_checkpoint(checkpoint)
    assert again.model.config.hidden_size == module.model.config.hidden_size
    assert again.tokenizer(TEXT).input_ids == module.tokenizer(TEXT).input_ids


@pytest.mark.parametrize("named", [True, False], ids=["by gguf_file", "by its path"])
def test_layers_reads_a_file(named, tiny_gguf, several, capsys):
    source = [f"--model={several}", "--gguf-file=a.gguf"] if named else [f"--model={tiny_gguf}"]
    main(["layers", "--json", "--pattern=2:4", *source])
    listing = json.loads(capsys.readouterr().out)
    assert listing["totals"]["layers"] == 14
    assert listing["model_class"] == "LlamaForCausalLM"
    assert listing["quantization"] is None


def test_the_command_line_takes_a_file_of_a_directory(several, tmp_path, capsys):
    pytest.importorskip("jsonargparse", reason="the command line needs the extra `cli`")
    options = [f"--model.model={several}", "--model.gguf_file=a.gguf"]
    options += ["--trainer.accelerator=cpu", "--trainer.logger=false"]
    options += ["--trainer.limit_test_batches=1", "--data.sequence_length=32"]
    main(["test", *options, f"--data.eval_files={__file__}"])
    assert "perplexity" in capsys.readouterr().out


def test_files_that_are_not_there_are_named(tiny_gguf, several, tmp_path):
    with pytest.raises(OptionError, match=r"2 GGUF files: a\.gguf, b\.gguf.*`gguf_file`"):
        CausalLM(several)
    with pytest.raises(FileNotFoundError, match=r"no file c\.gguf.*: a\.gguf, b\.gguf"):
        CausalLM(several, gguf_file="c.gguf")
    with pytest.raises(FileNotFoundError, match=r"there is no file .*absent\.gguf"):
        CausalLM(tmp_path / "absent.gguf")
    with pytest.raises(FileNotFoundError, match=r"no x\.gguf of that name.*HF_HUB_OFFLINE is set"):
        CausalLM("someone/something", gguf_file="x.gguf")
    with pytest.raises(OptionError, match="`gguf_file` needs `model`"):
        CausalLM({"model_type": "llama"}, gguf_file="x.gguf")


@pytest.mark.parametrize("order", [gguf.GGUFEndian.LITTLE, gguf.GGUFEndian.BIG])
def test_a_header_is_read_as_by_the_reader_of_gguf(order, tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama", endianess=order)
    arrays = {"words": ["a", "", "é²"], "ints": [1, -2], "floats": [0.5], "bools": [True]}
    for key, values in {**arrays, "nested": [[1, 2], [3]]}.items():
        writer.add_array(key, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours, expected = bounded_gguf(tmp_path / "x.gguf"), gguf.GGUFReader(tmp_path / "x.gguf")
    assert list(ours.fields) == list(expected.fields)
    for key, field in expected.fields.items():
        read = ours.fields[key]
        assert (read.offset, read.data, read.types) == (field.offset, field.data, field.types)
        assert list(map(bytes, read.parts)) == list(map(bytes, field.parts))
        assert read.contents() == field.contents()


@pytest.mark.parametrize("size", [0, 40, 0.3, 0.9])
def test_a_damaged_file_is_named(size, tiny_gguf, tmp_path):
    content = tiny_gguf.read_bytes()
    cut = content[: size if isinstance(size, int) else int(size * len(content))]
    damaged = tmp_path / "cut.gguf"
    damaged.write_bytes(cut)
    message = rf"`model`: .*cut\.gguf is damaged: its {len(cut):,} bytes are no whole GGUF file"
    with pytest.raises(FormatError, match=message):
        CausalLM(damaged)
    with pytest.raises(FormatError, match=message):
        load_tokenizer(damaged)


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
def test_a_lack_of_memory_is_no_damage(error, tiny_gguf):
    with pytest.raises(error), reading(tiny_gguf):
        raise error


def test_an_architecture_that_is_no_text_or_unknown_is_named(tiny_gguf, tiny_llama, tmp_path):
    key = b"general.architecture"
    content = bytearray(tiny_gguf.read_bytes())
    content[content.index(key) + len(key) + 4 + 8] = 0x99  # behind the type and the length
    damaged = tmp_path / "a.gguf"
    damaged.write_bytes(content)
    with pytest.raises(FormatError, match=r"`model`: .*a\.gguf is damaged: .*can't decode byte"):
        CausalLM(damaged)
    shutil.copy(tiny_llama / "model.safetensors", tmp_path / "x.gguf")
    with pytest.raises(FormatError, match=r"x\.gguf is damaged"):
        load_config(str(tmp_path / "x.gguf"))
    write(tmp_path / "new.gguf", tiny_llama, architecture="nova")
    with pytest.raises(FormatError, match=r"transformers [\d.]+ as the architecture 'nova'"):
        load_config(str(tmp_path / "new.gguf"))


def test_a_file_may_hold_no_tokenizer(tiny_llama, tmp_path):
    write(tmp_path / "bare.gguf", tiny_llama, with_tokenizer=False)
    assert CausalLM(tmp_path / "bare.gguf").tokenizer is None
    with pytest.raises(FileNotFoundError, match=r"`tokenizer`: .*bare\.gguf gives no tokenizer"):
        load_tokenizer(tmp_path / "bare.gguf")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_the_extra_is_named(package, tiny_gguf, tiny_llama, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DependencyError, match=r"tiny\.gguf needs .*\[gguf\]"):
        CausalLM(tiny_gguf)
    assert CausalLM(tiny_llama).tokenizer is not None
