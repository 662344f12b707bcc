"""A pruned directory has the files beside its source's checkpoint, whatever they are called."""

import json
import shutil

import pytest

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.loop.pruned_module import save_trained

COMPANIONS = {
    "preprocessor_config.json": '{"size": 1}',
    "processor_config.json": '{"processor_class": "Own"}',
    "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
    "LICENSE": "free",
    "tokenizer.model": "of another library",
}


@pytest.fixture
def source(tiny_llama, tmp_path):
    directory = shutil.copytree(tiny_llama, tmp_path / "source")
    for name, text in COMPANIONS.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text)
    (directory / "evaluation.json").write_text("of the dense model")
    return directory


def held(directory):
    texts = {name: directory / name for name in COMPANIONS}
    return {name: path.read_text() for name, path in texts.items() if path.is_file()}


@pytest.mark.parametrize("streaming", [False, True])
def test_they_are_saved_with_the_model(source, streaming, loader, quiet, tmp_path):
    module = CausalLM(source, streaming=streaming)
    prune = MRPCallback(sparsity=0.5, method="magnitude", save_dir=tmp_path / "pruned")
    Trainer(**quiet).predict(module, loader, callbacks=[prune])
    assert held(tmp_path / "pruned") == COMPANIONS
    assert not (tmp_path / "pruned" / "evaluation.json").exists()
    report = json.loads((tmp_path / "pruned" / "pruning_report.json").read_text())
    assert COMPANIONS.keys() <= set(report["files"])

    again = CausalLM(tmp_path / "pruned")  # a pruned model has them, and so has its training
    save_trained(again, tmp_path / "tuned", dtype=again.model.dtype, overwrite=False, steps=1)
    assert held(tmp_path / "tuned") == COMPANIONS


def test_files_of_a_tokenizer_that_is_replaced_are_not_mixed_with_it(
    source, tiny_llama, loader, quiet, tmp_path
):
    module = CausalLM(source, tokenizer=tiny_llama)
    prune = MRPCallback(sparsity=0.5, method="magnitude", save_dir=tmp_path / "pruned")
    Trainer(**quiet).predict(module, loader, callbacks=[prune])
    of_others = {name: text for name, text in COMPANIONS.items() if name != "tokenizer.model"}
    assert held(tmp_path / "pruned") == of_others
