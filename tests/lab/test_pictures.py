"""The pictures of docs/methods.md and docs/method.md, drawn of a tiny model."""

import importlib.util
import logging
import re
from pathlib import Path

import pytest
import torch

from mrp_lightning import CausalLM

pytest.importorskip("matplotlib", reason="pictures need the extra `report`")

PICTURES = Path(__file__).parents[2] / "lab" / "pictures"


def script(name):
    """The script as a module."""
    spec = importlib.util.spec_from_file_location(name, PICTURES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(tiny_llama, tmp_path, monkeypatch):
    """Make a script draw a tiny model and little text."""
    text = "\n".join(f"value_{i} = compute({i}) + {i * 7}" for i in range(60))
    monkeypatch.setattr("mrp_lightning.text.sources.standard_library", lambda _: [text])

    def make(name):
        module = script(name)
        values = {"STDLIB_LLAMA": tiny_llama, "DIRECTORY": tmp_path / name}
        for key, value in (values | {"WINDOWS": 4, "LENGTH": 16}).items():
            monkeypatch.setattr(module, key, value)
        return module

    return make


@pytest.fixture
def pictures(small, monkeypatch):
    """The script of the methods' pictures, for two recipes."""
    module = small("methods")
    kept = {name: module.RECIPES[name] for name in ("SM", "JM, dense target")}
    monkeypatch.setattr(module, "RECIPES", kept)
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    yield module
    log.setLevel(level)  # the script silences it for its process


def test_both_pictures_show_what_was_measured(pictures, tiny_llama, monkeypatch):
    drawn, pruned, seen = {}, [], {}
    draw_masks, draw_errors, prune = pictures.draw_masks, pictures.draw_errors, pictures.prune
    hidden_states = pictures.hidden_states
    monkeypatch.setattr(
        pictures,
        "draw_masks",
        lambda masks, losses: drawn.update(masks=masks, losses=losses) or draw_masks(masks, losses),
    )
    monkeypatch.setattr(
        pictures,
        "draw_errors",
        lambda errors: drawn.update(errors=errors) or draw_errors(errors),
    )
    monkeypatch.setattr(pictures, "prune", lambda *how: pruned.append(prune(*how)) or pruned[-1])
    monkeypatch.setattr(
        pictures,
        "hidden_states",
        lambda model, windows: seen.update(windows=windows) or hidden_states(model, windows),
    )
    pictures.main()

    # The first block's error, by the hidden states that transformers gives.
    dense = CausalLM(tiny_llama).model
    with torch.no_grad():
        states = [
            model(seen["windows"], output_hidden_states=True).hidden_states[1].double()
            for model in (dense, *pruned)
        ]
    for errors, state in zip(drawn["errors"].values(), states[1:], strict=True):
        expected = (state - states[0]).square().sum() / states[0].square().sum()
        assert errors[0] == pytest.approx(float(expected), rel=1e-4)
        assert len(errors) == 2
    for model in pruned:
        weight = model.model.layers[1].mlp.up_proj.weight
        assert float((weight == 0).float().mean()) == pytest.approx(0.7, abs=1e-3)

    # JM removes as much as SM, elsewhere, and loses less in all.
    for single, joint in drawn["masks"]:
        assert single.sum() == joint.sum() == round(0.7 * single.numel())
        assert not torch.equal(single, joint)
    single, joint = map(sum, zip(*drawn["losses"], strict=True))
    assert 0 < joint < single < len(pictures.LAYERS)

    masks = (pictures.DIRECTORY / "joint-mask.svg").read_text()
    for name in ("SM", "JM", "q_proj", "down_proj", "relative loss"):
        assert f">{name}</text>" in masks
    errors = (pictures.DIRECTORY / "error-by-block.svg").read_text()
    for name in (*pictures.RECIPES, "after block"):
        assert f">{name}</text>" in errors


def test_the_certificate_is_drawn_above_the_truth(small, monkeypatch):
    method_pictures = small("method")
    drawn = []
    draw = method_pictures.draw_certificate
    monkeypatch.setattr(method_pictures, "draw_certificate", lambda f: drawn.extend(f) or draw(f))
    method_pictures.main()
    assert len({iterations for iterations, _, _ in drawn}) > 3
    assert all(true <= certified for _, certified, true in drawn)
    for name in ("two-weights", "certificate"):
        assert (method_pictures.DIRECTORY / f"{name}.svg").is_file()


def test_the_losses_of_the_picture_are_those_of_the_formula():
    """w₁ = 0.9 removed, H = [[1, ¾], [¾, 1]]: ½·0.81 = 0.405, and ½·0.81·(1 − 9/16) = 0.177."""
    figure = script("method").draw_two_weights()
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "w₁ removed, w₂ as it was: loss 0.41" in texts
    assert "w₁ removed, w₂ optimal: loss 0.18" in texts


def test_the_pictures_of_the_site_show_their_tables():
    """What is drawn from the tables now has the words and numbers of the stored pictures."""
    site = script("site")
    for name in ("formats", "quality", "engines", "files"):
        words = re.findall(r">([^<>]+)</text>", getattr(site, name)().svg.decode())
        assert len(words) > 15
        stored = (site.OUT / f"{name}.svg").read_text("utf-8")
        assert words == re.findall(r">([^<>]+)</text>", stored)
