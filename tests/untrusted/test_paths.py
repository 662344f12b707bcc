"""A checkpoint has no other files of this machine read or copied."""

import json

import pytest

from export.conversion.checkpoint import open_checkpoint
from mrp_lightning.errors import FormatError
from mrp_lightning.models.loading import load_model


@pytest.mark.parametrize("above", ["..", "sub/../..", None])
def test_an_index_names_files_of_its_directory_only(checkpoint, above):
    directory = checkpoint()
    (directory / "model.safetensors").rename(directory.parent / "model-00001.safetensors")
    name = f"{above or directory.parent}/model-00001.safetensors"
    index = {"metadata": {}, "weight_map": {"model.norm.weight": name}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    for read in (lambda: load_model(str(directory), None), lambda: open_checkpoint(directory)):
        with pytest.raises(FormatError, match="names files outside of its directory"):
            read()


@pytest.mark.parametrize(
    "index",
    [[1], {"weight_map": ["a"]}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "config.json"}}],
    ids=str,
)
def test_a_damaged_index_is_named(checkpoint, index):
    directory = checkpoint()
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=r"model\.safetensors\.index\.json"):
        load_model(str(directory), None)


def test_what_links_lead_to_elsewhere_is_not_copied_into_an_export(checkpoint, tmp_path):
    directory, secret = checkpoint(), tmp_path / "secret"
    secret.write_text("secret")
    (directory / "inside.txt").symlink_to("config.json")
    assert len(open_checkpoint(directory).companions)
    (directory / "notes.txt").symlink_to(secret)
    with pytest.raises(FormatError, match=r"links to files elsewhere.*notes\.txt → .*secret"):
        open_checkpoint(directory)


def test_links_of_the_hubs_cache_are_followed(checkpoint, tmp_path):
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots"
    blobs.mkdir(parents=True)
    (snapshot / "abc").mkdir(parents=True)
    for number, file in enumerate(checkpoint().iterdir()):
        file.rename(blobs / str(number))
        (snapshot / "abc" / file.name).symlink_to(f"../../blobs/{number}")
    assert open_checkpoint(snapshot / "abc").companions
