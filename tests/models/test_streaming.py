"""A streamed model computes and holds what the model in memory does, one block at a time."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, logging

from mrp_lightning.errors import FormatError, OptionError, TargetError
from mrp_lightning.models.saving import save_streamed
from mrp_lightning.models.streaming import load_streamed
from mrp_lightning.targets.blocks import find_blocks

IDS = torch.arange(3, 21).view(2, 9)


def blocks_by_name(model):
    return {block.name: block.module for block in find_blocks(model)}


def load(directory, dtype=None):
    return load_streamed(str(directory), dtype, blocks_by_name)


def in_memory(model) -> set[str]:
    return {name for name, tensor in model.named_parameters() if not tensor.is_meta}


@pytest.mark.parametrize("family", ["opt", "mixtral", "gpt_neox", "gpt2", "gemma3_text"])
def test_it_is_the_model_in_memory(family, build, tmp_path):
    build(family).save_pretrained(tmp_path, max_shard_size="20KB")  # a block is in several files
    expected = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    model, streamed = load(tmp_path)
    assert not any(name.startswith(tuple(streamed.blocks)) for name in in_memory(model))
    before = in_memory(model)
    assert before
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
    assert in_memory(model) == before
    held = {}
    for block in streamed.blocks.values():
        with streamed.pinned(block):
            state = model.state_dict().items()
            held |= {key: value.clone() for key, value in state if not value.is_meta}
    assert held.keys() == expected.state_dict().keys()
    assert all(torch.equal(held[key], value) for key, value in expected.state_dict().items())
    assert model.generation_config == expected.generation_config
    assert not model.training


def test_blocks_come_in_the_dtype_that_the_model_is_in(tiny_llama):
    """Rotary tables make the two differ."""
    loaded = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    moved = AutoModelForCausalLM.from_pretrained(tiny_llama).to("cpu").bfloat16()
    for model, expected in (
        (load(tiny_llama, torch.bfloat16)[0], loaded),
        (load(tiny_llama)[0].to("cpu").bfloat16(), moved),
    ):
        assert torch.equal(model(IDS).logits, expected(IDS).logits)
        assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}


def test_a_pinned_block_keeps_what_is_written_to_it(tiny_llama):
    model, streamed = load(tiny_llama)
    block = streamed.blocks["model.layers.1"]
    dense = model(IDS).logits
    with streamed.pinned(block):
        block.mlp.up_proj.weight.detach().zero_()
        zeroed = model(IDS).logits
        assert not torch.equal(zeroed, dense)
        assert torch.equal(model(IDS).logits, zeroed)
    assert torch.equal(model(IDS).logits, dense)


def test_gradients_reach_a_pinned_block_that_came_in_inference_mode(tiny_llama):
    model, streamed = load(tiny_llama)
    block = streamed.blocks["model.layers.0"]
    with torch.inference_mode():
        model(IDS)
        pinned = streamed.pinned(block)
        pinned.__enter__()
    model(IDS).logits.sum().backward()
    assert block.mlp.up_proj.weight.grad.abs().sum() > 0
    pinned.__exit__(None, None, None)


@pytest.mark.parametrize(("family", "dtype"), [("opt", torch.bfloat16), ("mixtral", torch.float32)])
def test_it_is_saved_as_the_checkpoint_that_it_came_from(family, dtype, build, tmp_path):
    source, shards, out = (tmp_path / name for name in ("source", "shards", "out"))
    shards.mkdir()
    out.mkdir()
    build(family).to(dtype).save_pretrained(source)
    model, streamed = load(source, torch.float32)
    for name in list(streamed.blocks)[:2]:  # the third is read from the source
        with streamed.pinned(streamed.blocks[name]):
            tensors = {key: 2 * value for key, value in streamed.tensors(name).items()}
        save_file(tensors, shards / name)
        streamed.read_from(name, shards / name)
    files = save_streamed(model, streamed, out, card="A card")

    assert (out / "README.md").read_text() == "A card"
    assert json.loads((out / "config.json").read_text())["dtype"] == str(dtype).split(".")[1]
    first, second = load_file(source / "model.safetensors"), {}
    written = sorted(out.glob("model*.safetensors"))
    for file in written:
        second |= load_file(file)
    assert len(written) == sum(file.match("*-of-00004.safetensors") for file in written) == 4
    doubled = tuple(f"{name}." for name in list(streamed.blocks)[:2])
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        expected = 2 * tensor if name.startswith(doubled) else tensor
        assert second[name].dtype == dtype
        assert torch.equal(second[name], expected), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == first.keys()
    total = sum(tensor.nbytes for tensor in first.values())
    assert index["metadata"]["total_size"] == total

    streamed.settle({name: out / file for name, file in files.items()})
    shutil.rmtree(shards)
    saved = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(model(IDS).logits, saved(IDS).logits)


def test_a_shard_is_given_away_and_a_settled_one_is_not(tiny_llama, tmp_path):
    model, streamed = load(tiny_llama)
    (name, *_) = streamed.blocks
    with streamed.pinned(streamed.blocks[name]):
        save_file(dict(streamed.tensors(name)), tmp_path / "shard")
    streamed.read_from(name, tmp_path / "shard")
    links = []
    for out in (tmp_path / "one", tmp_path / "two"):
        out.mkdir()
        files = save_streamed(model, streamed, out)
        links.append((out / files[name]).stat().st_nlink)
        streamed.settle({name: out / files[name]})
    assert links == [2, 1]


def test_what_has_no_safetensors_files_is_refused(tiny_llama, tmp_path):
    pickled = tmp_path / "pickled"
    shutil.copytree(tiny_llama, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    (tmp_path / "model.gguf").touch()
    for source, named in ((pickled, "pytorch_model.bin"), (tmp_path / "model.gguf", "model.gguf")):
        with pytest.raises(OptionError, match=f"`streaming` reads .*: {named}.*save_pretrained"):
            load(source)


def test_tied_blocks_and_models_without_blocks_are_refused(tiny_llama, monkeypatch):
    with pytest.raises(TargetError, match="none were found"):
        load_streamed(str(tiny_llama), None, lambda _: {})
    with pytest.raises(TargetError, match=r"tied.*\n  lm_head.weight and model.embed_tokens"):
        load_streamed(str(tiny_llama), None, lambda model: {"model": model.model})


def test_lacking_and_damaged_weights_are_told_of_before_work(tiny_llama, tmp_path):
    shutil.copytree(tiny_llama, lacking := tmp_path / "lacking")
    weights = load_file(lacking / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in weights.items() if k != name}, lacking / "model.safetensors")
    with pytest.raises(TargetError, match=f"lacks weights.*{name}"):
        load(lacking)
    for wrong in (name, "model.norm.weight"):
        save_file(weights | {wrong: torch.ones(3, 5)}, lacking / "model.safetensors")
        with pytest.raises(TargetError, match=f"other shapes.*{wrong}"):
            load(lacking)
    (lacking / "model.safetensors").write_bytes(b"\x10" * 100)
    with pytest.raises(FormatError, match=r"model\.safetensors"):
        load(lacking)


def test_nothing_is_left_of_the_way_in_which_it_is_loaded(tiny_llama):
    load(tiny_llama)
    shown: list[int] = []
    before = logging.set_tqdm_hook(lambda _, args, __: shown.append(1) or args[0])
    model = AutoModelForCausalLM.from_pretrained(tiny_llama)
    logging.set_tqdm_hook(before)
    assert before is None
    assert shown
    assert in_memory(model) == {name for name, _ in model.named_parameters()}


def test_blocks_run_where_the_model_is(tiny_llama, second):
    model, streamed = load(tiny_llama)
    expected = model(IDS).logits
    model.to(second)
    torch.testing.assert_close(model(IDS.to(second)).logits.cpu(), expected)
    with streamed.pinned(block := streamed.blocks["model.layers.0"]):
        assert {tensor.device.type for tensor in block.state_dict().values()} == {second.type}
    assert all(tensor.is_meta for tensor in block.parameters())
