"""The whole files from which a fuzzer of the readers starts."""

import json

import pytest
import torch
from torch import nn
from trouble import fuzz

from mrp_ground.errors import FormatError
from mrp_sparse.own_module import load_into


def test_the_packed_seeds_have_each_format_and_rounded_activations(tmp_path):
    fuzz.write_seeds("packed", tmp_path / "corpus", tmp_path)
    rounding = {}
    for seed in (tmp_path / "corpus").iterdir():
        settings, _, tensors = seed.read_bytes().partition(b"\0\0")
        config = json.loads(settings)
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
        (tmp_path / "model.safetensors").write_bytes(tensors)
        module = nn.Sequential(nn.Linear(16, 4))
        if "activations" in config and config["quant_method"] != "mrp_bitmask4":
            with pytest.raises(FormatError, match="activations"):
                load_into(module, tmp_path)
            continue
        layer = load_into(module, tmp_path)[0]
        assert layer(torch.ones(2, 16)).isfinite().all()
        is_rounded = getattr(layer, "eight_bit_activations", False)
        rounding.setdefault(config["quant_method"], set()).add(is_rounded)
    assert rounding == {
        "mrp_sparse24": {False},
        "mrp_bitmask": {False},
        "mrp_bitmask4": {False, True},
    }
