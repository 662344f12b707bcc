"""`python -m export.to_sparse`, from any pruned checkpoint to a report."""

import json
import re
import signal
from pathlib import Path

import huggingface_hub
import pytest
import torch
import warm
from safetensors.torch import load_file, save_file

import export
from export.to_sparse import main
from mrp_lightning.errors import FormatError
from mrp_sparse.formats.sparse24 import SPARSE24, pack

from .conftest import Exported, logits, refusal, thin_out, write_report

ROOT = Path(__file__).parents[2]


@pytest.fixture
def packed(exports, tmp_path) -> Exported:
    return exports("packed", tmp_path)


def set_group(directory: Path, name: str, values: list[float], group: int = 0) -> None:
    """Change four weights of a layer's first row."""
    tensors = load_file(directory / "model.safetensors")
    tensors[f"{name}.weight"][0, 4 * group : 4 * group + 4] = torch.tensor(values).bfloat16()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_sizes_and_parity_are_shown_and_written(packed, capsys):
    llama, out = packed.source, packed.packed
    before = sorted(llama.parent.rglob("*"))
    main([str(llama), "--check-only"])
    assert sorted(llama.parent.rglob("*")) == before
    shown = capsys.readouterr().out
    assert "0.5625" in shown
    assert f"Checked: {out}" in shown
    report = json.loads((out / "export_report.json").read_text())
    assert report["totals"]["packed_layers"] == 14
    assert report["totals"]["packed_fraction"] == 0.5625
    assert report["totals"]["exported_bytes"] == (out / "model.safetensors").stat().st_size
    assert report["parity"]["failures"] == []
    assert report["parity"]["text"]["tokens"] >= 512
    assert report["parity"]["text"]["top1_agreement"] >= 0.995
    assert {row["dense_because"] for row in report["layers"]} == {None}
    ours = {"config.json", "export_report.json", "model.safetensors"}
    for file in llama.iterdir():
        if file.name not in ours:
            assert (out / file.name).read_bytes() == file.read_bytes()
    config = json.loads((out / "config.json").read_text())
    settings = config.pop("quantization_config")
    assert settings["quant_method"] == "mrp_sparse24"
    assert settings["format_version"] == 1
    assert config == json.loads((llama / "config.json").read_text())


def test_the_shards_stay_as_they_were(pruned, ids, tmp_path):
    source = pruned(max_shard_size="60KB")
    names = {file.name for file in source.glob("*.safetensors")}
    assert len(names) > 1
    main([str(source), "--out", str(tmp_path / "out")])
    assert {file.name for file in (tmp_path / "out").glob("*.safetensors")} == names
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    before = logits(source, ids)
    assert torch.equal(logits(tmp_path / "out", ids), before)


def test_a_single_shard_with_an_index_becomes_a_file_without(llama, ids):
    before = logits(llama, ids)
    tensors = load_file(llama / "model.safetensors")
    (llama / "model.safetensors").unlink()
    shard = llama / "model-00001-of-00001.safetensors"
    save_file(tensors, shard)
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, shard.name)}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    main([str(llama)])
    out = llama.with_name("llama-sparse24")
    assert [file.name for file in out.glob("*model*")] == ["model.safetensors"]
    assert torch.equal(logits(out, ids), before)


def test_zeros_become_positive_and_are_counted(llama, ids):
    set_group(llama, "model.layers.0.mlp.up_proj", [-0.0, 1.0, -0.0, 0.5])
    before = logits(llama, ids)
    main([str(llama)])
    out = llama.with_name("llama-sparse24")
    report = json.loads((out / "export_report.json").read_text())
    assert report["totals"]["negative_zeros"] == 2
    assert torch.equal(logits(out, ids), before)


def test_pickles_are_refused_with_the_next_step(llama, capsys, tmp_path):
    torch.save(load_file(llama / "model.safetensors"), llama / "pytorch_model.bin")
    (llama / "model.safetensors").unlink()
    shown = refusal([llama], capsys)
    assert "(pytorch_model.bin), and safetensors" in shown
    assert "`save_pretrained`" in shown
    shown = refusal([str(llama / "pytorch_model.bin")], capsys)
    assert "is neither a Hugging Face directory" in shown
    assert "`save_pretrained`" in shown


def test_layers_that_break_the_pattern_are_refused_by_name(llama, capsys):
    set_group(llama, "model.layers.0.mlp.up_proj", [1.0, 2.0, 3.0, 0.0])
    set_group(llama, "model.layers.1.self_attn.q_proj", [1.0, 2.0, 3.0, 4.0], group=2)
    shown = refusal([llama, "--format", "packed"], capsys)
    assert "not 2:4 in 2 of 14 layers" in shown
    assert "model.layers.0.mlp.up_proj: not 2:4: 1 of 512 groups" in shown
    assert "model.layers.1.self_attn.q_proj" in shown
    assert not llama.with_name("llama-sparse24").exists()
    skip = ["--skip", "up_proj", "layers.1.self_attn.q_proj"]
    main([str(llama), "--format", "packed", *skip, "--check-only"])
    assert "11 2:4 layers" in capsys.readouterr().out


def test_many_offending_layers_are_counted_by_kind(llama, capsys):
    tensors = load_file(llama / "model.safetensors")
    for name, tensor in tensors.items():
        if "proj" in name:
            tensor[0, :4] = 1.0
    tensors["model.layers.1.mlp.up_proj.weight"][:3, :4] = 1.0
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    first, *kinds = refusal([llama, "--format", "packed"], capsys).splitlines()
    assert "not 2:4 in 14 of 14 layers" in first
    assert len(kinds) == 7
    (up,) = [line for line in kinds if "up_proj" in line]
    assert up.split(": ", 1) == [
        "  model.layers.*.mlp.up_proj (2 layers), such as model.layers.0.mlp.up_proj",
        "not 2:4: 1 of 512 groups have more than two non-zeros",
    ]


def test_the_pruning_report_says_what_must_be_2_of_4(llama, capsys):
    set_group(llama, "model.layers.0.mlp.up_proj", [1.0, 2.0, 3.0, 0.0])
    write_report(llama, {}, pattern="2:4")
    main([str(llama), "--check-only"])
    assert "it was not to be pruned" in " ".join(capsys.readouterr().out.split())
    write_report(llama, {"model.layers.0.mlp.up_proj": (64, 32)}, sparsity=0.5)
    assert "not 2:4 in 1 of 1 layers" in refusal([llama, "--format", "packed"], capsys)


def test_columns_that_are_no_multiple_of_8_stay_dense_or_become_bitmasks(pruned, ids, tmp_path):
    source = pruned(intermediate_size=60)
    main([str(source), "--out", str(tmp_path / "out")])
    report = json.loads((tmp_path / "out" / "export_report.json").read_text())
    dense = {row["name"]: row["dense_because"] for row in report["layers"] if row["dense_because"]}
    assert dense == {
        f"model.layers.{i}.mlp.down_proj": "in_features 60 is not a multiple of 8" for i in (0, 1)
    }
    assert torch.equal(logits(tmp_path / "out", ids), logits(source, ids))
    thin_out(source)
    main([str(source), "--out", str(tmp_path / "bits")])
    report = json.loads((tmp_path / "bits" / "export_report.json").read_text())
    assert {row["dense_because"] for row in report["layers"]} == {None}
    assert torch.equal(logits(tmp_path / "bits", ids), logits(source, ids))


def test_untied_heads_stay_dense(pruned, capsys):
    main([str(pruned(tie_word_embeddings=False)), "--check-only"])
    assert "│ lm_head │ not 2:4: " in capsys.readouterr().out


def test_one_wrong_nibble_in_the_file_fails_the_gate(packed, capsys):
    llama, out = packed.source, packed.packed
    tensors = load_file(out / "model.safetensors")
    meta = tensors["model.layers.1.mlp.down_proj.weight_meta"]
    low = int(meta[3, 2]) & 15
    meta[3, 2] = (int(meta[3, 2]) & 0xF0) | {4: 8, 8: 4}.get(low, 4)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    shown = refusal([llama, "--check-only"], capsys, status=1)
    assert "model.layers.1.mlp.down_proj.weight" in shown


def test_a_failed_gate_leaves_nothing(llama, capsys, monkeypatch):
    def wrong(weight):
        values, meta = pack(weight)
        values[0, 0] += 1
        return values, meta

    monkeypatch.setitem(vars(SPARSE24), "pack", wrong)
    shown = refusal([llama], capsys, status=1)
    assert shown.count("values have other bits") == 14
    assert [path.name for path in llama.parent.iterdir()] == ["llama"]


def test_an_output_that_is_not_empty_is_refused(llama, capsys):
    out = llama.with_name("llama-sparse24")
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert "--out" in refusal([llama], capsys)
    assert (out / "mine.txt").read_text() == "mine"
    assert "did not write" in refusal([llama, "--overwrite"], capsys)
    assert (out / "mine.txt").read_text() == "mine"


def test_an_export_may_be_replaced_with_all_that_was_copied_into_it(packed):
    llama, out = packed.source, packed.packed
    (llama / "LICENSE").write_text("free")
    (llama / "modules.json").write_text('[{"path": "2_Dense"}]')
    (llama / "2_Dense").mkdir()
    save_file({"weight": torch.ones(2)}, llama / "2_Dense" / "model.safetensors")
    main([str(llama), "--overwrite"])
    found = {p.relative_to(out).as_posix() for p in out.rglob("[!.]*") if p.is_file()}
    assert {"LICENSE", "2_Dense/model.safetensors"} < found
    assert set(json.loads((out / "export_report.json").read_text())["files"]) == found


def test_the_source_is_never_overwritten(llama, capsys):
    for place in ("llama", "llama/inside", "."):
        args = [str(llama), "--overwrite", "--out", str(llama.parent / place)]
        assert "neither be the source" in refusal(args, capsys)
    assert (llama / "model.safetensors").is_file()


def test_mistakes_are_one_line(llama, capsys, tmp_path):
    assert "there is no directory" in refusal([str(tmp_path / "nothing")], capsys)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    assert "holds no weights" in refusal([str(tmp_path / "empty")], capsys)
    assert "nearest names: " in refusal([llama, "--skip", "up_porj"], capsys)
    for device in ("meta", "nonsense", "cpu:3"):
        assert "`--device" in refusal([llama, "--device", device], capsys)
    if not torch.cuda.is_available():
        assert "no CUDA device" in refusal([llama, "--device", "cuda"], capsys)
    (llama / "model.safetensors").write_bytes(b"damaged")
    assert "no complete safetensors file" in refusal([llama, "--overwrite"], capsys)


def test_an_adapter_is_no_model(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text("{}")
    merge = f"{tmp_path} holds a PEFT adapter, and no model. Load it with peft, merge it"
    assert f"`CKPT`: {merge}" in refusal([str(tmp_path)], capsys)
    with pytest.raises(FormatError, match=f"^{re.escape(merge)}"):
        export.load(tmp_path)


def test_values_that_are_not_finite_are_refused_and_named(llama, capsys):
    set_group(llama, "model.layers.1.mlp.up_proj", [float("inf"), 0.0, 0.0, float("nan")])
    tensors = load_file(llama / "model.safetensors")
    tensors["model.norm.weight"][3] = torch.nan  # in no layer that is packed
    save_file(tensors, llama / "model.safetensors", {"format": "pt"})
    for options in ([], ["--check-only"], ["--format", "bitmask"]):
        shown = refusal([llama, *options], capsys)
        assert "NaN or Inf in 2 tensors. The checkpoint is damaged" in shown
        assert "model.layers.1.mlp.up_proj.weight: 2\n  model.norm.weight: 1\n" in shown
    assert [path.name for path in llama.parent.iterdir()] == ["llama"]


def test_fewer_blocks_than_the_files_hold_are_refused(llama, capsys):
    config = json.loads((llama / "config.json").read_text()) | {"num_hidden_layers": 1}
    (llama / "config.json").write_text(json.dumps(config))
    shown = refusal([llama, "--check-only"], capsys)
    assert "1 of `model.layers`, and the files hold 1 more" in shown


def test_what_is_wrong_with_the_source_is_said_of_it_and_not_of_the_export(llama, capsys):
    config = json.loads((llama / "config.json").read_text())
    for key, message in (("num_hidden_layers", "lacks weights"), ("hidden_size", "other shapes")):
        change = {key: 3 if key == "num_hidden_layers" else 128}
        (llama / "config.json").write_text(json.dumps(config | change))
        shown = refusal([llama], capsys)
        assert f"the checkpoint {llama} {message}" in shown.replace("has weights of ", "")


def test_a_stale_index_is_not_read_where_transformers_would_not_read_it(llama, capsys):
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    main([str(llama), "--check-only"])
    (llama / "model.safetensors").unlink()
    shown = refusal([llama, "--check-only"], capsys)
    assert "names files that are not there: model-00001-of-00002.safetensors" in shown
    index.write_text(json.dumps({"weight_map": {}}))
    assert "names no files" in refusal([llama, "--check-only"], capsys)


def test_models_that_transformers_does_not_know_are_refused(llama, capsys):
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps(config | {"model_type": "unheard_of"}))
    shown = refusal([llama], capsys)
    assert "does not know this configuration (`model_type` 'unheard_of')" in shown


def test_the_command_runs_as_a_module(llama):
    ended = warm.run(["-m", "export.to_sparse", llama, "--check-only"], cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "14 2:4 layers" in ended.stdout


def test_signals_are_the_callers_again_afterwards(tmp_path, capsys):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    refusal([str(tmp_path / "nowhere")], capsys)
    assert {number: signal.getsignal(number) for number in before} == before


CARD = "---\nlicense: mit\ntags: [pruned]\n---\n\n# Tiny, pruned with mrp-lightning\n"


def test_the_card_is_the_pruned_models_with_how_to_load_it(llama, tmp_path, monkeypatch):
    (llama / "README.md").write_text(CARD)
    main([str(llama), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "README.md").read_text()
    data = huggingface_hub.ModelCard(text).data
    assert data.to_dict().keys() == {"license", "tags"}
    assert text.split("---\n")[2].startswith(CARD.split("---\n")[2])
    assert "14 layers take 0.5625 of their bytes" in text
    size = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert f"Its weight files have {size:,} bytes, those of the pruned" in text
    assert str(tmp_path) not in text
    assert "\n* logits: equal\n" in text
    assert "README.md" in json.loads((tmp_path / "out" / "export_report.json").read_text())["files"]
    code = text.split("```python\n")[1].split("```")[0]
    assert code.startswith("import export")
    monkeypatch.chdir(tmp_path)
    found: dict = {}
    exec(code.replace("DIRECTORY", "out"), found)
    assert type(found["model"]).__name__ == "LlamaForCausalLM"


def test_a_model_without_a_card_gets_one(exports, tmp_path):
    text = (exports("packed", tmp_path).packed / "README.md").read_text()
    assert huggingface_hub.ModelCard(text).data.tags == ["pruned", "sparse"]
    assert "import export" in text


def test_a_card_names_no_command_where_none_is_known(llama, monkeypatch):
    for command, is_named in ((None, False), ("mrp-lightning export a", True)):
        monkeypatch.setattr("export.report.command", lambda command=command: command)
        main([str(llama), "--overwrite"])
        text = (llama.with_name("llama-sparse24") / "README.md").read_text()
        assert ("Made by:" in text) == is_named
