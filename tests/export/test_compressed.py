"""compressed-tensors: equal to the bit, by that package's own reading, and the refusals."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from quiet import QUIET
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from callbacks import MRPCallback
from export.to_sparse import main
from mrp_lightning import CausalLM, Trainer

from .conftest import change, logits, refusal

IDS = torch.arange(3, 20)[None]
SMALL = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": {},
    "qwen3_moe": {"head_dim": 16} | EXPERTS,
    "mixtral": LOCAL,
    "qwen2_moe": {"shared_expert_intermediate_size": 64} | EXPERTS,
    "gpt_oss": {"head_dim": 16} | LOCAL,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
}
GRID = {"grid": "int4-g32"}


@pytest.fixture(scope="module")
def _runs(tmp_path_factory):
    """A function that prunes a random model of a family, once for each of its arguments."""
    made = {}

    def run_of(kind, width, options):
        if (key := f"{kind} {width} {options}") not in made:
            torch.manual_seed(0)
            sizes = SMALL | {"intermediate_size": width} | MODELS[kind]
            root = tmp_path_factory.mktemp("runs")
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
            model.bfloat16().save_pretrained(root / "dense")
            windows = torch.randint(3, 60, (8, 16), generator=torch.Generator().manual_seed(0))
            loader = torch.utils.data.DataLoader(windows, batch_size=4)
            callback = MRPCallback(save_dir=root / "run", **options)
            Trainer(**QUIET).predict(CausalLM(root / "dense"), loader, callbacks=[callback])
            made[key] = root / "run"
        return made[key]

    return run_of


@pytest.fixture
def pruned(_runs, tmp_path):
    """A function that copies a pruned model into the test's directory."""
    return lambda kind="llama", name="run", width=128, **options: Path(
        shutil.copytree(_runs(kind, width, options), tmp_path / name)
    )


NAMED = ("--format", "compressed-tensors")


def export(run, *arguments, form=NAMED):
    main([str(run), *form, *arguments])
    return run.with_name(f"{run.name}-compressed-tensors")


def settings_of(out):
    return json.loads((out / "config.json").read_text())["quantization_config"]


RUNS = [
    ({"grid": "int4-g32"}, 4, 32),
    ({"grid": "int8-g32", "pattern": "2:4"}, 8, 32),
    ({"grid": "int4-g64", "sparsity": 0.5}, 4, 64),
    ({"bits": 8}, 8, 64),
    ({"bits": 3, "pattern": "2:4"}, 4, 64),
    ({"bits": 4, "sparsity": 0.5}, 8, 64),  # nine codes on each side
    ({"bits": 4, "group_size": 128}, 4, -1),
    ({"bits": 3, "width": 20}, 4, -1),  # the last word of a row is incomplete
]


@pytest.mark.parametrize(("options", "bits", "group"), RUNS, ids=str)
def test_the_package_reads_back_the_same_logits(options, bits, group, pruned, capsys):
    """It is the format of a run on integers; codes are compared by a reading bit by bit, too."""
    run = pruned(**options)
    out = export(run, form=NAMED if options.get("bits", 8) < 8 else ())
    assert f"in {bits} bits" in capsys.readouterr().out
    weights = settings_of(out)["config_groups"]["group_0"]["weights"]
    assert (weights["num_bits"], weights.get("group_size", -1)) == (bits, group)
    stored, dense = load_file(out / "model.safetensors"), load_file(run / "model.safetensors")
    name, columns = "model.layers.1.mlp.down_proj.weight", options.get("width", 128)
    words, scales = stored[f"{name}_packed"].numpy().view("uint32"), stored[f"{name}_scale"]
    each = 32 // bits
    assert words.shape == (64, -(-columns // each))
    assert scales.dtype == torch.bfloat16
    assert stored[f"{name}_shape"].tolist() == [64, columns]
    for row in range(3):
        for column in range(columns):
            code = int(words[row, column // each]) >> (bits * (column % each))
            code = code % 2**bits - 2 ** (bits - 1)
            assert (
                code * scales[row, 0 if group < 0 else column // group] == dense[name][row, column]
            )
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    assert torch.equal(logits(run, IDS), logits(out, IDS))


def test_layers_can_stay_dense_and_others_are_refused(pruned, tmp_path, capsys):
    run = pruned(**GRID)
    out = export(run, "--skip", "q_proj")
    stored = load_file(out / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight" in stored
    assert {"model.layers.0.self_attn.q_proj", "lm_head"} <= {*settings_of(out)["ignore"]}
    for name, options, message in (
        ("uneven", {"grid": "iq4_nl"}, "groups are no multiples of a scale"),
        ("free", {"pattern": "2:4"}, "no report of a pruning with `bits`"),
        ("groups", {"bits": 4, "group_size": 48}, "has groups of 32, 64 or 128 columns"),
    ):
        other = pruned(name=name, **options)
        assert message in refusal([other, *NAMED], capsys)
        assert not other.with_name(f"{name}-compressed-tensors").exists()


def test_a_head_on_a_grid_of_its_own_stays_dense(pruned, tmp_path):
    run = pruned(**GRID, head_grid="q8_0")
    out = export(run)
    stored, dense = load_file(out / "model.safetensors"), load_file(run / "model.safetensors")
    assert torch.equal(stored["lm_head.weight"], dense["lm_head.weight"])
    assert settings_of(out)["ignore"] == ["lm_head"]
    assert len([name for name in stored if name.endswith("weight_packed")]) == 14


def test_a_model_that_is_stored_wider_than_it_was_pruned_is_explained(pruned, capsys):
    run = pruned(**GRID)
    AutoModelForCausalLM.from_pretrained(run).float().save_pretrained(run)
    shown = refusal([run, *NAMED], capsys)
    assert "pruned as bfloat16 and is stored as torch.float32" in shown


def test_values_that_are_not_finite_are_refused_and_named(pruned, capsys):
    run = pruned(**GRID)
    tensors = load_file(run / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, run / "model.safetensors", {"format": "pt"})
    assert "model.norm.weight: 1\n" in refusal([run, *NAMED], capsys)


def test_options_that_the_format_does_not_use_are_refused(tmp_path, capsys):
    given = ["--device", "cuda:99", "--head-bits", "8"]
    shown = refusal([tmp_path, *NAMED, *given], capsys)
    assert "no use for `--head-bits`, `--device`. Leave" in shown


def test_a_check_says_what_it_found(pruned, capsys):
    run = pruned(**GRID)
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
    others = [run, *NAMED, "--check-only", "--out"]
    shown = refusal([*others, pruned(name="dense", **GRID)], capsys)
    assert "`quant_method` is None, expected 'compressed-tensors'" in shown
    change(out, **{"model.layers.0.mlp.up_proj.weight_scale": None})
    assert "layers.0.mlp.up_proj.weight. " in refusal([*others, out], capsys, status=1)


IN_FILES = {
    "mixtral": ("block_sparse_moe", "w1", "w2"),
    "qwen3_moe": ("mlp", "gate_proj", "down_proj"),
}


@pytest.mark.parametrize("kind", IN_FILES)
def test_experts_are_packed_one_by_one_and_transformers_stacks_them(kind, pruned, capsys):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run = pruned(kind, **GRID)
    out = export(run)
    settings = settings_of(out)
    shown = capsys.readouterr().out
    assert "32 layers in 4 bits" in shown  # two blocks of four projections and four experts of 3
    assert "vLLM and SGLang, which read this format, were not tried." in shown
    assert torch.equal(logits(out, IDS), logits(run, IDS))
    block, gate, down = IN_FILES[kind]
    stored = load_file(out / "model.safetensors")
    for name in (gate, down):
        start = f"model.layers.1.{block}.experts.3.{name}.weight"
        assert {f"{start}_packed", f"{start}_scale", f"{start}_shape"} <= stored.keys()
        assert start not in stored
    routers = {f"model.layers.{i}.{b}.gate" for i in range(2) for b in {block, "mlp"}}
    assert set(settings["ignore"]) == {"lm_head"} | routers


def test_a_shared_expert_is_packed_too(pruned):
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    run = pruned("qwen2_moe", **GRID)
    assert torch.equal(logits(export(run), IDS), logits(run, IDS))


def test_experts_that_the_files_hold_as_one_tensor_are_counted(pruned, capsys):
    run = pruned("gpt_oss", **GRID)
    settings = settings_of(export(run))
    shown = capsys.readouterr().out
    # Four experts of two blocks, each with 128 · 2 · 64 and 64 · 128 weights.
    assert f"16 pruned layers with {2 * 4 * (256 * 64 + 64 * 128):,} weights stay in 16" in shown
    assert "(8 layers): the files hold no matrix of its own for it" in shown
    patterns = [each.removeprefix("re:") for each in settings["ignore"] if each.startswith("re:")]
    for name in ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts.0.gate_proj"):
        assert sum(re.match(pattern, name) is not None for pattern in patterns) == 1


def test_skipped_experts_leave_their_block_dense(pruned, capsys):
    """vLLM reads such a file; transformers 5.23 does not."""
    run = pruned("qwen3_moe", **GRID)
    settings = settings_of(export(run, "--skip", "layers.0.mlp.experts.2"))
    shown = capsys.readouterr().out
    assert "20 layers in 4 bits" in shown
    assert "it is an expert, and others of its block stay dense" in shown
    assert r"re:^model\.layers\.0\.mlp\.experts(\..*)?$" in settings["ignore"]


def test_layers_of_another_kind_are_named(pruned, capsys):
    error = refusal([pruned("gpt2", **GRID), *NAMED], capsys)
    assert "has no layer that engines read as compressed-tensors" in error
    assert "transformer.h.*.mlp.c_fc (2 layers): it is a Conv1D, and engines read nn.Lin" in error
    assert "Prune with" not in error


@pytest.mark.parametrize("end", ["_packed", "_scale", ""])
def test_a_file_that_reads_back_otherwise_is_no_success(end, pruned, capsys):
    run = pruned(**GRID)
    out = export(run)
    name = "model.layers.1.mlp.down_proj.weight" if end else "lm_head.weight"
    changed = load_file(out / "model.safetensors")[f"{name}{end}"]
    changed[0, 0] += 1
    change(out, **{f"{name}{end}": changed})
    assert f"differ from {run}: {name}." in refusal([run, *NAMED, "--check-only"], capsys, status=1)
