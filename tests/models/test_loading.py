"""A tokenizer is found, or absent, or an error says which one cannot be loaded."""

import shutil

import pytest

from mrp_lightning.errors import DataError
from mrp_lightning.models.loading import load_tokenizer, tokenizer_beside


def test_the_tokenizer_beside_a_model(tiny_llama):
    assert (
        tokenizer_beside(str(tiny_llama))("def").input_ids
        == load_tokenizer(tiny_llama)("def").input_ids
    )


def test_a_model_may_come_without_a_tokenizer(tiny_llama, tmp_path):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    assert tokenizer_beside(str(tmp_path)) is None
    assert tokenizer_beside("someone/something") is None
    for source in (tmp_path / "absent", "someone/something"):
        with pytest.raises(FileNotFoundError, match=f"`tokenizer`: {source} gives no tokenizer"):
            load_tokenizer(source)


@pytest.mark.parametrize(
    "damaged",
    [{"tokenizer.json": "{"}, {"tokenizer_config.json": "{}"}],
    ids=lambda f: next(iter(f)),
)
@pytest.mark.parametrize("load", [load_tokenizer, tokenizer_beside])
def test_a_tokenizer_that_cannot_be_loaded_is_named(tiny_llama, tmp_path, damaged, load):
    shutil.copy(tiny_llama / "config.json", tmp_path)
    for name, text in damaged.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"`tokenizer`: the tokenizer of {tmp_path} cannot be load"):
        load(str(tmp_path))
