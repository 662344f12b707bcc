"""Packed directories in the hands of transformers."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch
import warm
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import export
from export import Bitmask4Linear, BitmaskLinear, Sparse24Linear
from export.to_sparse import main
from mrp_lightning.errors import FormatError, OptionError
from mrp_sparse.formats.packed_format import NOTE

from .conftest import change, logits, refusal


def assert_equal_files(before: Path, after: Path) -> None:
    stored, again = (load_file(path / "model.safetensors") for path in (before, after))
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)


@pytest.fixture
def packed(exports, tmp_path) -> Path:
    return exports("packed", tmp_path).packed


KINDS = {"packed": Sparse24Linear, "bitmask": BitmaskLinear, "bitmask4": Bitmask4Linear}


def test_transformers_loads_saves_and_makes_them_dense(exported, ids, tmp_path):
    model, loading = AutoModelForCausalLM.from_pretrained(exported.packed, output_loading_info=True)
    assert not any(loading.values()), loading
    layers = [m for m in model.modules() if isinstance(m, KINDS[exported.form])]
    assert len(layers) == 14
    assert {layer.dtype for layer in layers} == {torch.bfloat16}
    assert not any(layer.weight.requires_grad for layer in layers)
    expected = logits(exported.source, ids)
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, expected)
        assert torch.allclose(model(ids[:1, :1]).logits, expected[:1, :1], atol=0.05)
    model.save_pretrained(tmp_path / "again")  # leaves the name of the dtype in the configuration
    assert_equal_files(exported.packed, tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again", ids), expected)
    in_float32 = logits(exported.packed, ids, dtype=torch.float32)
    assert in_float32.dtype == torch.float32
    assert torch.equal(in_float32, logits(exported.source, ids, dtype=torch.float32))
    dense = model.dequantize()
    with torch.inference_mode():
        assert torch.equal(dense(ids).logits, expected)
        for name, cast in (("float16", torch.float16), (None, torch.float64)):
            model = export.load(exported.packed).to(torch.float64).dequantize(dtype=name)
            assert {tensor.dtype for tensor in model.parameters()} == {cast}
            assert model(ids).logits.dtype == cast
    dense.save_pretrained(tmp_path / "dense")
    assert_equal_files(exported.source, tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense/config.json").read_text())


@pytest.mark.parametrize(
    ("kind", "form", "layers"),
    [("gpt2", "packed", 8), ("gpt2", "bitmask", 8), ("opt", "packed", 12)],
)
def test_the_logits_are_those_of_the_pruned_model(kind, form, layers, pruned, ids, tmp_path):
    """Conv1D, float32, and biases, which transformers would leave uninitialised where one lacks."""
    source, packed = pruned(kind, dtype=torch.float32), tmp_path / "packed"
    main([str(source), "--format", form, "--out", str(packed)])
    model = AutoModelForCausalLM.from_pretrained(packed)
    assert sum(isinstance(m, KINDS[form]) for m in model.modules()) == layers
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, logits(source, ids))
    model.dequantize().save_pretrained(tmp_path / "dense")
    assert_equal_files(source, tmp_path / "dense")
    if kind == "opt":
        change(packed, **{"model.decoder.layers.0.self_attn.q_proj.bias": None})
        with pytest.raises(FormatError, match=r"layers\.0\.self_attn\.q_proj\.bias \(missing"):
            AutoModelForCausalLM.from_pretrained(packed)


needs_accelerate = pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="needs the extra `device-map`"
)


@needs_accelerate
def test_it_loads_with_a_device_map(llama, packed, ids):
    device_map = {"": "cpu"} if torch.cuda.is_available() else "auto"
    assert torch.equal(logits(packed, ids, device_map=device_map), logits(llama, ids))


@needs_accelerate
def test_layers_may_stay_on_the_disk(exported, ids, tmp_path):
    offload_buffers = exported.form == "bitmask"
    model = export.load(
        exported.packed,
        device_map={"model.embed_tokens": "cpu", "lm_head": "cpu", "model.rotary_emb": "cpu"}
        | {"model.norm": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk"},
        offload_folder=tmp_path / "offload",
        offload_buffers=offload_buffers,
    )
    layer = model.model.layers[1].mlp.up_proj
    assert layer.weight.device.type == "meta"
    places = getattr(layer, layer.FORMAT.places)
    assert places.device.type == ("meta" if offload_buffers else "cpu")
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, logits(exported.source, ids))
    with pytest.raises(OptionError, match="offloaded cannot be made dense"):
        model.dequantize()


def test_load_refuses_what_is_missing_or_left_over(packed):
    change(packed, **{"model.extra.weight": torch.zeros(2)})
    with pytest.raises(FormatError, match=r"no place for, .*: model\.extra\.weight\. "):
        export.load(packed)
    change(packed, **{"model.norm.weight": None})
    with pytest.raises(FormatError, match=r"would be random: model\.norm\.weight\. "):
        export.load(packed)


DOWN = "model.layers.1.mlp.down_proj"
DAMAGES = {
    "2:4": ("packed", "weight_meta", lambda t: t[0, :1].fill_(0x40), "1 of 512 nibbles"),
    "bits": ("bitmask", "weight_bits", lambda t: t[3, 2:3].bitwise_xor_(1), "weights are marked"),
    "places": ("bitmask4", "weight_bits", lambda t: t[3].bitwise_not_(), "bytes, and there are"),
    "scales": ("bitmask4", "weight_scales", lambda t: t[3].fill_(torch.nan), "are not finite"),
}


@pytest.mark.parametrize(("form", "key", "spoil", "message"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_refused_by_gate_and_loader(
    form, key, spoil, message, exports, tmp_path, capsys
):
    exported = exports(form, tmp_path)
    tensor = load_file(exported.packed / "model.safetensors")[f"{DOWN}.{key}"]
    spoil(tensor)
    change(exported.packed, **{f"{DOWN}.{key}": tensor})
    places = KINDS[form].FORMAT.places
    options = ["--format", form, "--check-only"]
    shown = refusal([str(exported.source), *options], capsys, status=1)
    assert f"{DOWN}.{places}: " in shown
    with pytest.raises(FormatError, match=rf"down_proj\.{places} \(.*{message}"):
        AutoModelForCausalLM.from_pretrained(exported.packed)


@pytest.mark.parametrize("key", ["weight_bits", "weight_scales"])
def test_a_missing_tensor_is_told(key, exports, tmp_path, capsys):
    exported = exports("bitmask4", tmp_path)
    change(exported.packed, **{f"{DOWN}.{key}": None})
    shown = refusal([str(exported.source), "--check-only"], capsys, status=1)
    assert f"{DOWN}.{key}: missing" in shown
    with pytest.raises(FormatError, match=key):
        export.load(exported.packed)


def test_places_of_another_dtype_are_refused_by_every_loader(packed):
    name = f"{DOWN}.weight_meta"
    change(packed, **{name: load_file(packed / "model.safetensors")[name].to(torch.int16)})
    for load in (AutoModelForCausalLM.from_pretrained, export.load):
        with pytest.raises(FormatError, match=r"weight_meta.*expected uint8, got torch\.int16"):
            load(packed)


@pytest.mark.parametrize("version", [2, None])
def test_another_version_of_the_format_is_refused(version, packed):
    config = json.loads((packed / "config.json").read_text())
    settings = config["quantization_config"]
    settings["format_version"] = version
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=f"format_version` is {version}.*reads 1"):
        export.load(packed)
    if version is None:
        del settings["format_version"]
        (packed / "config.json").write_text(json.dumps(config))
        with pytest.raises(FormatError, match="format_version` is None"):
            AutoModelForCausalLM.from_pretrained(packed)


def test_names_that_the_model_lacks_are_refused(packed):
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["modules"] += ["model.norm", "model.nothing"]
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(FormatError, match=r"(?s)model\.norm: .*model\.nothing: the module has no"):
        export.load(packed)


def test_import_export_teaches_transformers_that_refused_before(exports, tmp_path):
    packed = exports("packed", tmp_path).packed
    code = """
import sys
from transformers import AutoModelForCausalLM as M
from transformers.quantizers import auto
for known in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
    for name in [name for name, kind in known.items() if kind.__module__.startswith("mrp_")]:
        del known[name]
for name in [*sys.modules]:
    if name.partition(".")[0] == "export" or name == "mrp_sparse.huggingface":
        del sys.modules[name]
try: sys.exit(type(M.from_pretrained(sys.argv[1])).__name__)
except RuntimeError: import export
print(type(M.from_pretrained(sys.argv[1]).model.layers[0].mlp.up_proj).__name__)
"""
    ended = warm.run(["-c", code, packed])
    assert ended.stdout.split() == ["Sparse24Linear"], ended.stderr
    assert len(re.findall(rf"^{NOTE} +\| UNEXPECTED", ended.stderr, flags=re.M)) == 1
