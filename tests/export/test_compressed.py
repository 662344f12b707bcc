"""compressed-tensors: equal to the bit, by that package's own reading, and the refusals."""

import json

import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from callbacks import MRPCallback
from export.to_sparse import main
from mrp_lightning import CausalLM, Trainer

from .conftest import refusal


@pytest.fixture
def pruned(tmp_path):
    """A function that prunes a LLaMA with 64 and 128 columns, and returns the directory."""

    def prune(name="run", width=128, **options):
        torch.manual_seed(0)
        sizes = {"hidden_size": 64, "intermediate_size": width, "num_hidden_layers": 2}
        config = LlamaConfig(vocab_size=64, num_attention_heads=4, num_key_value_heads=2, **sizes)
        LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "dense")
        windows = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))
        callback = MRPCallback(save_dir=tmp_path / name, **options)
        loader = torch.utils.data.DataLoader(windows, batch_size=4)
        trainer = Trainer(**QUIET)
        trainer.predict(CausalLM(tmp_path / "dense"), loader, callbacks=[callback])
        return tmp_path / name

    return prune


def export(run, *arguments):
    main([str(run), "--format", "compressed-tensors", *arguments])
    return run.with_name(f"{run.name}-compressed-tensors")


RUNS = [
    ({"grid": "int4-g32"}, 4, 32),
    ({"grid": "int8-g64"}, 8, 64),
    ({"bits": 3, "pattern": "2:4"}, 4, 64),
    ({"bits": 4, "sparsity": 0.5}, 8, 64),  # nine codes on each side
    ({"grid": "int4-g64", "sparsity": 0.5}, 4, 64),
    ({"bits": 4, "group_size": 128}, 4, -1),
]


@pytest.mark.parametrize(("options", "bits", "group"), RUNS, ids=str)
def test_the_package_reads_back_the_same_logits(options, bits, group, pruned, capsys):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run = pruned(**options)
    out = export(run)
    assert f"in {bits} bits" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights.get("group_size", -1)) == (bits, group)
    ours = AutoModelForCausalLM.from_pretrained(run)
    theirs = AutoModelForCausalLM.from_pretrained(out)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    stored = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    assert stored[f"{name}_packed"].shape == (64, 128 * bits // 32)
    assert stored[f"{name}_scale"].dtype == torch.bfloat16
    assert stored[f"{name}_shape"].tolist() == [64, 128]


@pytest.mark.parametrize("options", [{"grid": "int4-g32"}, {"grid": "int8-g32", "pattern": "2:4"}])
def test_it_is_the_format_of_a_run_on_an_integer_grid(options, pruned):
    run = pruned(**options)
    main([str(run)])
    config = json.loads((run.with_name("run-compressed-tensors") / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"


def test_codes_lie_in_int32_from_the_lowest_bits(pruned):
    """Against a reading of the words bit by bit."""
    run = pruned(grid="int4-g32")
    out = export(run)
    stored, dense = load_file(out / "model.safetensors"), load_file(run / "model.safetensors")
    name = "model.layers.1.self_attn.o_proj.weight"
    words = stored[f"{name}_packed"].numpy().view("uint32")
    for row in range(3):
        for column in range(64):
            code = (int(words[row, column // 8]) >> (4 * (column % 8))) % 16 - 8
            value = code * stored[f"{name}_scale"][row, column // 32]
            assert value == dense[name][row, column]


def test_layers_can_stay_dense_and_others_are_refused(pruned, tmp_path, capsys):
    run = pruned(grid="int4-g32")
    out = export(run, "--skip", "q_proj")
    stored = load_file(out / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in stored
    ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "model.layers.0.self_attn.q_proj" in ignored
    assert "lm_head" in ignored
    for name, options, message in (
        ("uneven", {"grid": "iq4_nl"}, "groups are no multiples of a scale"),
        ("free", {"pattern": "2:4"}, "no report of a pruning with `bits`"),
        ("groups", {"bits": 4, "group_size": 48}, "has groups of 32, 64 or 128 columns"),
    ):
        other = pruned(name, **options)
        with pytest.raises(SystemExit) as ended:
            export(other)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
        assert not other.with_name(f"{name}-compressed-tensors").exists()


def test_a_head_on_a_grid_of_its_own_stays_dense(pruned, tmp_path):
    run = pruned(grid="int4-g32", head_grid="q8_0")
    out = export(run)
    stored, dense = load_file(out / "model.safetensors"), load_file(run / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], dense["lm_head.weight"])
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head"]
    assert len([name for name in stored if name.endswith("weight_packed")]) == 14


def test_a_model_that_is_stored_wider_than_it_was_pruned_is_explained(pruned, capsys):
    run = pruned(grid="int4-g32")
    AutoModelForCausalLM.from_pretrained(run).float().save_pretrained(run)
    with pytest.raises(SystemExit):
        export(run)
    assert "pruned as bfloat16 and is stored as torch.float32" in capsys.readouterr().err


def test_columns_that_leave_a_word_incomplete_are_read_back(pruned, capsys):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run = pruned(width=20, bits=3)
    stored = load_file(export(run) / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    assert stored[f"{name}_packed"].shape == (64, 3)  # 20 columns in words of eight
    assert "the same logits" in capsys.readouterr().out


def test_values_that_are_not_finite_are_refused_and_named(pruned, capsys):
    run = pruned(grid="int4-g32")
    tensors = load_file(run / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, run / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight: 1\n" in refusal([str(run), "--format", "compressed-tensors"], capsys)


def test_options_that_the_format_does_not_use_are_refused(tmp_path, capsys):
    given = ["--allow-partial", "--device", "cuda:99", "--head-bits", "8"]
    shown = refusal([str(tmp_path), "--format", "compressed-tensors", *given], capsys)
    assert "no use for `--head-bits`, `--allow-partial`, `--device`. Leave" in shown


def test_a_check_says_what_it_found(pruned, capsys):
    run = pruned(grid="int4-g32")
    capsys.readouterr()
    out = export(run, "--check-only")
    assert capsys.readouterr().out == (
        f"checked only: {out} does not exist, and nothing was written\n"
    )
    export(run)
    capsys.readouterr()
    export(run, "--check-only")
    shown = capsys.readouterr().out
    assert "14 layers in 4 bits" in shown
    assert shown.endswith(f"Checked: {out}\n")
