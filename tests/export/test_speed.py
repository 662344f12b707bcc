"""Speed but for the clock: shapes, decoding, prefill, turns, memory, and the table of an export."""

import itertools
import json
from dataclasses import replace

import pytest
import shapes
import torch
from shapes import SHAPES, packed_copy, prunable, random_24, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import import_utils

from export import packing, speed
from export.loading import storage_bytes
from export.speed import Decoder, Speed, Timing, measure, prefill, rows, take_turns, without_masks
from export.to_sparse import main
from mrp_lightning.errors import OptionError
from mrp_sparse import packed_linear
from mrp_sparse.formats.sparse24 import broken_groups
from mrp_sparse.packed_linear import Sparse24Linear

CPU = torch.device("cpu")
PARAMETERS = {"llama2-7b": 6.74e9, "llama3-8b": 8.03e9, "opt-6.7b": 6.66e9}


KINDS = {
    "llama": {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2},
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48, "num_attention_heads": 4},
}


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    """The families of the published shapes, small."""
    common = {"model_type": request.param, "vocab_size": 64, "hidden_size": 32}
    small = common | {"num_hidden_layers": 2, "max_position_embeddings": 64}
    monkeypatch.setitem(SHAPES, request.param, small | KINDS[request.param])
    torch.manual_seed(0)
    return request.param


of_llama = pytest.mark.parametrize("kind", ["llama"], indirect=True)


@pytest.fixture
def tiny(kind):
    return random_model(kind, torch.float32, CPU)


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_as_many_parameters_as_their_models(shape):
    options = dict(SHAPES[shape])
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = sum(p.numel() for p in model.parameters())
    if shape == "opt-6.7b":  # more positions than the original's 2048
        count -= (config.max_position_embeddings - 2048) * config.hidden_size
    assert count == pytest.approx(PARAMETERS[shape], rel=0.002)


@of_llama
def test_a_packed_copy_of_a_random_model_computes_the_same_and_shares_the_rest(tiny):
    layers = prunable(tiny)
    assert len(layers) == 14
    assert all(broken_groups(layer.weight) == 0 for layer in layers.values())
    assert broken_groups(tiny.lm_head.weight) > 0
    sparse = packed_copy(tiny, layers)
    ids = torch.randint(64, (2, 9))
    assert sum(isinstance(m, Sparse24Linear) for m in sparse.modules()) == 14
    with torch.no_grad():
        assert torch.equal(sparse(ids).logits, tiny(ids).logits)
    assert sparse.lm_head.weight.data_ptr() == tiny.lm_head.weight.data_ptr()


def test_memory_counts_each_storage_once_in_all_layouts():
    linear = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16)
    linear.weight.data = random_24(32, 64, torch.bfloat16, CPU)
    layer = Sparse24Linear.from_linear(linear)
    shared = torch.nn.ModuleList([layer, layer])
    shared.extra = layer.weight
    assert storage_bytes(shared) == 32 * 64 * 2 * 0.5625
    layer.compressed = torch.zeros(10)
    assert storage_bytes(shared) == 32 * 64 * 2 * 0.5625 + 40


def test_steps_decode_what_generate_does_and_can_be_taken_again(kind):
    model = random_model(kind, torch.float32, CPU)
    prompt = torch.randint(4, 64, (1, 6))
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    options["attention_mask"] = torch.ones_like(prompt)
    with torch.no_grad():
        expected = model.generate(prompt, **options)[0, 6:]
        decoder = Decoder(model, prompt, new_tokens=4)
        for _ in range(2):
            found = [int(decoder.token)]
            for _ in range(4):
                decoder.step()
                found.append(int(decoder.token))
            assert found == expected.tolist()
            decoder.rewind()


class NothingReadBack(TorchDispatchMode):
    """Refuses what a CUDA graph cannot capture: values read by the host, and copies from it."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function is not torch.ops.aten._local_scalar_dense.default
        assert function is not torch.ops.aten.nonzero.default
        result = function(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs, result))
        devices = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert len(devices) < 2, f"{function} moves between {devices}"
        return result


@torch.no_grad()
def test_prefill_and_decode_can_be_captured(kind, monkeypatch):
    """On meta tensors, as if a graph were captured: there is no value that could be read."""
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    with torch.device("meta"):
        options = dict(SHAPES[kind])
        config = AutoConfig.for_model(options.pop("model_type"), **options)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prompt = torch.empty(2, 16, dtype=torch.int64, device="meta")
    decoder = Decoder(model, prompt, new_tokens=4)
    with NothingReadBack(), without_masks(model):
        prefill(model, prompt)
    with NothingReadBack():
        decoder.step()
        decoder.rewind()


@torch.no_grad()
def test_prefill_without_a_mask_gives_the_same_logits(kind, monkeypatch):
    model = random_model(kind, torch.float32, CPU)
    prompt = torch.randint(64, (2, 16))
    expected = model(prompt).logits[:, -1:]
    masks = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return attention(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    with without_masks(model):
        torch.testing.assert_close(prefill(model, prompt), expected)
    assert masks == [None, None]
    assert model.config._attn_implementation == "sdpa"


def test_models_with_windows_keep_their_masks():
    config = AutoConfig.for_model(
        "mistral", hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64,
        num_attention_heads=4, num_key_value_heads=2, sliding_window=4,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with without_masks(model):
        assert model.config._attn_implementation == "sdpa"


def test_contestants_take_turns():
    order = []

    def once(name, times):
        def measure():
            order.append(name)
            return times.pop(0)

        return measure

    found = take_turns({"a": once("a", [3.0, 1.0, 2.0]), "b": once("b", [5.0, 5.0, 8.0])}, 3)
    assert order == ["a", "b"] * 3
    assert found["a"].median == 2.0
    assert found["a"].low == pytest.approx(1.4)  # 20th percentile of 1, 2, 3
    assert found["a"].high == pytest.approx(2.6)
    assert found["b"].median == 5.0


def test_a_table_shows_wins_losses_and_failures():
    case = Speed("decode", 8, 128, Timing(4000.0, 3900.0, 4100.0), Timing(2500.0, 2400.0, 2600.0))
    failed = Speed("prefill", 1, 2048, failure="OutOfMemoryError: no")
    slower = replace(case, dense=case.packed, packed=case.dense)
    assert list(rows([case, slower, failed])) == [
        ("decode", "8", "128", "4.000", "2.500", "2.400–2.600", "1.60"),
        ("decode", "8", "128", "2.500", "4.000", "3.900–4.100", "0.62"),
        ("prefill", "1", "2048", "not measured: OutOfMemoryError: no", "", "", ""),
    ]


@pytest.fixture
def without_a_clock(monkeypatch):
    """Calls run once where they would be captured; a call takes as many µs as were made before."""
    durations = itertools.count(1.0)

    class Graph:
        def __init__(self, calls):
            self.calls = calls

        def replay(self):
            for call in self.calls:
                call()

    def timed(call):
        call()
        return next(durations)

    monkeypatch.setattr(speed, "captured", Graph)
    monkeypatch.setattr(speed, "microseconds", timed)


def test_decoding_and_prefill_are_measured_in_turns(kind, without_a_clock, monkeypatch):
    model = random_model(kind, torch.float32, CPU)
    packed = packed_copy(model, prunable(model))
    compressed = []
    monkeypatch.setattr(Sparse24Linear, "compress", lambda layer: compressed.append(layer))
    found = measure(model, packed, batch_sizes=(1, 3), prompt_tokens=8, new_tokens=4, rounds=2)
    first = next(found)
    assert (first.phase, first.sequences, first.prompt) == ("decode", 1, 8)
    assert first.dense.median == (1.0 + 3.0) / 2 / 4  # four tokens a round
    assert first.packed.median == (2.0 + 4.0) / 2 / 4
    assert not compressed  # decoding does not read cuSPARSELt's layout
    second, third = found
    assert (second.phase, second.sequences) == ("decode", 3)
    # The model has 64 positions, of which the decoded tokens and the warm-up take 20.
    assert (third.phase, third.sequences, third.prompt) == ("prefill", 1, 44)
    assert third.packed.median > third.dense.median > 0
    assert len(compressed) == len(prunable(model))


def test_a_phase_that_fails_does_not_keep_others_from_being_measured(
    kind, without_a_clock, monkeypatch
):
    def fails(forward, prompt):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(speed, "prefill", fails)
    model = random_model(kind, torch.float32, CPU)
    decode, other = measure(model, model, batch_sizes=(1,), new_tokens=2, rounds=2)
    assert decode.failure is None
    assert other == Speed("prefill", 1, 46, failure="OutOfMemoryError: CUDA out of memory")


@pytest.fixture
def as_cuda(monkeypatch):
    """The CPU counts as a CUDA device."""

    class Device:
        type, index = "cuda", None

    monkeypatch.setattr(packing, "device_named", lambda _: Device())
    monkeypatch.setattr(packing.nn.Module, "to", lambda module, *_: module)
    check = packing.check_parity
    monkeypatch.setattr(
        packing, "check_parity", lambda *a, **options: check(*a, **options | {"device": CPU})
    )


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("form", ["packed", "bitmask"])
def test_an_export_on_a_gpu_measures_packed_layers(form, llama, monkeypatch, tmp_path, capsys):
    """All but the clock."""
    timing = Timing(3000.0, 3000.0, 3000.0)

    def found(dense, packed):
        assert not any(isinstance(m, Sparse24Linear) for m in dense.modules())
        assert any(isinstance(m, Sparse24Linear) for m in packed.modules())
        yield Speed("decode", 1, 128, timing, replace(timing, median=2000.0))

    monkeypatch.setattr(packing, "measure", found)
    main([str(llama), "--format", form, "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    assert ("1.50" in shown and "Speed" in shown) == (form == "packed")
    assert len(report["speed"]) == (form == "packed")


@pytest.mark.usefixtures("as_cuda")
def test_an_export_whose_speed_cannot_be_measured_is_kept(llama, monkeypatch, tmp_path, capsys):
    def fails(_):
        raise RuntimeError("CUDA driver error")

    monkeypatch.setattr(packing, "load", fails)
    main([str(llama), "--out", str(tmp_path / "out")])
    assert "speed not measured: RuntimeError: CUDA driver error" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()


@of_llama
@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_shapes_and_layouts_are_refused(tiny):
    with pytest.raises(OptionError, match="this machine has none"):
        shapes.main(["--shape", "llama2-7b"])
    packed = packed_copy(tiny, prunable(tiny)).modules()
    layer = next(m for m in packed if isinstance(m, Sparse24Linear))
    assert "runs on CUDA devices" in layer.bfloat16().compress()
    assert layer.compressed is None


@of_llama
def test_a_layer_is_compressed_from_its_dense_weight(tiny, monkeypatch):
    monkeypatch.setattr(packed_linear, "why_not_compressed", lambda *_: None)
    monkeypatch.setattr(packed_linear, "compress_cusparselt", lambda weight: weight.clone())
    layer = Sparse24Linear.from_linear(tiny.model.layers[0].mlp.up_proj)
    assert layer.compress() is None
    assert torch.equal(layer.compressed, tiny.model.layers[0].mlp.up_proj.weight)


def test_a_shape_that_fails_does_not_keep_others_from_being_measured(monkeypatch, tmp_path, capsys):
    def page(shape, options):
        yield f"{shape}: {options.format}"
        if "llama2" in shape:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(shapes, "page", page)
    with pytest.raises(SystemExit, match="not measured to the end: llama2-7b"):
        shapes.main(["--shape", "llama2-7b", "opt-6.7b", "--out", str(tmp_path / "out")])
    written = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    expected = {f"{x}-packed.md": f"{x}: packed\n" for x in ("llama2-7b", "opt-6.7b")}
    assert written == expected
    assert capsys.readouterr().out == "".join(expected.values())


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_small_model_is_measured(kind, compiled):
    model = random_model(kind, torch.bfloat16, torch.device("cuda", 0))
    found = list(
        measure(model, packed_copy(model, prunable(model)), new_tokens=4, compiled=compiled)
    )
    assert [speed.failure for speed in found] == [None] * 4
    assert all(speed.dense.median > 0 and speed.packed.median > 0 for speed in found)
