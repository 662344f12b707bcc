"""Distillation in a trainer: what is trained, what is logged, resumed and refused."""

import argparse
import copy
import inspect
import json
import shutil
import tarfile
import typing

import lightning
import pytest
import torch
from quiet import QUIET
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from callbacks import KeepBest, KeepSparsity, MRPCallback, SaveModel
from mrp_lightning import (
    CausalLM,
    DataError,
    Distillation,
    OptionError,
    TargetError,
    TextDataModule,
    Trainer,
)
from mrp_lightning.data.own_text import OwnText
from mrp_lightning.distillation.module import needed_memory
from mrp_lightning.distillation.text import DistillationText
from mrp_lightning.embedded import STDLIB_LLAMA
from mrp_lightning.targets.blocks import pruned_layers


@pytest.fixture(scope="module")
def windows():
    """Text of the kind that the embedded model knows, in windows of 64 tokens."""
    files = [module.__file__ for module in (argparse, inspect, tarfile, typing)]
    size = {"sequence_length": 64, "num_samples": 168}
    data = TextDataModule(train_files=files, tokenizer=STDLIB_LLAMA, **size)
    return data.calibration_windows()


def pair_of(path, windows):
    """A model without 60% of its weights by magnitude, and as it is."""
    dense = CausalLM(path, dtype="float32")
    student = copy.deepcopy(dense)
    prune = MRPCallback(sparsity=0.6, method="magnitude")
    Trainer(**QUIET).predict(student, loader(windows[:4]), callbacks=[prune])
    return student, dense


@pytest.fixture(scope="module")
def untouched(tiny_llama, windows):
    return pair_of(tiny_llama, windows)


@pytest.fixture
def pair(untouched):
    return copy.deepcopy(untouched)


def loader(windows, batch_size=4):
    return DataLoader(windows, batch_size=batch_size)


def test_large_students_have_a_lower_rate(pair, monkeypatch):
    assert Distillation(*pair).learning_rate == 1.6e-3
    monkeypatch.setattr("mrp_lightning.distillation.module._LARGE", 1000)
    module = Distillation(*pair)
    assert module.learning_rate == module.hparams["learning_rate"] == 8e-4
    assert Distillation(*pair, learning_rate=1e-2).learning_rate == 1e-2


def test_the_divergence_halves_and_zeros_stay(windows):
    student, dense = pair_of(STDLIB_LLAMA, windows)
    zeros = {layer.name: layer.weight == 0 for layer in pruned_layers(student.model)}
    teacher = {name: p.clone() for name, p in dense.model.named_parameters()}
    module = Distillation(student, dense, learning_rate=1e-2, warmup_steps=2)
    embeddings = module.model.get_input_embeddings().weight.clone()
    trainer = Trainer(max_steps=24, callbacks=[KeepSparsity()], gradient_clip_val=1.0, **QUIET)
    (start,) = trainer.validate(module, loader(windows[160:]), verbose=False)
    trainer.fit(module, loader(windows[:160]))
    (end,) = trainer.validate(module, loader(windows[160:]), verbose=False)
    assert end["val_kl"] < 0.6 * start["val_kl"]
    excess = [figures["perplexity"] - figures["teacher"] for figures in (start, end)]
    assert 0 < excess[1] < excess[0] / 2
    for layer in pruned_layers(module.model):
        assert torch.equal(layer.weight == 0, zeros[layer.name])
    assert torch.equal(module.model.get_input_embeddings().weight, embeddings)
    for name, parameter in dense.model.named_parameters():
        assert torch.equal(parameter, teacher[name])


def test_a_model_with_weights_of_other_sizes_learns_the_same(pair, windows):
    """The same function, with rows of `up` 16 times as large and columns of `down` a 16th."""
    student, dense = pair
    found = []
    for factor in (1, 16):
        rescaled = copy.deepcopy(student)
        for block in rescaled.model.model.layers:
            block.mlp.up_proj.weight.data *= factor
            block.mlp.down_proj.weight.data /= factor
        module = Distillation(rescaled, dense, learning_rate=2e-2, warmup_steps=0)
        trainer = Trainer(max_steps=5, callbacks=[KeepSparsity()], **QUIET)
        (start,) = trainer.validate(module, loader(windows[160:]), verbose=False)
        trainer.fit(module, loader(windows[:20]))
        (end,) = trainer.validate(module, loader(windows[160:]), verbose=False)
        found.append((start["val_kl"], end["val_kl"]))
    one, other = found
    assert other == pytest.approx(one, rel=1e-3)
    assert one[1] < 0.9 * one[0]


def test_weights_of_16_bits_learn_by_their_float32_values(pair, windows):
    """The optimizer's values have digits that bfloat16 rounds; the weights are these, rounded."""
    student, dense = pair
    module = Distillation(student, dense, dtype="bfloat16", learning_rate=2e-3, warmup_steps=0)
    start = {name: p.clone() for name, p in module.model.named_parameters()}
    trainer = Trainer(max_steps=10, callbacks=[KeepSparsity()], **QUIET)
    trainer.fit(module, loader(windows[:40]))
    values = [v for group in trainer.optimizers[0].param_groups for v in group["params"]]
    assert values
    for value in values:
        assert value.dtype == torch.float32
        assert not torch.equal(value, value.bfloat16().float())
    rounded = sorted(float(value.bfloat16().float().sum()) for value in values)
    trained = [p for p in module.model.parameters() if p.requires_grad]
    assert rounded == pytest.approx(sorted(float(p.float().sum()) for p in trained), abs=1e-3)
    assert any(not torch.equal(p, start[n]) for n, p in module.model.named_parameters())


def test_moments_hold_the_kept_weights_alone(pair, windows):
    student, dense = pair
    kept = sum(int((layer.weight != 0).sum()) for layer in pruned_layers(student.model))
    module = Distillation(student, dense)
    trainer = Trainer(max_steps=1, callbacks=[KeepSparsity()], **QUIET)
    trainer.fit(module, loader(windows[:4]))
    state = trainer.optimizers[0].state
    in_layers = {id(layer.parameter) for layer in pruned_layers(module.model)}
    others = sum(
        p.numel() for p in module.model.parameters() if p.requires_grad and id(p) not in in_layers
    )
    assert sum(each["exp_avg"].numel() for each in state.values()) == kept + others


def test_moments_of_8_bits_train_nearly_as_well_and_resume_alike(tmp_path):
    """Of matrices with as many kept entries as torchao stores in 8 bits, and a few more."""
    pytest.importorskip("torchao")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "vocab_size": 97}
    torch.manual_seed(0)
    dense = LlamaForCausalLM(LlamaConfig(**sizes))
    student = copy.deepcopy(dense)
    for layer in student.model.layers.modules():
        if isinstance(layer, nn.Linear):
            layer.weight.data[:, ::3] = 0
    # Equal batches, so that the loader need not resume.
    ids = torch.randint(97, (4, 32), generator=torch.Generator().manual_seed(1)).repeat(9, 1)

    def run(bits, steps, *callbacks, ckpt_path=None):
        module = Distillation(
            copy.deepcopy(student), dense, moment_bits=bits, learning_rate=2e-2, warmup_steps=0
        )
        options = {"callbacks": [KeepSparsity(), *callbacks], **QUIET}
        trainer = Trainer(max_steps=steps, **options)
        trainer.fit(module, loader(ids), ckpt_path=ckpt_path)
        (figures,) = trainer.validate(module, loader(ids), verbose=False)
        return module, trainer, figures["val_kl"]

    class Save(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 4:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    (start,) = Trainer(**QUIET).validate(Distillation(student, dense), loader(ids), verbose=False)
    module, trainer, few = run(8, 9, Save())
    few_again = run(8, 9, ckpt_path=tmp_path / "half.ckpt")[0]
    assert all(map(torch.equal, module.parameters(), few_again.parameters()))
    for layer in pruned_layers(module.model):
        assert torch.equal(layer.weight == 0, (torch.arange(128) % 3 == 0).expand(128, -1))
    states = [x["exp_avg"] for x in trainer.optimizers[0].state.values()]
    kept = 128 * 85
    assert [len(x) for x in states if type(x) is not torch.Tensor] == [-(-kept // 256) * 256] * 7
    whole = run(32, 9)[2]
    assert abs(few - whole) < 0.05 * (start["val_kl"] - whole)
    # The memory that is said: 6 bytes a kept weight fewer than with moments of 32 bits.
    numbers = needed_memory(Distillation(student, dense), 0), needed_memory(module, 0)
    assert numbers[0] - numbers[1] == 6 * (7 * kept + 3 * 128)


def test_moments_have_32_or_8_bits(pair):
    with pytest.raises(OptionError, match="`moment_bits`.*expected 32 or 8; got 4"):
        Distillation(*pair, moment_bits=4)


@pytest.mark.parametrize("options", [{"train_embeddings": True}, {"moment_bits": 8}])
def test_a_sharded_model_takes_not_all_options(options, pair, monkeypatch):
    module = Distillation(*pair, **options)
    monkeypatch.setattr(Distillation, "device_mesh", {"data_parallel": None})
    with pytest.raises(OptionError, match=f"`{next(iter(options))}`.* sharded model"):
        module.configure_model()


def own_text(**options):
    return DistillationText(tokens=640, sequence_length=32, batch_size=4, seed=1, **options)


def test_a_resumed_training_ends_with_the_same_bits(pair, tmp_path):
    """Killed in the middle of the second epoch, with float32 values of weights in bfloat16.

    The rate changes the size of some weights so much that their own rates would be others.
    """
    student, dense = pair
    start = student.model.state_dict()

    class Save(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "half.ckpt")

    def run(*callbacks, ckpt_path=None):
        options = {"dtype": "bfloat16", "warmup_steps": 2, "learning_rate": 1.0}
        module = Distillation(copy.deepcopy(student), dense, **options)
        trainer = lightning.Trainer(
            max_steps=9, callbacks=[KeepSparsity(), KeepBest(), *callbacks], **QUIET
        )
        data = own_text(keep=tmp_path / "windows.safetensors")
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return module.model.state_dict()

    whole = run(Save())
    resumed = run(ckpt_path=tmp_path / "half.ckpt")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    sizes = [{name: w.float().norm() for name, w in x.items()} for x in (start, whole)]
    assert any(sizes[1][name] > 1.5 * size for name, size in sizes[0].items() if size)


def test_the_teacher_writes_and_a_tenth_is_held_out(pair, tmp_path):
    """The windows do not depend on the student, and texts are validated by name."""
    student, dense = pair
    file = tmp_path / "code.py"
    file.write_text("\n".join(f"def f{n}(x):\n    return x + {n}" for n in range(2000)))

    def windows(student):
        data = own_text(train_files=file)
        module = Distillation(student, dense)
        trainer = Trainer(max_steps=1, num_sanity_val_steps=-1, **QUIET)
        trainer.fit(module, datamodule=data)
        return data._drawn()

    one, other = windows(copy.deepcopy(student)), windows(copy.deepcopy(dense))
    assert {name: len(w) for name, w in one.items()} == {
        **{"trained/own": 10, "held-out/own": 1, "trained/text": 10, "held-out/text": 1}
    }
    assert all(torch.equal(one[name], other[name]) for name in one)
    trained = {tuple(w.tolist()) for w in one["trained/own"]}
    assert tuple(one["held-out/own"][0].tolist()) not in trained


@pytest.mark.parametrize("in_file", [False, True])
def test_no_result_is_worse_than_its_start(in_file, pair, windows, tmp_path):
    student, dense = pair
    module = Distillation(student, dense, learning_rate=1.0, warmup_steps=0)  # far too much
    start = {name: p.clone() for name, p in module.model.named_parameters()}
    module.model.model.norm.to(torch.bfloat16)  # two widths
    best = KeepBest(file=tmp_path / "best" if in_file else None)
    trainer = Trainer(
        max_steps=2, callbacks=[KeepSparsity(), best], num_sanity_val_steps=-1, **QUIET
    )
    trainer.fit(module, loader(windows[:8]), loader(windows[160:]))
    assert best.best_step == 0
    assert best.best == best.figures_at_start["val_kl"]
    assert all(torch.equal(p, start[name]) for name, p in module.model.named_parameters())
    other = KeepBest(file=tmp_path / "other" if in_file else None)
    other.load_state_dict(best.state_dict())
    weights = other.state_dict()["weights"]
    assert all(
        torch.equal(weight, start[name.removeprefix("model.")]) for name, weight in weights.items()
    )


def test_it_is_saved_as_a_pruned_model(tiny_llama, windows, tmp_path):
    prune = MRPCallback(pattern="2:4", method="wanda", save_dir=tmp_path / "pruned")
    Trainer(**QUIET).predict(CausalLM(tiny_llama), loader(windows[:4]), callbacks=[prune])
    module = Distillation(str(tmp_path / "pruned"), str(tiny_llama), dtype="float32")
    save = SaveModel(tmp_path / "distilled", dtype="bfloat16")
    Trainer(max_steps=2, callbacks=[KeepSparsity(), save], **QUIET).fit(module, loader(windows[:8]))
    assert (tmp_path / "distilled" / "pruning_report.json").is_file()
    again = CausalLM(tmp_path / "distilled")
    assert len(pruned_layers(again.model)) == len(prune.report.layers)


def test_a_divergence_that_is_not_finite_ends_training(pair, windows, caplog):
    student, dense = pair
    module = Distillation(student, dense)
    start = {name: p.clone() for name, p in module.model.named_parameters()}
    trainer = Trainer(max_steps=4, callbacks=[KeepSparsity()], **QUIET)

    class Break(lightning.pytorch.Callback):
        def on_train_start(self, trainer, module):
            head = module.student.logits
            module.student.logits = lambda hidden: head(hidden) * float("nan")

    trainer.callbacks.append(Break())
    trainer.fit(module, loader(windows[:16]))
    assert "is not finite" in caplog.text
    assert all(torch.equal(p, start[n]) for n, p in module.model.named_parameters())


def test_another_vocabulary_is_refused(pair, build):
    with pytest.raises(OptionError, match=r"`teacher`: its vocabulary has 64 tokens"):
        Distillation(pair[0], build("llama"))


def test_another_tokenizer_is_refused(tiny_llama, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(tiny_llama, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(OptionError, match=r"`teacher`: its tokenizer gives other tokens"):
        Distillation(tiny_llama, other)


def test_a_student_that_lost_nothing_is_warned_of(pair, windows, caplog):
    dense = pair[1]
    trainer = Trainer(max_steps=1, **QUIET)
    trainer.fit(Distillation(copy.deepcopy(dense), dense), loader(windows[:4]))
    assert "there is nothing to win back" in caplog.text


def test_a_student_is_not_its_own_teacher(pair):
    with pytest.raises(OptionError, match=r"`teacher`: it is the student itself"):
        Distillation(pair[0], pair[0])


def test_nothing_to_keep_is_said_before_text_is_written(pair, monkeypatch):
    monkeypatch.setattr(OwnText, "draw", None)
    trainer = Trainer(max_epochs=1, callbacks=[KeepSparsity()], **QUIET)
    with pytest.raises(TargetError, match="nothing to keep"):
        trainer.fit(Distillation(copy.deepcopy(pair[1]), pair[1]), datamodule=own_text())


def test_a_packed_student_is_refused(pair):
    student, dense = pair
    student.model.config.quantization_config = {"quant_method": "mrp_bitmask"}
    with pytest.raises(OptionError, match=r"`student`: .* is packed, .* Give the pruned model"):
        Distillation(student, dense)


def test_no_step_is_best_without_a_validation(pair, windows, caplog):
    start = copy.deepcopy(pair[0].state_dict())
    trainer = Trainer(max_steps=1, callbacks=[KeepBest()], **QUIET)
    with pytest.raises(OptionError, match=r"compares `val_kl` on held-out data, and there is none"):
        trainer.fit(Distillation(*pair), loader(windows[:8]))
    assert all(torch.equal(weight, start[name]) for name, weight in pair[0].state_dict().items())
    # There is some, but the training ends before it is read.
    with pytest.warns(UserWarning, match="no validation gave a finite `val_kl`"):
        trainer.fit(Distillation(*pair), loader(windows[:8]), loader(windows[160:]))


def test_a_fit_after_one_that_failed_trains_all_weights(pair, windows, monkeypatch):
    student, dense = pair
    module = Distillation(student, dense, dtype="bfloat16", learning_rate=2e-2, warmup_steps=0)
    step = Distillation.training_step

    def failing(*_):
        raise RuntimeError("the power is gone")

    monkeypatch.setattr(Distillation, "training_step", failing)
    with pytest.raises(RuntimeError, match="the power is gone"):
        Trainer(max_steps=2, **QUIET).fit(module, loader(windows[:8]))
    monkeypatch.setattr(Distillation, "training_step", step)
    start = {n: p.detach().clone() for n, p in module.model.named_parameters() if p.requires_grad}
    Trainer(max_steps=2, **QUIET).fit(module, loader(windows[:8]))
    matrices = {n: p for n, p in module.model.named_parameters() if n in start and p.ndim == 2}
    assert matrices
    assert not [n for n, parameter in matrices.items() if torch.equal(parameter, start[n])]


def test_texts_held_out_in_a_list_are_numbered(pair, windows):
    trainer = Trainer(**QUIET)
    module = Distillation(*pair)
    trainer.validate(module, [loader(windows[:2]), loader(windows[2:4])], verbose=False)
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert figures["val_kl"] == pytest.approx((figures["val_kl/0"] + figures["val_kl/1"]) / 2)


def drawn(pair, data):
    """The windows of a text, drawn in a `predict` of the dense model."""
    Trainer(**QUIET).predict(copy.deepcopy(pair[1]), datamodule=data)
    return data._drawn()


def test_kept_windows_come_back_in_their_order_and_others_are_refused(pair, tmp_path, words):
    file = tmp_path / "windows.safetensors"
    shares = {"train_files": 0.5, "stdlib": 0.5}  # in an order that is not the alphabet's
    first, second = (
        drawn(pair, own_text(train_files=words, calibration=shares, keep=file)) for _ in range(2)
    )
    assert [*first] == [*second]
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(OptionError, match="`keep`: .* holds windows of .*`seed: 1`"):
        drawn(pair, DistillationText(words, tokens=640, sequence_length=32, seed=2, keep=file))


@pytest.fixture
def words(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text(" ".join(map(str, range(4000))))
    return file


@pytest.mark.parametrize("count", [20, 25, 31, 98])
def test_as_many_windows_are_trained_on_as_are_asked_for(pair, count):
    data = DistillationText(tokens=count * 8, sequence_length=8, batch_size=1)
    assert {name: len(windows) for name, windows in drawn(pair, data).items()} == {
        "trained/own": count,
        "held-out/own": max(1, count // 10),
    }
    assert data.steps == count


def test_no_held_out_token_of_a_named_file_is_trained_on(pair, words):
    windows = drawn(pair, own_text(calibration=str(words)))
    trained = {tuple(r.tolist()) for r in windows[f"trained/{words}"].unfold(1, 8, 1).flatten(0, 1)}
    held = [
        tuple(row.tolist()) for row in windows[f"held-out/{words}"].unfold(1, 8, 1).flatten(0, 1)
    ]
    assert held
    assert not trained & {*held}


def test_a_dataset_is_half_of_the_text(pair):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"text": [" ".join(map(str, range(4000)))] * 4})
    windows = drawn(pair, own_text(dataset=datasets.DatasetDict(train=rows)))
    assert {name: len(w) for name, w in windows.items() if "trained" in name} == {
        "trained/own": 10,
        "trained/dataset": 10,
    }


def test_a_text_that_is_too_short_is_refused_before_any_is_written(pair, tmp_path, monkeypatch):
    file = tmp_path / "short.txt"
    file.write_text(" ".join(map(str, range(200))))
    monkeypatch.setattr(OwnText, "draw", None)
    with pytest.raises(DataError, match=r"`tokens`: short.txt is enough for \d+ windows"):
        drawn(pair, DistillationText(file, tokens=64_000, sequence_length=32))


def test_a_batch_of_padding_alone_changes_nothing_and_ends_nothing(pair, windows):
    ids = windows[:2, :16]
    padded = [{"input_ids": ids, "attention_mask": torch.zeros_like(ids)}]
    padded += [{"input_ids": ids, "attention_mask": torch.tensor([[0] * 16, [1] * 16])}]
    trainer = Trainer(max_steps=2, **QUIET)
    trainer.fit(Distillation(*pair), DataLoader(padded, batch_size=None))
    assert trainer.global_step == 2
    assert float(trainer.callback_metrics["kl"]) > 0
    with pytest.raises(DataError, match="all tokens to train on are padding"):
        Trainer(max_steps=1, **QUIET).fit(Distillation(*pair), DataLoader(padded[:1], None))


def test_windows_of_no_token_are_refused_by_the_name_of_their_argument():
    with pytest.raises(OptionError, match="`sequence_length` must be at least 2; got 0"):
        DistillationText(tokens=1000, sequence_length=0)
