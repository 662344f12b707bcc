"""Directories are whole or absent, and hold what the model holds."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from mrp_lightning.files import check_output_dir, save_directory
from mrp_lightning.models.saving import save_pretrained


def test_a_directory_appears_only_when_it_is_whole(tmp_path):
    target = tmp_path / "runs" / "model"
    with save_directory(target) as staging:
        (staging / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert list(target.parent.iterdir()) == [target]


def test_what_is_written_has_ordinary_permissions(tmp_path):
    (tmp_path / "ordinary").mkdir()
    (tmp_path / "ordinary" / "file").write_text("x")
    with save_directory(tmp_path / "saved") as staging:
        (staging / "file").touch(mode=0o600)
    for name in ("", "file"):
        expected = (tmp_path / "ordinary" / name).stat().st_mode
        assert (tmp_path / "saved" / name).stat().st_mode == expected


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_failed_write_leaves_what_was_there(tmp_path, failure):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("precious")
    with pytest.raises(failure), save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("half")
        raise failure
    assert [p.name for p in tmp_path.rglob("*")] == ["model", "old"]


def test_overwrite_replaces_the_whole_directory(tmp_path):
    target = tmp_path / "model"
    target.mkdir()
    (target / "old").write_text("x")
    with save_directory(target, overwrite=True) as staging:
        (staging / "new").write_text("y")
    assert [p.name for p in target.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [target]


def test_output_that_would_cost_data_is_refused(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    (tmp_path / "empty").mkdir()
    check_output_dir(tmp_path / "empty")
    check_output_dir(tmp_path / "absent" / "below")
    check_output_dir(tmp_path / "full", overwrite=True)
    with pytest.raises(FileExistsError, match=r"`save_dir`: .*full exists and is not empty.*overw"):
        check_output_dir(tmp_path / "full")
    with pytest.raises(FileExistsError, match="`--out`: .*full.*`--overwrite`"):
        check_output_dir(tmp_path / "full", argument="--out")
    with pytest.raises(FileExistsError, match="expected a directory, but .* is a file"):
        check_output_dir(tmp_path / "full" / "x", overwrite=True)


def test_a_model_is_stored_in_the_dtype_of_its_source(tmp_path, tiny_llama):
    published = AutoModelForCausalLM.from_pretrained(tiny_llama)
    with save_directory(tmp_path / "bf16") as staging:
        save_pretrained(published, staging, dtype="bfloat16")
    assert published.dtype == torch.float32

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    assert model.dtype == torch.bfloat16
    model.float()
    with save_directory(tmp_path / "again") as staging:
        save_pretrained(model, staging, card="# A card")
    assert (tmp_path / "again" / "README.md").read_text() == "# A card"
    first = load_file(tmp_path / "bf16" / "model.safetensors")
    second = load_file(tmp_path / "again" / "model.safetensors")
    assert first.keys() == second.keys()
    assert "lm_head.weight" not in first  # tied to the embedding
    for name, tensor in first.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, second[name]), name
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert loaded.dtype == torch.bfloat16
