"""The sizes of the weights that runs have kept on disk."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("matplotlib")

from pages.weights import MAGNITUDES, count_magnitudes, weights_part

from mrp_lightning.experiments.groups import find_models
from mrp_lightning.experiments.runs import find_runs


def test_the_sizes_of_kept_and_dense_weights_are_drawn(tmp_path, save_run):
    base = tmp_path.parent / "base"
    report = save_run(tmp_path, base_model=str(base))
    dense = {f"{row.name}.weight": torch.full(row.shape, 0.01) for row in report.layers}
    base.mkdir()
    save_file(dense, base / "model.safetensors")
    kept = {name: torch.zeros_like(weight) for name, weight in dense.items()}
    for weight in kept.values():
        weight[:, ::2] = 0.2
    first, *others = sorted(kept)
    save_file({first: kept[first]}, tmp_path / "model-1.safetensors")
    save_file({name: kept[name] for name in others}, tmp_path / "model-2.safetensors")
    (model,) = find_models(find_runs(tmp_path))
    (picture,) = weights_part(model).pictures
    assert picture.alt.startswith("Sizes of the kept weights at 2:4.")
    assert "Medians of |w|: dense 0.011, SM 0.22." in picture.alt
    (tmp_path / "model-2.safetensors").unlink()
    assert weights_part(model) is None


def test_magnitudes_are_counted_without_zeros(tmp_path):
    weights = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).half()
    weights[:, ::2] = 0
    save_file({"a.weight": weights, "norm.weight": torch.ones(5)}, tmp_path / "model.safetensors")
    expected, _ = np.histogram(weights[weights != 0].abs().double().numpy(), MAGNITUDES)
    np.testing.assert_array_equal(count_magnitudes(tmp_path, {"a"}), expected)
    assert count_magnitudes(tmp_path, {"a", "b"}) is None


def test_magnitudes_of_a_large_layer_are_all_counted(tmp_path):
    many = 2**24 + 2**20  # more than float32 counts one by one
    save_file({"a.weight": torch.full((many,), 0.5).half()}, tmp_path / "model.safetensors")
    assert count_magnitudes(tmp_path, {"a"}).sum() == many
