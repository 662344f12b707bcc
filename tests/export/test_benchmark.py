"""The benchmark but for the clock: models, decoding, turns, memory and tables."""

import json
import os
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import shapes
import torch
from shapes import SHAPES, packed_copy, prunable, random_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import import_utils

from export import comparison
from export.benchmark import main
from export.comparison import (
    Decoder,
    ModelTime,
    SpeedReport,
    compare,
    dense_copy,
    prefill,
    speed_ups,
    tables,
    without_masks,
)
from export.speed_options import LAYER_TOKENS, SpeedOptions, add_arguments
from export.timing import (
    COLD_BYTES,
    Timing,
    copies,
    random_24,
    take_turns,
)
from mrp_lightning.commands.command import make_parser
from mrp_lightning.errors import OptionError
from mrp_sparse.decoding import storage_bytes
from mrp_sparse.formats.sparse24 import broken_groups
from mrp_sparse.kernels.dispatch import (
    STORED_DENSE,
    Failure,
    KernelTimes,
    Measurement,
    known_times,
    use_times,
)
from mrp_sparse.packed_linear import Sparse24Linear

CPU = torch.device("cpu")
PARAMETERS = {"llama2-7b": 6.74e9, "llama3-8b": 8.03e9, "opt-6.7b": 6.66e9}


@pytest.fixture
def tiny(monkeypatch):
    small = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    monkeypatch.setitem(SHAPES, "tiny", small)
    torch.manual_seed(0)
    return random_model("tiny", torch.float32, CPU)


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


def test_random_models_are_2_of_4_but_for_the_head(tiny):
    layers = prunable(tiny)
    assert len(layers) == 14
    assert all(broken_groups(layer.weight) == 0 for layer in layers.values())
    assert broken_groups(tiny.lm_head.weight) > 0


def test_packed_and_dense_copies_compute_the_same_and_share_the_rest(tiny):
    sparse = packed_copy(tiny, prunable(tiny))
    dense = dense_copy(sparse)
    ids = torch.randint(64, (2, 9))
    assert sum(isinstance(m, Sparse24Linear) for m in sparse.modules()) == 14
    assert not any(isinstance(m, Sparse24Linear) for m in dense.modules())
    with torch.no_grad():
        expected = tiny(ids).logits
        assert torch.equal(sparse(ids).logits, expected)
        assert torch.equal(dense(ids).logits, expected)
    head = tiny.lm_head.weight.data_ptr()
    assert sparse.lm_head.weight.data_ptr() == dense.lm_head.weight.data_ptr() == head


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
    torch.manual_seed(0)
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
    return request.param


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
    torch.manual_seed(0)
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


@pytest.mark.parametrize("size", [1, 1000, COLD_BYTES - 1, COLD_BYTES, 3 * COLD_BYTES])
def test_rotated_copies_exceed_the_cache(size):
    assert copies(size) >= 2
    assert copies(size) * size >= COLD_BYTES


def timed(phase, side, way, milliseconds, failure=None):
    timing = Timing(*[milliseconds * 1e3] * 3) if failure is None else None
    return ModelTime(phase, side, way, 1, 100, timing, 12.0, failure)


MODELS = [
    timed("prefill", "dense", "eager", 4.0),
    timed("prefill", "dense", "compiled", 3.0),
    timed("prefill", "sparse", "eager", 2.0),
    timed("prefill", "sparse", "compiled", 0.0, "RuntimeError: no"),
    timed("decode", "dense", "eager", 1.0),
    timed("decode", "sparse", "eager", 2.0),
]


def test_what_there_is_is_saved(tmp_path):
    result = SpeedReport({"device": "a GPU"}, "auto", "both", bandwidth=2e12)
    result.save(tmp_path / "new" / "tiny-auto")
    assert (tmp_path / "new" / "tiny-auto.md").read_text() == "device a GPU\n"
    result.models += MODELS
    result.save(tmp_path / "new" / "tiny-auto")
    written = json.loads((tmp_path / "new" / "tiny-auto.json").read_text())
    assert len(written["models"]) == len(MODELS)
    assert "decode" in (tmp_path / "new" / "tiny-auto.md").read_text()


def test_a_command_line_gives_the_options():
    parser = make_parser("benchmark", "")
    add_arguments(parser)
    default = SpeedOptions(batch_sizes=[1], layer_tokens=[*LAYER_TOKENS])
    assert SpeedOptions.of(parser.parse_args([])) == default
    assert default.phases == ("prefill", "decode")
    line = "--backend torch --target decode --compile none --batch-sizes 2 --prompt-tokens 3"
    parsed = parser.parse_args([*line.split(), "--new-tokens", "4", "--layer-tokens"])
    assert SpeedOptions.of(parsed) == SpeedOptions("torch", "decode", None, [2], 3, 4, [])
    assert SpeedOptions.of(parsed).phases == ("decode",)


@pytest.mark.parametrize("number", ["0", "-1", "many"])
def test_numbers_that_are_none_are_refused(number, capsys):
    with pytest.raises(SystemExit):
        main(["model", f"--new-tokens={number}"])
    assert f"`--new-tokens`: expected a number from 1, got '{number}'" in capsys.readouterr().err


def test_the_faster_way_of_each_side_counts():
    assert speed_ups(MODELS) == {("prefill", 1): 1.5, ("decode", 1): 0.5}


def test_tables_show_wins_losses_and_failures():
    layers = [
        Measurement(1000, 2000, "bfloat16", 1, STORED_DENSE, {}, 4.0, 3.9, 4.1),
        Measurement(1000, 2000, "bfloat16", 1, "triton-gemv", {"rows": 8}, 2.5, 2.4, 2.6),
        Measurement(1000, 2000, "bfloat16", 1, "triton-gemm", {}, 8.0, 8.0, 8.0),
        Measurement(1000, 2000, "float32", 1, STORED_DENSE, {}, 8.0, 8.0, 8.0),
        Measurement(1000, 2000, "float32", 1, "unpack-dense", {}, 5.0, 5.0, 5.0),
    ]
    refused = [
        Failure(1000, 2000, "bfloat16", tokens, "cusparselt", "no multiple of 16")
        for tokens in (1, 8)
    ]
    result = SpeedReport(
        environment={"device": "a GPU"},
        backend="auto",
        target="both",
        bandwidth=2e12,
        layers=layers,
        failures=refused,
        models=MODELS,
        stayed_dense={"model.0": "refused"},
        dense_bytes=2_000_000_000,
        sparse_bytes=1_125_000_000,
        notes=["a note"],
    )
    text = tables(result)
    # 4 MB in 4 µs are 1000 GB/s; 2.25 MB in 2.5 µs are 900 GB/s of 2000.
    assert "| 1000×2000 | 1 | stored dense | 4.0 | 3.9–4.1 | 1.00 | 1000 | 50% |" in text
    assert "| 1000×2000 | 1 | triton-gemv | 2.5 | 2.4–2.6 | 1.60 | 900 | 45% |" in text
    # 8 MB in 8 µs are 1000 GB/s; 4 MB of values and 0.25 MB of columns in 5 µs are 850 GB/s.
    assert "| stored dense | 8.0 | 8.0–8.0 | 1.00 | 1000 | 50% |" in text
    assert "| unpack-dense | 5.0 | 5.0–5.0 | 1.60 | 850 | " in text
    assert "| triton-gemm | 8.0 | 8.0–8.0 | 0.50 |" in text
    assert "| prefill | 1 | 100 | dense | compiled | 3.000 | 3.000–3.000 | 33333 | 12 |" in text
    assert "failed: RuntimeError: no" in text
    assert "decode, batch 1: sparse is 0.50× as fast" in text
    assert "1.12 GB, 2.00 GB dense" in text
    assert "* cusparselt, 1000×2000, tokens 1, 8: no multiple of 16" in text
    assert "Stayed dense: model.0: refused." in text
    assert "a note" in text
    assert asdict(result)["models"][0]["timing"]["median"] == 4000.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")
def test_without_cuda_it_says_so(tiny, capsys):
    with pytest.raises(SystemExit):
        main(["model"])
    assert "this machine has none" in capsys.readouterr().err
    with pytest.raises(OptionError, match="this machine has none"):
        shapes.main(["--shape", "llama2-7b"])
    with pytest.raises(OptionError, match="on CUDA devices; the model is on cpu"):
        compare(packed_copy(tiny, prunable(tiny)), SpeedOptions())


@pytest.fixture
def as_if_on_cuda(monkeypatch, tmp_path):
    """All but the clock: models stay on the CPU and say that they are on a CUDA device."""
    device = torch.device("cuda", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(PreTrainedModel, "device", property(lambda _: device))
    monkeypatch.setattr(comparison, "bandwidth", lambda device: 2e12)
    monkeypatch.setattr(comparison, "check_backend", lambda backend, device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    identity = SimpleNamespace(uuid="b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: identity)
    yield device
    use_times(None, device)


def test_layers_and_models_are_compared_and_reported_as_they_come(
    as_if_on_cuda, tiny, monkeypatch, tmp_path
):
    def measure(rows, columns, dtype, device, tokens):
        for count in tokens:
            problem = rows, columns, "float32", count
            times = {STORED_DENSE: 2.0, "unpack-dense": 3.0}
            yield (
                [Measurement(*problem, name, {}, *[time] * 3) for name, time in times.items()],
                [Failure(*problem, "cusparselt", "no float32")],
            )

    def time_models(dense, sparse, options):
        assert not any(isinstance(m, Sparse24Linear) for m in dense.modules())
        assert options.compile_mode is None
        for phase in options.phases:
            yield [timed(phase, "dense", "eager", 2.0), timed(phase, "sparse", "eager", 1.0)]

    def apply(model, backend, target):
        assert (backend, target) == ("triton", "decode")
        return {"model.layers.0.mlp.up_proj": "refused"}

    monkeypatch.setattr(comparison, "measure", measure)
    monkeypatch.setattr(comparison, "time_models", time_models)
    monkeypatch.setattr(comparison, "apply", apply)
    # Two GPUs: nvidia-smi lists both unless it is asked for one.
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(
        '#!/bin/sh\ncase "$*" in *--id=GPU-b*) ;; *) echo "5, 1 MHz";; esac\necho "5, 2 MHz"\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    options = SpeedOptions("triton", "decode", None, layer_tokens=(1, 8))
    seen = []
    report = compare(
        packed_copy(tiny, prunable(tiny)), options, lambda r: seen.append(len(r.layers))
    )
    sizes = {(m.out_features, m.in_features) for m in report.layers}
    assert sizes == {(32, 32), (16, 32), (48, 32), (32, 48)}
    assert seen == [2, 4, 6, 8, 10, 12, 14, 16, 16]  # after each number of tokens, and the models
    assert len(report.failures) == 8
    assert speed_ups(report.models) == {("decode", 1): 2.0}
    assert report.environment["highest clock"] == "2 MHz"
    assert report.stayed_dense == {"model.layers.0.mlp.up_proj": "refused"}
    assert report.sparse_bytes < report.dense_bytes
    # Kernels are chosen by these times from now on, in later processes too.
    (path,) = (tmp_path / "mrp-lightning").iterdir()
    assert KernelTimes.load(path) == known_times(as_if_on_cuda)
    assert known_times(as_if_on_cuda).measurements == tuple(report.layers)


def test_a_shape_that_fails_does_not_keep_others_from_being_measured(monkeypatch, tmp_path, capsys):
    def fails_for_llama2(sparse, options, report_on):
        if "llama2" in sparse:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return SpeedReport({"device": "a GPU"}, options.backend, options.target, 2e12)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(shapes, "random_model", lambda shape, dtype, device: shape)
    monkeypatch.setattr(shapes, "prunable", lambda model: {})
    monkeypatch.setattr(shapes, "packed_copy", lambda model, names: model)
    monkeypatch.setattr(shapes, "compare", fails_for_llama2)
    with pytest.raises(SystemExit, match="not measured to the end: llama2-7b"):
        shapes.main(["--shape", "llama2-7b", "opt-6.7b", "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "## opt-6.7b, auto\n\ndevice a GPU\n" in shown
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "opt-6.7b-auto.json",
        "opt-6.7b-auto.md",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("compile_mode", [None, "default"])
def test_a_small_model_is_measured(kind, compile_mode, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", 0)
    model = random_model(kind, torch.bfloat16, device)
    seen = []
    result = compare(
        packed_copy(model, prunable(model)),
        SpeedOptions(
            compile_mode=compile_mode, prompt_tokens=16, new_tokens=4, layer_tokens=(1, 16)
        ),
        report_on=lambda found: seen.append(len(found.layers) + len(found.models)),
    )
    assert not [row.failure for row in result.models if row.failure]
    assert {m.kernel for m in result.layers} >= {STORED_DENSE, "unpack-dense"}
    wrong = [
        f for f in result.failures if "multiple" not in f.reason and "one token" not in f.reason
    ]
    assert wrong == []
    assert seen == sorted(seen)
    assert result.sparse_bytes > 0


@pytest.fixture
def packed(exports, tmp_path):
    """Packed models; they are made before the kernels' cache is that of the test."""
    return {form: str(exports(form, tmp_path / form).packed) for form in ("packed", "bitmask")}


def test_a_model_on_disk_is_measured(packed, as_if_on_cuda, monkeypatch, tmp_path, capsys):
    def compare(model, options, report_on):
        assert sum(isinstance(m, Sparse24Linear) for m in model.modules()) == 14
        report = SpeedReport({"device": "a GPU"}, options.backend, options.target, 2e12)
        report_on(report)
        assert (tmp_path / "speed.md").exists() == ("--out" in arguments)
        return report

    monkeypatch.setattr(comparison, "compare", compare)
    monkeypatch.setattr("mrp_lightning.devices.device_named", lambda _: as_if_on_cuda)
    monkeypatch.setattr(PreTrainedModel, "to", lambda model, device: model)
    capsys.readouterr()
    for arguments in ([packed["packed"]], [packed["packed"], "--out", str(tmp_path / "speed")]):
        main(arguments)
        assert capsys.readouterr().out == "device a GPU\n"
    with pytest.raises(SystemExit):
        main([packed["bitmask"]])
    assert "holds no packed 2:4 layers" in capsys.readouterr().err
