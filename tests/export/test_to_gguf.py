"""GGUF out: read back through transformers, and by package gguf."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from quiet import QUIET
from transformers import AutoModelForCausalLM, AutoTokenizer

from callbacks import MRPCallback
from export.to_gguf import main
from export.to_sparse import main as export
from mrp_lightning import BlockTuning, CausalLM, Trainer, prune_weight

pytest.importorskip("gguf", reason="needs the extra `gguf`")
pytest.importorskip("accelerate", reason="needs the extra `gguf`")

import gguf
from gguf.quants import dequantize, quantize
from gguf_files import save_small, tensors_of, values_of, write

from export.gguf.types import encode
from mrp_lightning.errors import FormatError, ParityError
from mrp_lightning.records.grid_file import NAME
from mrp_lightning.solver.grid import GRIDS, GridParameters

from .conftest import refusal


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """A tiny LLaMA of few words."""
    directory = tmp_path_factory.mktemp("dense")
    save_small(directory)
    return directory


@pytest.fixture(scope="module")
def source(dense, tmp_path_factory):
    """Its GGUF file."""
    file = tmp_path_factory.mktemp("source") / "source.gguf"
    write(file, dense)
    return file


def prune(source, directory, **options):
    model = CausalLM(source)
    windows = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))
    callback = MRPCallback(save_dir=directory, **options)
    loader = torch.utils.data.DataLoader(windows, batch_size=4)
    Trainer(**QUIET).predict(model, loader, callbacks=[callback])
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The directories of prunings by their source and options."""
    made = {}

    def run_of(source, **options):
        key = f"{source} {options}"
        if key not in made:
            made[key] = prune(source, tmp_path_factory.mktemp("runs") / "run", **options)
        return made[key]

    return run_of


@pytest.fixture
def pruned(runs, tmp_path):
    """A function that copies the run of a source with some options into the test's directory."""
    return lambda source, name="run", **options: Path(
        shutil.copytree(runs(source, **options), tmp_path / name)
    )


RUNS = [
    {"structure": "neurons", "sparsity": 0.25},
    {"structure": "heads", "sparsity": 0.5},
    {"structure": "blocks", "sparsity": 0.5},
    {"pattern": "2:4"},
]


@pytest.mark.parametrize("options", RUNS, ids=str)
def test_it_reads_back_as_the_same_model(options, source, pruned, tmp_path, capsys):
    run = pruned(source, **options)
    main([str(run), "--like", str(source)])
    file = tmp_path / "run-bf16.gguf"
    assert str(file) in capsys.readouterr().out
    ours = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32
    )
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name
    sizes = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    for key in (*sizes, "num_hidden_layers"):
        assert getattr(ours.config, key) == getattr(theirs.config, key)
    blocks = {x.name.split(".")[1] for x in gguf.GGUFReader(file).tensors if "blk." in x.name}
    assert len(blocks) == ours.config.num_hidden_layers
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
    words = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    assert words.get_vocab() == AutoTokenizer.from_pretrained(run).get_vocab()


@pytest.mark.parametrize(("kind", "off"), [("q8_0", 0.02), ("q4_0", 0.2)])
def test_zeros_stay_zeros_in_every_type(kind, off, source, pruned, tmp_path):
    run = pruned(source, pattern="2:4")
    out = tmp_path / "other.gguf"
    main([str(run), "--like", str(source), "--type", kind, "--out", str(out)])
    state = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float32).state_dict()
    stored = tensors_of(out)
    for ours, name in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v")):
        values = values_of(stored[f"blk.0.{name}.weight"])
        weight = state[f"model.layers.0.{ours}.weight"]
        assert (weight == 0).float().mean() == 0.5
        assert not values[weight == 0].any()
        assert (values - weight).abs().max() <= off * weight.abs().max()
    assert stored["output_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32


def test_what_does_not_fit_is_refused(source, dense, pruned, tmp_path, capsys):
    run = pruned(source, **RUNS[0])
    other = tmp_path / "other.gguf"
    write(other, dense, architecture="qwen2")
    there = tmp_path / "there.gguf"
    there.write_text("mine")
    like = ["--like", str(source)]
    for args, message in (
        ([str(run), "--like", str(other)], "of another model: its `model_type`"),
        ([str(run), "--like", str(tmp_path / "none.gguf")], "`--like`: there is no file"),
        ([str(run), *like, "--out", str(there)], "exists. Name another file"),
        ([str(run), *like, "--out", str(source)], "must not be the file of `--like`"),
        ([str(run), *like, "--out", str(tmp_path / "x")], "ends in .gguf"),
        ([str(run), *like, "--out=/proc/x.gguf"], "`--out`: /proc/x.gguf cannot be made in /proc"),
        ([str(run), *like, "--out", f"{there}/x.gguf"], "there.gguf is a file"),
        ([str(tmp_path / "none"), *like], "`RUN`: there is no directory"),
    ):
        assert message in refusal(args, capsys, command=main)
    assert there.read_text() == "mine"
    assert not list(tmp_path.glob("*bf16.gguf"))


GRIDS_OF_RUNS = [
    ({"grid": "iq4_nl"}, "IQ4_NL"),
    ({"bits": 3, "pattern": "2:4"}, "Q4_0"),
    ({"bits": 4, "sparsity": 0.5}, "Q5_0"),
]


@pytest.mark.parametrize(("options", "kind"), GRIDS_OF_RUNS, ids=str)
def test_a_run_with_bits_is_exact_in_its_type(options, kind, source, pruned, tmp_path, capsys):
    run = pruned(source, **options)
    main([str(run), "--like", str(source)])
    assert "holds the weights of the checkpoint to the bit" in capsys.readouterr().out
    file = tmp_path / "run.gguf"
    stored = tensors_of(file)
    assert stored["blk.0.ffn_down.weight"].tensor_type.name == kind
    ours = AutoModelForCausalLM.from_pretrained(run)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=ours.dtype)
    for name, weight in ours.state_dict().items():
        assert torch.equal(weight, theirs.state_dict()[name]), name


def test_export_makes_the_file_of_a_head_on_a_grid_of_llama_cpp(dense, pruned, tmp_path):
    run = pruned(dense, head_grid="iq4_nl")
    export([str(run)])
    stored = tensors_of(tmp_path / "run.gguf")
    assert stored["token_embd.weight"].tensor_type.name == "IQ4_NL"


def test_export_makes_the_file_of_a_run_on_a_grid_of_llama_cpp(source, pruned, tmp_path, capsys):
    run = pruned(source, grid="q5_0", pattern="2:4")
    export([str(run)])
    shown = capsys.readouterr().out
    assert "on llama.cpp's grid q5_0" in shown
    assert "holds the weights of the checkpoint to the bit" in shown
    stored = tensors_of(tmp_path / "run.gguf")
    assert stored["blk.0.ffn_down.weight"].tensor_type.name == "Q5_0"
    error = refusal([run, "--skip", "lm_head"], capsys)  # an option that the file has not
    assert "whose file `mrp-lightning gguf` writes" in error
    export([str(run), "--format", "packed"])
    assert (tmp_path / "run-sparse24" / "config.json").is_file()


def test_rounding_is_reported_and_embeddings_may_have_another_type(
    source, pruned, tmp_path, capsys
):
    run = pruned(source, grid="iq4_nl")
    arguments = [str(run), "--like", str(source)]
    main([*arguments, "--type", "q4_0", "--embedding-type", "bf16"])
    printed = capsys.readouterr().out
    assert "14 of them were rounded, by up to" in printed
    stored = tensors_of(tmp_path / "run-q4_0.gguf")
    assert stored["token_embd.weight"].tensor_type.name == "BF16"
    plain = pruned(source, "plain", pattern="2:4")
    error = refusal([plain, "--like", source, "--type", "iq4_nl"], capsys, command=main)
    assert "Prune with `grid: iq4_nl`" in error


@pytest.mark.parametrize(
    ("options", "kind", "of_blocks", "of_head"),
    [
        ({"head_grid": "iq4_nl"}, None, "F32", "IQ4_NL"),
        ({"head_grid": "iq4_nl"}, "bf16", "BF16", "BF16"),
        ({"head_grid": "iq4_nl", "grid": "q4_0"}, "q4_0", "Q4_0", "IQ4_NL"),
        ({"head_grid": "q5_1", "grid": "q4_1"}, None, "Q4_1", "Q5_1"),
    ],
    ids=str,
)
def test_a_head_on_a_grid_is_exact_in_its_type(
    options, kind, of_blocks, of_head, dense, pruned, tmp_path
):
    run = pruned(dense, **options)
    out = tmp_path / "run.gguf"
    main([str(run), "--out", str(out), *(["--type", kind] if kind else [])])
    stored = tensors_of(out)
    assert stored["blk.0.ffn_down.weight"].tensor_type.name == of_blocks
    head = stored["token_embd.weight"]
    assert head.tensor_type.name == of_head
    values = values_of(head)
    weight = AutoModelForCausalLM.from_pretrained(run).lm_head.weight
    assert torch.equal(values.to(weight.dtype), weight) == (kind != "bf16")
    assert "output.weight" not in stored  # tied


def test_of_a_free_head_only_the_head_is_on_the_grid(tmp_path):
    (tmp_path / "dense").mkdir()
    save_small(tmp_path / "dense", torch.bfloat16, tie_word_embeddings=False)
    run = prune(tmp_path / "dense", tmp_path / "run", grid="q4_0", head_grid="iq4_nl")
    for kind, of_embeddings in (("auto", "BF16"), ("q4_0", "Q8_0")):
        out = tmp_path / f"{kind}.gguf"
        main([str(run), "--out", str(out), "--type", kind])
        stored = tensors_of(out)
        assert stored["output.weight"].tensor_type.name == "IQ4_NL"
        assert stored["token_embd.weight"].tensor_type.name == of_embeddings


def test_a_file_that_is_cut_short_is_no_success(source, pruned, tmp_path, monkeypatch, capsys):
    run = pruned(source, pattern="2:4")
    out = tmp_path / "out.gguf"
    out.write_text("a good file")

    def write(writer):
        whole(writer)
        for file in writer.fout:
            file.truncate(file.tell() - 100)

    whole = gguf.GGUFWriter.write_tensors_to_file
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensors_to_file", write)
    with pytest.raises(SystemExit) as ended:
        main([str(run), "--like", str(source), "--out", str(out), "--overwrite"])
    assert ended.value.code
    assert "could not be written whole" in capsys.readouterr().err
    assert out.read_text() == "a good file"


@pytest.mark.parametrize("part", [0.001, 0.3, 0.999])
def test_a_damaged_source_is_refused_by_name(part, source, runs, tmp_path, capsys):
    damaged = tmp_path / "damaged.gguf"
    content = source.read_bytes()
    damaged.write_bytes(content[: int(part * len(content))])
    error = refusal([runs(source, pattern="2:4"), "--like", damaged], capsys, command=main)
    assert f"`--like`: {damaged} is damaged" in error


@pytest.mark.parametrize("grid", ["iq4_nl", "mxfp4", "q4_0", "q5_0", "q8_0"])
def test_a_matrix_that_was_pruned_in_bfloat16_is_exact(grid):
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    quantised = prune_weight(weight, torch.eye(64), grid=grid).weight
    for stored_as in (torch.bfloat16, torch.float32):
        encoded = encode("blk.0.ffn_down.weight", quantised.to(stored_as), "auto")
        assert encoded.kind.name == grid
        values = dequantize(encoded.content, encoded.kind.stored_as)
        assert torch.equal(torch.from_numpy(values.copy()).bfloat16(), quantised)


def test_values_of_another_type_are_rounded_to_eight_bits_as_gguf_does():
    """Values of Q5_0 lie on the grid of Q8_0, too, by scales that take long to find."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    content = quantize(weight.numpy(), gguf.GGMLQuantizationType.Q5_0)
    coarse = torch.from_numpy(dequantize(content, gguf.GGMLQuantizationType.Q5_0)).bfloat16()
    expected = quantize(coarse.float().numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.array_equal(encode("token_embd.weight", coarse, "q8_0").content, expected)
    eight = torch.from_numpy(dequantize(expected, gguf.GGMLQuantizationType.Q8_0)).bfloat16()
    encoded = encode("token_embd.weight", eight, "q8_0").content
    decoded = dequantize(encoded, gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(torch.from_numpy(decoded).bfloat16(), eight)


def test_of_two_types_that_hold_a_matrix_auto_takes_the_smaller():
    """Codes of both q4_0 and mxfp4 with scales that are powers of two."""
    codes = torch.randint(-4, 5, (8, 64), generator=torch.Generator().manual_seed(0))
    weight = codes / 8
    sizes = {kind: encode("blk.0.ffn_down.weight", weight, kind) for kind in ("q4_0", "mxfp4")}
    assert sizes["mxfp4"].content.nbytes < sizes["q4_0"].content.nbytes
    assert encode("blk.0.ffn_down.weight", weight, "auto").kind.name == "mxfp4"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_steps_and_units_are_stored_to_the_bit(dtype):
    """Package gguf reads back what was encoded, with signs and steps of all sizes."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-4, 4, (9, 32, 16), generator=generator)
    steps = torch.randint(-32, 31, (9, 32, 1), generator=generator)
    steps += steps >= 0  # a run has no scale of zero
    units = torch.randn(9, 2, 1, 1, generator=generator).half().float() / 64
    scales = (steps.unflatten(1, (2, 16)) * units.half().float()).flatten(1, 2)
    weight = (codes * scales).flatten(1).to(dtype)
    parameters = GridParameters(scales.flatten(1))
    encoded = encode("blk.0.ffn_down.weight", weight, "auto", parameters)
    assert encoded.kind.name == "q3_k"
    assert encoded.content.shape == (9, 2 * 110)
    values = dequantize(encoded.content, gguf.GGMLQuantizationType.Q3_K)
    assert torch.equal(torch.from_numpy(values.copy()).to(dtype), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["q4_1", "q4_k", "q5_1", "q5_k"])
def test_minima_are_stored_to_the_bit(name, dtype):
    """Package gguf reads back what was encoded, with steps of all sizes and minima of zero."""
    grid, generator = GRIDS[name], torch.Generator().manual_seed(0)
    codes = torch.randint(0, len(grid.codebook), (9, 512), generator=generator)
    scales, minima = (torch.rand(9, 16, generator=generator) / 64 for _ in range(2))
    scales[2], minima[1] = scales[2] / 100, 0
    if grid.steps is None:
        parameters = GridParameters(scales.half().float(), (minima - 0.003).half().float())
    else:
        steps = torch.randint(0, 64, (2, 9, 16), generator=generator)
        units = torch.rand(2, 9, 2, generator=generator).half().float().repeat_interleave(8, 2) / 64
        parameters = GridParameters((steps[0] + (steps[0] == 0)) * units[0], steps[1] * units[1])
    weight = grid.values(codes, parameters).to(dtype)
    encoded = encode("blk.0.ffn_down.weight", weight, "auto", parameters)
    assert encoded.kind.name == name
    bits = {"q4_1": 5, "q4_k": 4.5, "q5_1": 6, "q5_k": 5.5}[name]
    assert encoded.content.shape == (9, 512 * bits / 8)
    values = dequantize(encoded.content, encoded.kind.stored_as)
    assert torch.equal(torch.from_numpy(values.copy()).to(dtype), weight)
    weight[3, 5] += 1
    with pytest.raises(FormatError, match="blk.0.*grid/parameters.safetensors do not give these"):
        encode("blk.0.ffn_down.weight", weight, "auto", parameters)


@pytest.mark.parametrize("name", ["q4_k", "q3_k"])
def test_a_run_with_minima_or_units_is_exact_in_its_type_and_needs_its_file(name, tmp_path, capsys):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    (tmp_path / "dense").mkdir()
    save_small(tmp_path / "dense", torch.bfloat16, **sizes)
    tuning = BlockTuning(epochs=1)
    run = prune(tmp_path / "dense", tmp_path / "run", grid=name, tuning=tuning)
    main([str(run)])
    assert "holds the weights of the checkpoint to the bit" in capsys.readouterr().out
    assert_exact(tmp_path, run, name.upper())
    (run / NAME).unlink()
    for options in (["--overwrite"], ["--type", name]):
        assert f"{run / NAME} is missing" in refusal([run, *options], capsys, command=main)
    main([str(run), "--type", "q8_0"])
    assert "were rounded, by up to" in capsys.readouterr().out


def assert_exact(tmp_path, run, kind):
    """All 7 layers of `run.gguf` have a type, and transformers reads them as the run's."""
    stored = gguf.GGUFReader(tmp_path / "run.gguf").tensors
    assert sum(tensor.tensor_type.name == kind for tensor in stored) == 7
    ours = AutoModelForCausalLM.from_pretrained(run).state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="run.gguf", dtype=torch.bfloat16
    )
    for name, weight in theirs.state_dict().items():
        if "proj" in name:
            assert torch.equal(weight, ours[name]), name


def test_the_reason_that_a_type_cannot_hold_a_weight_is_given():
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    weight[1, 3] = 0
    with pytest.raises(ParityError, match="1 of its zeros would become other numbers"):
        encode("w", weight, "q4_1")
    with pytest.raises(ParityError, match="largest weights are beyond"):
        encode("w", weight * 1e6, "f16")
    for value in (torch.nan, torch.inf):
        weight[2, 2] = value
        for kind in ("auto", "f32", "q4_1", "q8_0"):
            with pytest.raises(FormatError, match="^w holds NaN or infinite weights"):
                encode("w", weight, kind)
