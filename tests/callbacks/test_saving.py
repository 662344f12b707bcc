import gc
import json
import pickle
import shutil
import weakref
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import LightningModule
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoModelForCausalLM

from callbacks import MRPCallback, SaveEvaluation, SaveModel
from export.to_sparse import main as to_sparse
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import FormatError, OptionError, SaveError
from mrp_lightning.journal.journal import Journal
from mrp_lightning.loop.pruned_module import num_bytes, save_trained
from mrp_lightning.records import evaluation as records
from mrp_lightning.storage import outputs
from mrp_lightning.storage.files import MANIFEST


def test_the_saved_model_loads_with_equal_bits(llama, loader, quiet, tmp_path):
    llama().bfloat16().save_pretrained(tmp_path / "dense")
    module = CausalLM(str(tmp_path / "dense"))
    callback = MRPCallback(pattern="2:4", save_dir=str(tmp_path / "sparse"))
    Trainer(precision="bf16-true", **quiet).predict(module, loader, callbacks=[callback])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    ours = module.model.state_dict()
    assert loaded.dtype is torch.bfloat16
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), ours[name].view(torch.uint8)), name
    for row in callback.report.layers:
        weight = loaded.get_submodule(row.name).weight
        assert float((weight == 0).float().mean()) == row.sparsity == 0.5
        assert not weight[weight == 0].signbit().any()
    report = json.loads((tmp_path / "sparse" / "pruning_report.json").read_text())
    assert report == callback.report.to_dict() | {"layers": report["layers"]}
    card = (tmp_path / "sparse" / "README.md").read_text()
    assert "# dense, pruned to 2:4 sparsity" in card
    assert "layers pruned: 14" in card
    assert str(tmp_path) not in card


def test_a_full_directory_is_refused_before_work(llama, loader, quiet, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    module = CausalLM(llama())
    before = module.model.model.layers[0].mlp.up_proj.weight.clone()
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path)
    with pytest.raises(FileExistsError, match="save_dir.*overwrite"):
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert torch.equal(before, module.model.model.layers[0].mlp.up_proj.weight)
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path, overwrite=True)
    with pytest.raises(FileExistsError, match=r"did not write, .*: notes\.txt"):
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert torch.equal(before, module.model.model.layers[0].mlp.up_proj.weight)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_generation_config_that_is_not_written_is_refused_before_work(
    llama, loader, quiet, tmp_path
):
    module, trainer = CausalLM(llama()), Trainer(**quiet)
    module.model.generation_config.temperature = 0.7  # without `do_sample`
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    with pytest.raises(OptionError, match=r"(?s)`model.generation_config` first.*temperature"):
        trainer.predict(module, loader, callbacks=[callback])
    assert callback.report is None
    module.model.generation_config.do_sample = True
    trainer.predict(module, loader, callbacks=[callback])
    assert (tmp_path / "out" / "generation_config.json").is_file()


def test_overwrite_replaces_what_a_run_wrote(llama, loader, quiet, tmp_path):
    module = CausalLM(llama())
    for pattern in ("2:4", "1:4"):
        callback = MRPCallback(pattern=pattern, save_dir=tmp_path / "out", overwrite=True)
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
        files = {file.name for file in (tmp_path / "out").iterdir()} - {MANIFEST}
        report = json.loads((tmp_path / "out" / "pruning_report.json").read_text())
        assert set(report["files"]) == files
        assert report["config"]["pattern"] == pattern


def test_fast_dev_run_prunes_and_writes_nothing(llama, loader, quiet, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.txt").touch()
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(fast_dev_run=True, **quiet).predict(llama(), loader, callbacks=[callback])
    assert callback.report.complete
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "old.txt"]


class Two(pl.LightningModule):
    def __init__(self, teacher: torch.nn.Module, student: torch.nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.student(input_ids=batch).logits


def test_a_module_with_two_models_is_saved_whole(llama, loader, quiet, tmp_path):

    module = Two(llama(), llama())
    callback = MRPCallback(pattern="2:4", blocks="student.model.layers", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(module, loader, callbacks=[callback])
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == module.state_dict().keys()
    assert callback.report.layers[0].name == "student.model.layers.0.self_attn.q_proj"
    assert all(torch.equal(saved[name], x) for name, x in module.state_dict().items())


def test_the_home_directory_has_its_short_name(llama, loader, quiet, tmp_path, monkeypatch):
    (home := tmp_path / "home").mkdir()
    (work := tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    callback = MRPCallback(pattern="2:4", save_dir="~/pruned")
    module = CausalLM(llama())
    with monkeypatch.context() as patch:
        fail_to_save(patch, OSError("gone"))
        with pytest.raises(SaveError):
            Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert [path.name for path in home.iterdir()] == [".pruned.partial"]
    callback.save("~/pruned")
    Trainer(callbacks=SaveEvaluation("~/pruned"), **quiet).test(module, loader, verbose=False)
    trained = SaveModel("~/trained")
    Trainer(max_steps=1, callbacks=trained, **quiet).fit(module, loader)
    assert sorted(path.name for path in home.iterdir()) == ["pruned", "trained"]
    assert (home / "pruned" / "evaluation.json").is_file()
    assert not list(work.iterdir())


class Headed(pl.LightningModule):
    """An encoder, and a decoder and a head that are not of it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(source)
        self.decoder = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(32, 2, 48, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(32, 3)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        hidden = self.encoder(input_ids=batch).last_hidden_state
        for block in self.decoder:
            hidden = block(hidden)
        return self.head(hidden)


@pytest.mark.usefixtures("short_library")
def test_extra_weights_are_saved_with_it(llama, loader, quiet, tmp_path):
    llama().model.save_pretrained(tmp_path / "dense")
    module = Headed(str(tmp_path / "dense"))
    over_source = MRPCallback(pattern="2:4", save_dir=tmp_path / "dense", overwrite=True)
    with pytest.raises(FileExistsError, match="is the source"):
        Trainer(**quiet).predict(module, loader, callbacks=[over_source])
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(module, loader, callbacks=[callback])
    loaded = Headed(str(tmp_path / "out"))
    own = load_file(tmp_path / "out" / "module.safetensors")
    assert not [name for name in own if name.startswith("encoder")]
    assert loaded.load_state_dict(own, strict=False).unexpected_keys == []
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded.get_parameter(name), tensor), name
    names = {row.name for row in callback.report.pruned}
    assert {"layers.0.mlp.up_proj", "decoder.1.linear1"} <= names
    for name in names:
        part = loaded.encoder if name.startswith("layers") else loaded
        assert (part.get_submodule(name).weight == 0).float().mean() == 0.5
    assert "module.safetensors" in callback.report.files
    to_sparse([str(tmp_path / "out"), "--out", str(tmp_path / "packed")])
    assert load_file(tmp_path / "packed" / "module.safetensors").keys() == own.keys()
    again = MRPCallback(pattern="2:4", save_dir=tmp_path / "out", overwrite=True)
    Trainer(**quiet).predict(Headed(str(tmp_path / "dense")), loader, callbacks=[again])


def test_names_that_would_be_the_same_are_not_cut(llama, loader, quiet, tmp_path):
    class Stacked(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama().model
            blocks = (torch.nn.Sequential(torch.nn.Linear(32, 32)) for _ in range(2))
            self.layers = torch.nn.ModuleList(blocks)

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            hidden = self.model(input_ids=batch).last_hidden_state
            for block in self.layers:
                hidden = block(hidden)
            return hidden

    module, callback = Stacked(), MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(module, loader, callbacks=[callback])
    linears = [m for m in module.modules() if isinstance(m, torch.nn.Linear)]
    assert len(linears) == len(callback.report.pruned) == 16
    assert all((linear.weight == 0).float().mean() == 0.5 for linear in linears)


def test_a_weight_that_is_tied_to_the_model_is_none_beside_it(llama, loader, quiet, tmp_path):
    class Tied(CausalLM):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__(model)
            self.head = torch.nn.Linear(32, 64, bias=False)
            self.head.weight = self.model.get_input_embeddings().weight

    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(Tied(llama()), loader, callbacks=[callback])
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert callback.report.layers[0].name == "model.layers.0.self_attn.q_proj"


def fail_to_save(monkeypatch, error: Exception) -> None:
    def save_pretrained(*_, **__):
        raise error

    monkeypatch.setattr("mrp_lightning.loop.pruned_module.save_pretrained", save_pretrained)


@pytest.mark.parametrize("again", ["save", "predict"])
def test_a_pruned_model_is_not_lost_where_saving_fails(
    again, llama, loader, quiet, tmp_path, monkeypatch
):
    module, out = CausalLM(llama()), tmp_path / "out"
    callback = MRPCallback(pattern="2:4", save_dir=out)
    with monkeypatch.context() as patch:
        fail_to_save(patch, OSError(28, "No space left on device"))
        with pytest.raises(SaveError, match=r"No space left.*`callback.save\(directory\)` writes"):
            Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert not callback.report.complete
    assert list(tmp_path.iterdir()) == [tmp_path / ".out.partial"]
    pruned = module.model.model.layers[0].mlp.up_proj.weight.clone()
    seconds = [row.seconds for row in callback.report.layers]
    if again == "save":
        callback.save(out)
    else:
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert callback.report.complete
    assert [row.seconds for row in callback.report.layers] == seconds  # not pruned again
    assert list(tmp_path.iterdir()) == [out]  # and no journal
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded.model.layers[0].mlp.up_proj.weight, pruned)
    assert json.loads((out / "pruning_report.json").read_text())["totals"]["complete"]


def test_another_model_is_pruned_after_one_that_could_not_be_saved(
    llama, loader, quiet, tmp_path, monkeypatch
):
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    with monkeypatch.context() as patch:
        fail_to_save(patch, OSError("gone"))
        with pytest.raises(SaveError):
            Trainer(**quiet).predict(CausalLM(llama()), loader, callbacks=[callback])
    second = CausalLM(llama())
    Trainer(**quiet).predict(second, loader, callbacks=[callback])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, second.model.lm_head.weight)
    assert (second.model.model.layers[0].mlp.up_proj.weight == 0).float().mean() == 0.5


def test_a_mistake_in_the_code_is_not_called_a_full_disk(
    llama, loader, quiet, tmp_path, monkeypatch
):
    fail_to_save(monkeypatch, ZeroDivisionError())
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    with pytest.raises(ZeroDivisionError):
        Trainer(**quiet).predict(CausalLM(llama()), loader, callbacks=[callback])
    assert not callback.report.complete


def test_save_without_save_dir(llama, loader, quiet, tmp_path):
    callback = MRPCallback(pattern="2:4")
    with pytest.raises(OptionError, match="nothing is pruned yet"):
        callback.save(tmp_path / "out")
    Trainer(**quiet).predict(CausalLM(llama()), loader, callbacks=[callback])
    assert callback.report.complete
    callback.save(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()
    with pytest.raises(SaveError, match="not empty"):
        callback.save(tmp_path / "out")
    callback.save(tmp_path / "out", overwrite=True)
    assert callback.report.complete


def test_weights_that_were_changed_are_not_saved_with_the_report(llama, loader, quiet, tmp_path):
    module, callback = CausalLM(llama()), MRPCallback(pattern="2:4")
    Trainer(**quiet).predict(module, loader, callbacks=[callback])
    weight = module.model.model.layers[0].mlp.up_proj.weight
    pruned = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] += 1
    with pytest.raises(OptionError, match=r"weights were changed since.*`model\.save_pretrained"):
        callback.save(tmp_path / "changed")
    assert not (tmp_path / "changed").exists()
    with torch.no_grad():
        weight.copy_(pruned)
    callback.save(tmp_path / "as pruned")
    assert (tmp_path / "as pruned" / "model.safetensors").is_file()


def test_blocks_that_are_compiled_one_by_one_load_as_they_were(llama, loader, quiet, tmp_path):
    model, inputs = llama(tie_word_embeddings=True), torch.arange(3, 19)[None]
    for i, block in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(block, backend="eager")
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(CausalLM(model), loader, callbacks=[callback])
    loaded, loading = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        assert torch.equal(loaded(inputs).logits, model(inputs).logits)


def test_a_model_that_no_longer_fits_its_class_is_refused_before_work(
    llama, loader, quiet, tmp_path, monkeypatch
):
    model = llama()
    model.config.num_hidden_layers = 3
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    with pytest.raises(SaveError, match=r"layers\.2\.self_attn\.q_proj\.weight \(32, 32\)"):
        Trainer(**quiet).predict(model, loader, callbacks=[callback])
    assert not bool((model.lm_head.weight == 0).any())
    assert not list(tmp_path.iterdir())
    # Whatever the check before the work did not see, the files are read again.
    monkeypatch.setattr("mrp_lightning.loop.pruned_module.check_class", lambda _: None)
    with pytest.raises(SaveError, match=r"would not load: .* lacks weights .*layers\.2\.mlp"):
        Trainer(**quiet).predict(model, loader, callbacks=[callback])
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_saved_is_not_kept_in_memory(llama, loader, quiet, tmp_path):
    module, trainer = CausalLM(llama()), Trainer(**quiet)
    alive = weakref.ref(module)
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    trainer.predict(module, loader, callbacks=[callback])
    del module, trainer
    gc.collect()
    assert alive() is None
    with pytest.raises(OptionError, match=r"is in `save_dir`, and not kept .* Copy .*out\."):
        callback.save(tmp_path / "late")
    pickle.loads(pickle.dumps(callback))


def test_the_source_and_a_full_disk_are_refused_before_work(
    llama, loader, quiet, tmp_path, monkeypatch
):
    llama().save_pretrained(tmp_path / "dense")
    module = CausalLM(str(tmp_path / "dense"))
    weights = module.model.state_dict()
    before = {name: tensor.clone() for name, tensor in weights.items()}
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "dense", overwrite=True)
    with pytest.raises(FileExistsError, match="is the source"):
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
    need = num_bytes(module.model)
    size = (tmp_path / "dense" / "model.safetensors").stat().st_size
    assert size * 0.9 < need < size
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=need - 1))
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    with pytest.raises(OptionError, match="GB left"):
        Trainer(**quiet).predict(module, loader, callbacks=[callback])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights.items())


def test_paths_are_those_of_the_start(llama, loader, quiet, tmp_path, monkeypatch):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    llama().save_pretrained("dense")
    module = CausalLM("dense")
    trainer, held = Trainer(**quiet), llama().from_pretrained("dense")
    callback = MRPCallback(pattern="2:4", save_dir="out")
    tested = SaveEvaluation("out")
    trained = SaveModel("trained")
    in_memory = MRPCallback(pattern="2:4")
    trainer.predict(held, loader, callbacks=[in_memory])
    monkeypatch.chdir(tmp_path / "there")
    trainer.predict(module, loader, callbacks=[callback])
    assert (tmp_path / "here" / "out" / "model.safetensors").is_file()
    assert tested.save_dir == tmp_path / "here" / "out"
    assert trained.save_dir == tmp_path / "here" / "trained"
    with pytest.raises(SaveError, match="is the source"):
        in_memory.save(tmp_path / "here" / "dense", overwrite=True)
    assert list((tmp_path / "there").iterdir()) == []


def test_the_journal_goes_when_the_result_is_on_the_disk(
    llama, loader, quiet, tmp_path, monkeypatch
):
    done = []
    flush, rename, remove = outputs.flush, Path.rename, Journal.remove
    monkeypatch.setattr(outputs, "flush", lambda path: (flush(path), done.append(("flush", path))))
    monkeypatch.setattr(Path, "rename", lambda a, b: (rename(a, b), done.append(("rename", b))))
    monkeypatch.setattr(Journal, "remove", lambda self: (remove(self), done.append(("journal",))))
    callback = MRPCallback(pattern="2:4", save_dir=tmp_path / "out")
    Trainer(**quiet).predict(CausalLM(llama()), loader, callbacks=[callback])
    assert done[-3:] == [("rename", tmp_path / "out"), ("flush", tmp_path), ("journal",)]
    assert {path.name for _, path in done[:-3]} >= {"model.safetensors", "pruning_report.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_loops_say_that_they_do_not_prune(llama, loader, quiet, caplog):
    module, callback = CausalLM(llama()), MRPCallback(pattern="2:4")
    trainer = pl.Trainer(callbacks=[callback], **quiet)
    for stage in ("validate", "test"):
        getattr(trainer, stage)(module, loader, verbose=False)
        assert f"prunes in `predict`; in `{stage}` it does nothing" in caplog.text
    caplog.clear()
    trainer.predict(module, loader)
    trainer.test(module, loader, verbose=False)
    assert "prunes in `predict`" not in caplog.text


def test_weights_are_stored_as_they_were_trained(llama, loader, quiet, tmp_path):
    llama().bfloat16().save_pretrained(tmp_path / "bf16")
    module = CausalLM(tmp_path / "bf16", dtype="float32")
    save = SaveModel(tmp_path / "out")
    pl.Trainer(max_steps=1, callbacks=[save], **quiet).fit(module, loader)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert saved.dtype == torch.float32
    for name, tensor in saved.state_dict().items():
        assert torch.equal(tensor, module.model.state_dict()[name]), name
    save = SaveModel(tmp_path / "asked", dtype="bfloat16")
    pl.Trainer(max_steps=1, callbacks=[save], **quiet).fit(module, loader)
    asked = load_file(tmp_path / "asked" / "model.safetensors")
    assert {tensor.dtype for tensor in asked.values()} == {torch.bfloat16}


def test_other_loops_of_its_trainer_go_on(llama, loader, quiet, tmp_path):
    module = CausalLM(llama())
    trainer = pl.Trainer(max_steps=1, callbacks=[SaveModel(tmp_path / "out")], **quiet)
    trainer.fit(module, loader)
    trainer.test(module, loader, verbose=False)
    with pytest.raises(FileExistsError, match="`save_dir`"):
        trainer.fit(module, loader)


def test_predict_says_that_nothing_is_saved(llama, loader, quiet, tmp_path, caplog):
    save = SaveModel(tmp_path / "out")
    pl.Trainer(callbacks=[save], **quiet).predict(CausalLM(llama()), loader)
    assert "SaveModel saves what `fit` trains; in `predict` it does nothing" in caplog.text
    assert not (tmp_path / "out").exists()


def test_a_dtype_that_is_none_is_refused_before_training(llama, loader, quiet, tmp_path):
    save = SaveModel(tmp_path / "out", dtype="int8")
    trainer = pl.Trainer(max_steps=1, callbacks=[save], **quiet)
    with pytest.raises(OptionError, match="`dtype` must be a floating type"):
        trainer.fit(CausalLM(llama()), loader)
    assert trainer.global_step == 0


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
    written = {"overwrite": False, "steps": 1, "texts": {"figures.json": "{}"}}
    save_trained(again, tmp_path / "tuned", dtype=again.model.dtype, **written)
    assert held(tmp_path / "tuned") == COMPANIONS
    report = json.loads((tmp_path / "tuned" / "pruning_report.json").read_text())
    assert {*COMPANIONS, "figures.json"} <= set(report["files"])


def test_files_of_a_tokenizer_that_is_replaced_are_not_mixed_with_it(
    source, tiny_llama, loader, quiet, tmp_path
):
    module = CausalLM(source, tokenizer=tiny_llama)
    prune = MRPCallback(sparsity=0.5, method="magnitude", save_dir=tmp_path / "pruned")
    Trainer(**quiet).predict(module, loader, callbacks=[prune])
    of_others = {name: text for name, text in COMPANIONS.items() if name != "tokenizer.model"}
    assert held(tmp_path / "pruned") == of_others


def test_results_of_several_runs_come_together(llama, quiet, windows, tmp_path):
    lm = CausalLM(llama())
    trainer = Trainer(**quiet, callbacks=SaveEvaluation(str(tmp_path / "run")))
    trainer.test(lm, {"c4": DataLoader(windows), "ptb": DataLoader(windows[:3])}, verbose=False)
    first = lm.evaluation
    trainer.test(lm, {"ptb": DataLoader(windows[3:])}, verbose=False)
    found = records.read(tmp_path / "run").perplexity
    assert found == {"c4": first["c4"], "ptb": lm.evaluation["ptb"]}
    assert found["ptb"]["windows"] == 5
    assert found["c4"]["tokens"] == 8 * 15


def test_nothing_is_written_by_a_rehearsal_or_by_other_loops(llama, quiet, windows, tmp_path):
    lm, loader = CausalLM(llama()), DataLoader(windows)
    save = SaveEvaluation(str(tmp_path / "run"))
    Trainer(**quiet, callbacks=save, fast_dev_run=True).test(lm, loader, verbose=False)
    Trainer(**quiet, callbacks=save).validate(lm, loader, verbose=False)
    Trainer(**quiet, callbacks=save).predict(lm, loader)
    assert not (tmp_path / "run").exists()


def test_what_cannot_be_recorded_is_refused_before_the_work(llama, quiet, windows, tmp_path):
    class Other(LightningModule):
        def test_step(self, batch, batch_idx):
            raise AssertionError("tested")

    trainer = Trainer(**quiet, callbacks=SaveEvaluation(str(tmp_path)))
    with pytest.raises(TypeError, match="`SaveEvaluation` needs a CausalLM. Got Other"):
        trainer.test(Other(), DataLoader(windows), verbose=False)
    (tmp_path / records.NAME).write_text("not JSON")
    lm = CausalLM(llama())
    with pytest.raises(FormatError, match="is not JSON"):
        trainer.test(lm, DataLoader(windows), verbose=False)
    file = tmp_path / records.NAME
    with pytest.raises(FileExistsError, match="`save_dir` .*: expected a directory"):
        Trainer(**quiet, callbacks=SaveEvaluation(file)).test(lm, DataLoader(windows))
    assert lm.evaluation == {}
