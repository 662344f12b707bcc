"""Files with anything in them give a typed error or a right result, and never hang."""

import copy
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import nn

from export.conversion.checkpoint import open_checkpoint
from export.conversion.selection import choose_layers
from mrp_lightning.errors import FormatError, PatternError
from mrp_lightning.experiments.runs import FinishedTrial
from mrp_lightning.models.integrity import check_values, damaged_files
from mrp_lightning.records import evaluation as records
from mrp_lightning.records.report import PruningReport
from mrp_sparse.formats import bitmask, bitmask4, sparse24
from mrp_sparse.own_module import load_into

ALWAYS_THE_SAME = settings(
    derandomize=True,
    deadline=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([10**15, 10**400, -1, 0]),
    st.floats(),
    st.text(max_size=9),
    st.sampled_from(["../x", "\0", "\ud800", "2:4"]),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)

NAMES = {"name": "model.layers.0.up", "method": "SM", "skipped": None}
MEASURES = {"sparsity": 0.5, "loss": 1.0, "relative_loss": 0.1, "damping": 0.1, "gap": 1e-7}
COUNTS = {"iterations": 3, "seconds": 1.0, "tokens": 64, "dead_inputs": 0}
OF_BLOCK = {"block": "model.layers.0", "grid": {"bits": 4}, "zeros": {"before": 0.5}}
REPORT: dict[str, Any] = {
    "format_version": 1,
    "layers": [{**NAMES, "shape": [16, 16], **MEASURES, **COUNTS, **OF_BLOCK}],
    "totals": {
        **{"layers": 1, "skipped": 0, "weights": 256, "removed": 128, "sparsity": 0.5},
        **{"relative_loss": 0.1, "seconds": 3.0, "complete": True},
    },
    "versions": {"torch": "2"},
    "config": {"method": "SM", "pattern": "2:4", "sparsity": None},
    "blocks": [{"name": "model.layers.0", "error_before": 0.1}],
}
EVALUATION: dict[str, Any] = {
    "format_version": 1,
    "perplexity": {"c4": {"perplexity": 5.0, "context": 10, "windows": 3, "tokens": 30}},
    "zeroshot": {"piqa": {"acc": 0.5}},
    "model": "m",
    "versions": {},
}
RUN: dict[str, Any] = {
    "format_version": 1,
    "run": {"model": "m", "setting": "2:4", "method": "SM", "block_size": 128, "seed": 0},
    "machine": "m",
    "config": {},
    "inputs": {},
}


def places_in(content: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every key and position in plain containers."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    found = []
    for key, value in items:
        found.append((*path, key))
        if isinstance(value, dict | list):
            found += places_in(value, (*path, key))
    return found


@st.composite
def changed(draw: Any, content: dict[str, Any]) -> dict[str, Any]:
    """The content with something else in one or two places."""
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 2))):
        *above, key = draw(st.sampled_from(places_in(content)))
        holder = content
        for step in above:
            holder = holder[step]
        holder[key] = draw(VALUES)
    return content


def is_finite(content: Any) -> bool:
    if isinstance(content, dict):
        return all(map(is_finite, content.values()))
    if isinstance(content, list | tuple):
        return all(map(is_finite, content))
    return not isinstance(content, float) or math.isfinite(content)


@ALWAYS_THE_SAME
@given(changed(REPORT))
def test_reports(tmp_path, content):
    path = tmp_path / "pruning_report.json"
    path.write_text(json.dumps(content))
    try:
        report = PruningReport.load(path)
    except FormatError:
        return
    assert all(math.isfinite(layer.relative_loss or 0) for layer in report.layers)
    report.save(tmp_path)
    assert PruningReport.load(path) == report


@ALWAYS_THE_SAME
@given(changed(EVALUATION))
def test_evaluations(tmp_path, content):
    (tmp_path / "evaluation.json").write_text(json.dumps(content))
    try:
        found = records.read(tmp_path)
    except FormatError:
        return
    assert is_finite(found.perplexity)
    records.record(tmp_path, model="another")
    assert records.read(tmp_path).perplexity == found.perplexity


@ALWAYS_THE_SAME
@given(changed(RUN))
def test_runs_of_sweeps(tmp_path, content):
    (tmp_path / "run.json").write_text(json.dumps(content))
    try:
        FinishedTrial.load(tmp_path / "run.json").save(tmp_path)
    except FormatError:
        return
    FinishedTrial.load(tmp_path / "run.json")


@ALWAYS_THE_SAME
@given(st.dictionaries(st.text(max_size=5) | st.just("num_hidden_layers"), VALUES))
def test_configurations(values):
    try:
        check_values(values, "x")
    except FormatError:
        return
    assert not isinstance(values.get("num_hidden_layers"), int) or values["num_hidden_layers"] < 1e5


def spoilt(draw: Any, content: bytes) -> bytes:
    """Bytes of which some are flipped, or that are cut off."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        content[draw(st.integers(0, len(content) - 1))] ^= 1 << draw(st.integers(0, 7))
    return bytes(content[: draw(st.sampled_from([len(content), len(content) // 2, 9, 0]))])


@ALWAYS_THE_SAME
@given(st.data())
def test_safetensors_headers(data):
    tensors = {"weight": torch.arange(12.0).view(3, 4), "bias": torch.ones(3)}
    content = save(tensors)
    header = 8 + int.from_bytes(content[:8], "little")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1}')
        file = directory / "model.safetensors"
        file.write_bytes(spoilt(data.draw, content[:header]) + content[header:])
        damaged = damaged_files(directory)
        try:
            read = dict(open_checkpoint(directory).tensors())
        except FormatError:
            assert damaged
            return
        assert not damaged
        assert sum(tensor.nbytes for tensor in read.values()) <= file.stat().st_size


def sparse(rows: int, columns: int) -> torch.Tensor:
    """A 2:4 weight."""
    weight = torch.arange(1.0, 1 + rows * columns).view(rows, columns)
    return weight * (torch.arange(columns) % 4 < 2)


@pytest.mark.parametrize(
    "packed", [sparse24.SPARSE24, bitmask.BITMASK, bitmask4.BITMASK4], ids=lambda x: x.option
)
@ALWAYS_THE_SAME
@given(data=st.data())
def test_packed_files(packed, data):
    """What is loaded from a file that was changed has the bits that the file has."""
    weight = sparse(4, 16)
    if packed is bitmask4.BITMASK4:
        weight = weight % 17 - 8  # whole numbers are on a grid whose scale is 1
    values, *beside = packed.pack(weight)
    tensors = {"0.weight": values, "0.bias": torch.zeros(4)}
    tensors |= dict(zip([f"0.{name}" for name in packed.companions], beside, strict=True))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        file = directory / "model.safetensors"
        save_file(tensors, file)
        content = spoilt(data.draw, file.read_bytes())
        file.write_bytes(content)
        counted = {"0": values.numel()} if packed.counted else ["0"]
        settings_ = {"quant_method": packed.quant_method, "format_version": 1, "modules": counted}
        (directory / "config.json").write_text(json.dumps({"quantization_config": settings_}))
        module = nn.Sequential(nn.Linear(16, 4))
        before = module[0].weight.detach().clone()
        try:
            layer: Any = load_into(module, directory)[0]
        except FormatError:
            assert torch.equal(module[0].weight, before)
            return
        kept = layer.dense_weight()[layer.dense_weight() != 0]
        if packed is bitmask4.BITMASK4:
            assert bool(kept.isfinite().all())
            return
        again = packed.pack(layer.dense_weight())
        assert set(kept.tolist()) <= set(layer.weight.flatten().tolist()) or kept.isnan().any()
        assert again[1].shape == layer.places.shape


@ALWAYS_THE_SAME
@given(content=changed({"quant_method": "mrp_bitmask", "format_version": 1, "modules": {"0": 32}}))
def test_packed_configurations(content):
    values, places = bitmask.pack(sparse(4, 16))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_file(
            {"0.weight": values, "0.weight_bits": places, "0.bias": torch.zeros(4)},
            directory / "model.safetensors",
        )
        (directory / "config.json").write_text(json.dumps({"quantization_config": content}))
        try:
            load_into(nn.Sequential(nn.Linear(16, 4)), directory)
        except FormatError:
            return
        assert content["modules"] == {"0": 32}


@settings(ALWAYS_THE_SAME, max_examples=8)
@given(data=st.data())
def test_indices_and_reports_of_exports(tiny_llama, data):
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        for file in tiny_llama.iterdir():
            (directory / file.name).write_bytes(file.read_bytes())
        (directory / "model.safetensors").rename(directory / "model-1.safetensors")
        weight_map = {"model.norm.weight": "model-1.safetensors"}
        index = data.draw(changed({"metadata": {}, "weight_map": weight_map}))
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        report = data.draw(changed(REPORT))
        (directory / "pruning_report.json").write_text(json.dumps(report))
        with pytest.raises((FormatError, PatternError)):
            choose_layers(open_checkpoint(directory))
