"""Checkpoints that cannot be served are refused before the engine is up, with the next step."""

import json
import logging
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from served import engine

pytest.importorskip("vllm", reason="needs vLLM: `make vllm`")


@pytest.fixture
def copy(half, packed, tmp_path):
    """A copy of a packed directory, to damage."""
    return shutil.copytree(packed(half, "bitmask"), tmp_path / "copy")


def change(directory, edit, name="model.layers.1.mlp.down_proj.weight_bits"):
    """Let `edit` change the tensors of the file that holds one."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    file = directory / index["weight_map"][name]
    tensors = load_file(file)
    edit(tensors, name)
    save_file(tensors, file, {"format": "pt"})


def flip(tensors, name):
    tensors[name][3, 5] ^= 1


def drop(tensors, name):
    del tensors[name]


def cut(tensors, name):
    """Without its last row a weight is whole in itself, and too short for the model."""
    values, bits = name.removesuffix("_bits"), tensors[name]
    kept = sum(map(int.bit_count, bits[-1].tolist()))
    tensors[name], tensors[values] = bits[:-1].clone(), tensors[values][:-kept].clone()


def retype(tensors, name):
    tensors[name] = tensors[name].to(torch.int16)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (flip, r"damaged, \d+ weights are marked as kept, and there are \d+ values"),
        (drop, "weight_bits missing in the files"),
        (cut, r"weight_bits is \(255, 88\) in torch.uint8, expected \(256, 88\)"),
        (retype, "weight_bits is .* in torch.int16, expected"),
    ],
)
def test_damage(edit, message, copy):
    change(copy, edit)
    with pytest.raises(ValueError, match=rf"down_proj: {message}"):
        engine(copy)


def test_all_damaged_layers_are_listed(copy):
    names = [f"model.layers.{i}.self_attn.{x}_proj" for i, x in ((0, "q"), (3, "o"))]
    for name in names:
        change(copy, flip, f"{name}.weight_bits")
    with pytest.raises(ValueError, match="Export the pruned model again") as error:
        engine(copy)
    assert all(f"  {name}: damaged, " in str(error.value) for name in names)


def shorten(file):
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1)


@pytest.mark.parametrize("spoil", [shorten, lambda file: file.unlink()], ids=["cut off", "missing"])
def test_files_are_checked_before_a_worker_starts(spoil, copy):
    from vllm.engine.arg_utils import EngineArgs

    *_, last = sorted(copy.glob("*.safetensors"))
    arguments = EngineArgs(str(copy), dtype="bfloat16", max_model_len=64)
    assert arguments.create_engine_config().quant_config.get_name() == "mrp_bitmask"
    spoil(last)
    with pytest.raises(ValueError, match=rf"cannot be read whole.*\n.*{last.name}: "):
        arguments.create_engine_config()


@pytest.mark.parametrize("weight_map", [[], {"a": 1}, {"a": 1, "b": "c"}, {"a": {}}])
def test_an_index_that_names_no_files_is_damaged(weight_map, copy):
    from mrp_sparse.formats.bitmask import BITMASK
    from mrp_sparse.vllm.configuration import check_directory

    file = copy / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ValueError, match=r"index\.json is damaged .*Export the pruned model again"):
        check_directory(copy, BITMASK, [])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 2, "`quantization_config.format_version` is 2"),
        ("colour", "red", "also ..colour"),
        ("modules", [1], "expected an object of sizes by name"),
    ],
)
def test_settings_of_another_version(key, value, message, copy):
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"][key] = value
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        engine(copy)


def test_a_dtype_without_a_kernel(copy):
    with pytest.raises(ValueError, match=r"float64"):
        engine(copy, dtype="float64")


def test_a_packed_layer_that_vllm_does_not_have(copy):
    def double(tensors, name):
        for key in (name, name.removesuffix("_bits")):
            tensors[key.replace("1.mlp.down_proj", "9.mlp.gate")] = tensors[key].clone()

    change(copy, double)
    config = json.loads((copy / "config.json").read_text())
    config["quantization_config"]["modules"]["model.layers.9.mlp.gate"] = 3
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"no linear layer for 1 .* model.layers.9.mlp.gate"):
        engine(copy)


@pytest.mark.parametrize(("version", "warns"), [("0.32.1", False), ("0.33.0", True), ("0.9", True)])
def test_a_version_that_was_not_tested_warns(version, warns, monkeypatch, caplog):
    import vllm

    from mrp_sparse.vllm import register

    monkeypatch.setattr(vllm, "__version__", version)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    assert (f"this is {version}" in caplog.text) == warns
