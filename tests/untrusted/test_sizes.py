"""Absurd sizes are refused before they are built, and before memory is taken for them."""

import json
import resource
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from export.conversion.checkpoint import open_checkpoint
from export.conversion.selection import choose_layers
from export.loading import load
from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.models.integrity import check_values, why_no_pickle
from mrp_lightning.models.loading import load_config, load_model
from mrp_sparse.formats.bitmask import pack
from mrp_sparse.own_module import load_into

GIGABYTE = 2**30
UP = "model.layers.0.mlp.up_proj"
BITMASKS = {"quant_method": "mrp_bitmask", "format_version": 1}


@pytest.fixture(autouse=True)
def _little_memory():
    """What takes as much as an absurd checkpoint asks for fails, and not the machine."""
    statm, before = Path("/proc/self/statm"), resource.getrlimit(resource.RLIMIT_AS)
    if not statm.exists():
        pytest.skip("what this process takes is only known on Linux")
    taken = int(statm.read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + 4 * GIGABYTE, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**12}, "`num_hidden_layers` is 1,000,000,000,000, expected at"),
        ({"num_labels": 10**12}, "`num_labels` is 1,000,000,000,000, expected at most 1,000,000"),
        ({"vocab_size": 10**12}, "a model of 32,000,000,018,600 weights, but its files hold"),
        ({"intermediate_size": 10**10}, "weights, but its files hold"),
        ({"hidden_size": 10**15, "vocab_size": 10**15}, "Storage size calculation overflowed"),
        ({"vocab_size": -5}, "negative dimension"),
        ({"hidden_size": "abc"}, "Field 'hidden_size' expected int"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"rope_parameters": {"rope_type": "unheard of"}}, "unheard of"),
        ({"dtype": "unheard_of"}, "has no attribute 'unheard_of'"),
        ({"quantization_config": [1]}, "`quantization_config` is a list, expected an object"),
    ],
    ids=str,
)
def test_an_absurd_configuration_is_refused(checkpoint, values, message):
    with pytest.raises(FormatError, match=message):
        load_model(str(checkpoint(**values)), None)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", '{"model_type": "llama", "a": NaN'])
def test_a_configuration_that_is_no_object_is_named(checkpoint, text):
    directory = checkpoint()
    (directory / "config.json").write_text(text)
    with pytest.raises((FormatError, FileNotFoundError), match=str(directory)):
        load_config(str(directory))


def test_the_largest_models_are_not_absurd():
    values = {"num_hidden_layers": 126, "vocab_size": 10**6, "max_position_embeddings": 10**7}
    check_values({"num_experts": 16_384}, "x")  # the default of Doge
    experts = {"num_experts": 512, "shared_expert_intermediate_size": 20480}
    check_values(values | {"text_config": experts, "layer_types": ["full_attention"] * 126}, "x")
    with pytest.raises(FormatError, match=r"`text_config\.num_experts` is 100,000"):
        check_values({"text_config": {"num_experts": 10**5}}, "x")


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (3, "(?s)`quantization_config` is not .* `modules` is 3, expected an object"),
        ([UP], r"`modules` is \[.*\], expected an object"),
        ({UP: -1}, f"`modules.{UP}` is -1, expected a whole number from 0"),
        ({UP: "a"}, f"`modules.{UP}` is 'a', expected a whole number from 0"),
        ({UP: 10**15}, f"{UP}: 1,000,000,000,000,000 values are kept of 64×32 weights"),
        ({"model.norm": 1}, "does not fit LlamaForCausalLM(?s:.)*model.norm: the module has no l"),
    ],
    ids=str,
)
def test_an_absurd_packed_configuration_is_refused(checkpoint, modules, message):
    settings = BITMASKS | {"modules": modules}
    directory = checkpoint(quantization_config=settings)
    with pytest.raises(FormatError, match=message):
        load(directory)


def test_dense_files_of_a_packed_configuration_are_refused(checkpoint):
    settings = {"quant_method": "mrp_sparse24", "format_version": 1, "modules": [UP], "more": 1}
    with pytest.raises(FormatError, match="expected `quant_method` mrp_sparse24.*'more'"):
        load(checkpoint(quantization_config=settings))


def write_header(file, dtype, shape, num_bytes):
    entry = {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}
    header = json.dumps({f"{UP}.weight": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(min(num_bytes, 64)))


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        ("F32", [10**12], 4 * 10**12),
        ("F32", [2**63, 2**63], 0),
        ("F32", [0, 10**12], 0),
        ("F32", [1, 1, 1], 4),
        ("I64", [1, 1], 8),
        ("F4", [1, 2], 1),
        ("F32", [-1], 0),
    ],
    ids=str,
)
def test_an_absurd_header_is_refused(checkpoint, dtype, shape, num_bytes):
    directory = checkpoint()
    write_header(directory / "model.safetensors", dtype, shape, num_bytes)
    with pytest.raises(ValueError, match=str(directory)):
        load_model(str(directory), None)
    with pytest.raises((FormatError, PatternError), match=str(directory)):
        choose_layers(open_checkpoint(directory))


def deflated(file):
    """The same archive, compressed."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return file


def test_a_compressed_pickle_is_refused(tmp_path):
    file = tmp_path / "a.ckpt"
    torch.save({"more": torch.zeros(9)}, file)
    assert why_no_pickle(file) is None
    assert "it is compressed" in str(why_no_pickle(deflated(file)))


@pytest.fixture
def own(tmp_path):
    """A module of one's own, and the directory of its packed weights with some of them replaced."""
    weight = torch.eye(8, 16)
    values, bits = pack(weight)
    tensors = {"weight": values, "weight_bits": bits, "bias": torch.zeros(8)}
    modules = {"0": values.numel()}
    settings = BITMASKS | {"modules": modules}

    def write(config=None, **changed):
        stored = {f"0.{name}": tensor for name, tensor in (tensors | changed).items()}
        save_file(stored, tmp_path / "model.safetensors")
        config = {"quantization_config": settings} if config is None else config
        (tmp_path / "config.json").write_text(json.dumps(config))
        return nn.Sequential(nn.Linear(16, 8)), tmp_path

    module, directory = write()
    assert torch.equal(load_into(module, directory)[0].dense_weight(), weight)
    return write


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("weight_bits", torch.zeros(8, 1, dtype=torch.uint8), "the shape is"),
        ("weight_bits", torch.zeros(16, dtype=torch.uint8), "the shape is"),
        ("weight_bits", torch.zeros(8, 2), "expected uint8, got torch.float32"),
        ("weight_bits", torch.full((8, 2), 255, dtype=torch.uint8), "128 weights are marked"),
        ("weight", torch.ones(2, 4), "the shape is"),
        ("bias", torch.zeros(3), "the shape is"),
    ],
)
def test_tensors_that_do_not_fit_a_module_are_refused(own, name, tensor, message):
    with pytest.raises(FormatError, match=message):
        load_into(*own(**{name: tensor}))


@pytest.mark.parametrize(
    "config",
    [
        [1],
        {"quantization_config": {}},
        {"quantization_config": {"quant_method": ["x"]}},
        {"quantization_config": BITMASKS | {"modules": {"0": 10**15}}},
    ],
    ids=str,
)
def test_a_configuration_that_does_not_fit_a_module_is_refused(own, config):
    with pytest.raises(FormatError):
        load_into(*own(config))


@pytest.fixture
def gguf(tiny_gguf, tmp_path):
    def write(content):
        (tmp_path / "a.gguf").write_bytes(content)
        return str(tmp_path / "a.gguf")

    write.whole = tiny_gguf.read_bytes()
    return write


def test_a_gguf_file_that_says_it_is_longer_than_it_is(gguf):
    key = struct.pack("<Q", 1) + b"x"
    array = struct.pack("<IIQ", 9, 4, 2**60)  # of so many integers
    with pytest.raises(FormatError, match="is damaged.*it ends before"):
        load_model(gguf(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array), None)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"block_count", 2, "`num_hidden_layers` is 2,147,483,648"),
        (b"vocab_size", 2048, "weights, but its files hold"),
    ],
)
def test_a_gguf_file_of_an_absurd_model(gguf, key, value, message):
    entry = b"llama." + key + struct.pack("<II", 4, value)
    assert entry in gguf.whole
    absurd = b"llama." + key + struct.pack("<II", 4, 2**31)
    with pytest.raises(FormatError, match=message):
        load_model(gguf(gguf.whole.replace(entry, absurd)), None)
