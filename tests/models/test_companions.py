"""The files beside a checkpoint: which are copied with it, and which hold models or secrets."""

from pathlib import Path

import pytest

from mrp_lightning.models.companions import find_companions

FILES = {
    "config.json": True,
    "model.safetensors": False,
    "model.safetensors.index.json": False,
    "training_args.bin": False,
    "preprocessor_config.json": True,
    "processor_config.json": True,
    "LICENSE": True,
    "1_Pooling/config.json": True,
    "additional_chat_templates/tool.jinja": True,
    "onnx/model.onnx": False,
    "onnx/config.json": False,  # of the same model in another form, which is not pruned
    "checkpoint-500/trainer_state.json": False,
    "checkpoint-500/model.safetensors": False,
    ".git/config": False,
    ".mrp_files.json": False,
}
OF_A_MODULE = {"2_Dense/config.json": True, "2_Dense/model.safetensors": True}


@pytest.fixture
def directory(tmp_path):
    for name in (*FILES, *OF_A_MODULE):
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_text(name)
    return tmp_path / "model"


def found(directory: Path) -> set[str]:
    return {file.as_posix() for file in find_companions(directory).files}


def test_files_that_hold_no_weights_are_companions_and_modules_with_them(directory):
    assert found(directory) == {name for name, copied in FILES.items() if copied}
    modules = '[{"path": ""}, {"path": "."}, {"path": "1_Pooling"}, {"path": "2_Dense"}]'
    (directory / "modules.json").write_text(modules)
    expected = {name for name, copied in (FILES | OF_A_MODULE).items() if copied}
    assert found(directory) == {*expected, "modules.json"}


@pytest.mark.parametrize("damaged", ["{", "3", '[{"path": 3}, 4]', "[" * 100_000])
def test_a_damaged_list_of_modules_names_none(directory, damaged):
    (directory / "modules.json").write_text(damaged)
    assert not {"2_Dense/model.safetensors", "2_Dense/config.json"} & found(directory)


def test_links_to_elsewhere_are_named_and_not_copied(directory, tmp_path, caplog):
    (tmp_path / "secret").write_text("secret")
    (directory / "notes.txt").symlink_to(tmp_path / "secret")
    (directory / "again.json").symlink_to("config.json")
    companions = find_companions(directory)
    companions.copy_to(tmp_path / "copy")
    assert (tmp_path / "copy" / "again.json").read_text() == "config.json"
    assert not (tmp_path / "copy" / "notes.txt").exists()
    assert "notes.txt → " in caplog.text
    caplog.clear()
    companions.copy_to(tmp_path / "copy", without={"notes.txt"})
    assert not caplog.text


def test_files_that_were_written_are_not_replaced(directory, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "config.json").write_text("ours")
    find_companions(directory).copy_to(copy, without={"LICENSE"})
    assert (copy / "config.json").read_text() == "ours"
    assert not (copy / "LICENSE").exists()
    assert (copy / "1_Pooling" / "config.json").is_file()
