"""`mrp-lightning distill`: from a pruned directory to a better one, also after an interruption."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from mrp_lightning import CausalLM
from mrp_lightning.commands import distillation
from mrp_lightning.commands.distillation import Unfinished
from mrp_lightning.commands.main import main
from mrp_lightning.distillation.module import Distillation, needed_disk, needed_memory

SMALL = ["--tokens=640", "--sequence-length=32", "--batch-size=4", "--accelerator=cpu"]


@pytest.fixture(scope="module")
def pruned(tiny_llama, tmp_path_factory):
    directory = tmp_path_factory.mktemp("distill") / "half"
    prune = ["prune", str(tiny_llama), "--pattern=2:4", "--num-samples=4", "--sequence-length=32"]
    main([*prune, "--eval-samples=2", "--accelerator=cpu", f"--out={directory}"])
    return directory


@pytest.fixture
def run(pruned, tmp_path):
    return Path(shutil.copytree(pruned, tmp_path / "half"))


def weights(directory):
    return AutoModelForCausalLM.from_pretrained(directory).state_dict()


def test_it_keeps_the_zeros_and_says_what_changed_and_so_do_bits_after_it(run, tmp_path, capsys):
    main(["distill", str(run), *SMALL])
    out = run.with_name("half-distilled")
    before, after = weights(run), weights(out)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    assert not any("embed" in name for name in changed)
    for name, weight in before.items():
        if "proj" in name:
            assert not after[name][weight == 0].any()
    assert (out / "pruning_report.json").is_file()
    shown = capsys.readouterr().out
    assert "640 tokens in 5 steps" in shown
    assert f"mrp-lightning export {out}" in shown.replace("\n", "")
    assert [path.name for path in run.parent.iterdir() if "distilling" in path.name] == []

    # With the pattern of the pruning, whose removed weights are the cheapest to remove again.
    prune = ["prune", str(out), "--pattern=2:4", "--bits=4", "--num-samples=4", "--eval-samples=2"]
    main([*prune, "--sequence-length=32", "--accelerator=cpu", f"--out={tmp_path / 'grid'}"])
    on_grid = weights(tmp_path / "grid")
    for name, weight in after.items():
        if "proj" in name:
            assert not on_grid[name][weight == 0].any()


def test_an_interrupted_run_ends_with_the_same_bits(run, monkeypatch):
    main(["distill", str(run), *SMALL, "--tokens=1280", "--out", str(run.with_name("whole"))])
    step = Distillation.training_step

    def interrupted(self, batch, batch_idx):
        if self.global_step == 7:
            raise RuntimeError("the power is gone")
        return step(self, batch, batch_idx)

    again = ["distill", str(run), *SMALL, "--tokens=1280", "--out", str(run.with_name("resumed"))]
    monkeypatch.setattr(Distillation, "training_step", interrupted)
    with pytest.raises(RuntimeError, match="the power is gone"):
        main(again)
    monkeypatch.setattr(Distillation, "training_step", step)
    taken = []
    monkeypatch.setattr(
        Distillation,
        "training_step",
        lambda self, batch, i: (taken.append(self.global_step), step(self, batch, i))[1],
    )
    main(again)
    assert 0 < len(taken) < 10  # it went on
    one, other = weights(run.with_name("whole")), weights(run.with_name("resumed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_that_ends_within_a_validation_has_the_same_best_step(run, monkeypatch):
    """The best step is an early one: a stop before or after it was measured must not lose it."""
    rate = ["--learning-rate=0.3", "--tokens=1280"]  # 10 steps, of which later ones do harm
    main(["distill", str(run), *SMALL, *rate, "--out", str(run.with_name("whole"))])
    whole = json.loads((run.with_name("whole") / "distillation.json").read_text())
    assert 0 < whole["best_step"] < whole["steps"]
    validate = Distillation.validation_step

    def interrupted(self, *arguments):
        if self.global_step == whole["best_step"]:
            raise RuntimeError("the power is gone")
        return validate(self, *arguments)

    def full(*_):
        raise OSError("No space left on device")

    for name, place, stop in (
        ("validation", (Distillation, "validation_step"), interrupted),
        ("saving", (distillation.SaveModel, "on_fit_end"), full),
    ):
        out = run.with_name(name)
        again = ["distill", str(run), *SMALL, *rate, "--out", str(out)]
        with monkeypatch.context() as patched:
            patched.setattr(*place, stop)
            with pytest.raises((RuntimeError, SystemExit)):
                main(again)
        main(again)
        resumed = json.loads((out / "distillation.json").read_text())
        assert resumed["best_step"] == whole["best_step"]
        assert resumed["end"] == whole["end"]
        one, other = weights(run.with_name("whole")), weights(out)
        assert all(torch.equal(one[n], other[n]) for n in one)


def test_the_figures_come_with_the_model(run, monkeypatch, capsys):
    """A process that is killed right behind the saving leaves both, and what it worked with."""
    out = run.with_name("out")
    save = distillation.SaveModel.on_fit_end

    def killed(self, *arguments):
        save(self, *arguments)
        raise RuntimeError("the power is gone")

    again = [str(run), *SMALL, "--out", str(out)]
    with monkeypatch.context() as patched:
        patched.setattr(distillation.SaveModel, "on_fit_end", killed)
        with pytest.raises(RuntimeError, match="the power is gone"):
            main(["distill", *again])
    figures = json.loads((out / "distillation.json").read_text())
    assert (figures["steps"], figures["tokens"]) == (5, 640)
    assert "distillation.json" in json.loads((out / "pruning_report.json").read_text())["files"]
    left = run.with_name(".out.distilling")
    assert f"ended before its last step, and left {left}: " in refusal(again, capsys)
    main(["distill", *again, "--overwrite"])
    assert json.loads((out / "distillation.json").read_text())["end"] == figures["end"]
    assert not left.exists()


def test_an_unfinished_run_of_other_weights_is_not_gone_on_with(run, monkeypatch, capsys):
    def interrupted(*_):
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as patched:
        patched.setattr(Distillation, "training_step", interrupted)
        with pytest.raises(RuntimeError, match="the power is gone"):
            main(["distill", str(run), *SMALL])
    stored = load_file(run / "model.safetensors")
    save_file({n: w + 1 for n, w in stored.items()}, run / "model.safetensors", {"format": "pt"})
    assert "with another content of RUN" in refusal([str(run), *SMALL], capsys)


def test_its_text_is_by_default_the_pruning_s(run, tmp_path, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("import this\n" * 4000)
    report = json.loads((run / "pruning_report.json").read_text())
    report["provenance"]["data"]["files"] = [str(text)]
    (run / "pruning_report.json").write_text(json.dumps(report))
    main(["distill", str(run), *SMALL])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"half text that the teacher writes, half {text}" in shown
    assert "GiB beside the two models" in shown
    figures = json.loads((run.with_name("half-distilled") / "distillation.json").read_text())
    assert {"val_kl/own", "val_kl/text"} <= figures["start"].keys()
    assert figures["end"]["val_kl"] <= figures["start"]["val_kl"]
    assert (figures["tokens"], figures["steps"]) == (640, 5)
    text.unlink()
    again = [str(run), *SMALL, "--out", str(tmp_path / "other")]
    assert "the text of the pruning is gone" in refusal(again, capsys)
    own = [*again, "--text", "self"]
    assert "`--text self` reads none" in refusal([*own, "--text-column", "body"], capsys)
    main(["distill", *own])


def test_the_memory_that_is_said_is_what_training_holds(run):
    """Gradients, kept values and their moments, and what the nodes of autograd's graph save."""
    module = Distillation(run, CausalLM(str(run)), dtype="float32")
    trained = [
        p for n, p in module.model.named_parameters() if "embed" not in n and "head" not in n
    ]
    kept = sum(int((p != 0).sum()) for p in trained)
    masks = sum(p.numel() for n, p in module.model.named_parameters() if "proj" in n)
    weights, fixed = 4 * sum(p.numel() for p in trained), 12 * kept + masks + 10 * 4 * 2**23
    assert needed_memory(module, 0) == fixed + max(4 * kept, weights)
    activations = (needed_memory(module, 10**6) - 4 * kept - fixed) / 10**6
    assert activations == pytest.approx(saved_bytes(module.model, 16) / 16, rel=0.01)
    module.gradient_checkpointing = True
    fewer = (needed_memory(module, 10**6) - 4 * kept - fixed) / 10**6
    assert fewer < 0.6 * activations
    assert not any(p.requires_grad for p in module.teacher.model.parameters())


def test_the_room_that_is_asked_for_holds_the_files_of_training(run, monkeypatch, capsys):
    checkpoints = []
    save = torch.save

    def saved(content, path):
        save(content, path)
        stores = [x.untyped_storage() for x in tree_leaves(content) if isinstance(x, torch.Tensor)]
        sizes = {store.data_ptr(): store.nbytes() for store in stores}  # tied weights are one
        best = sum(weight.nbytes for weight in content["callbacks"]["KeepBest"]["weights"].values())
        checkpoints.append((sum(sizes.values()), best))

    monkeypatch.setattr(torch, "save", saved)
    main(["distill", str(run), *SMALL])
    needed = needed_disk(Distillation(run, CausalLM(str(run)), dtype="float32"))  # as there
    for checkpoint, best in checkpoints:
        assert needed == pytest.approx(2 * checkpoint + best, rel=0.01)

    full = type("Usage", (), {"free": needed // 2})
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    again = [str(run), *SMALL, "--out", str(run.with_name("other"))]
    assert "but the disk has" in refusal(again, capsys)
    assert not run.with_name(".other.distilling").exists()


def test_copies_in_bfloat16_are_in_the_memory_that_is_said(run):
    module = Distillation(run, CausalLM(str(run)), dtype="float32")
    added = needed_memory(module, 10**6, "bf16-mixed") - needed_memory(module, 10**6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        few, more = (saved_bytes(module.model, tokens) for tokens in (16, 32))
    head = module.model.get_output_embeddings().weight
    assert added - 2 * head.numel() == pytest.approx(2 * few - more, rel=0.01)


@pytest.mark.parametrize("has_units", [True, False])
def test_products_are_of_bfloat16_where_the_device_has_units_for_them(run, has_units, monkeypatch):
    monkeypatch.setattr(distillation, "has_bfloat16_units", lambda device: has_units)
    taken = []
    step = Distillation.training_step
    monkeypatch.setattr(
        Distillation,
        "training_step",
        lambda self, batch, i: (taken.append(self.trainer.precision), step(self, batch, i))[1],
    )
    main(["distill", str(run), *SMALL, "--text", "self", "--out", str(run.with_name("other"))])
    assert set(taken) == {"bf16-mixed" if has_units else "32-true"}


def saved_bytes(model, tokens):
    """The bytes that the graph of a forward pass holds, found by a walk over its nodes."""
    weights = {p.data_ptr() for p in model.parameters()}
    hidden = model.model(torch.arange(tokens)[None], use_cache=False).last_hidden_state
    seen, todo = set(), [hidden.grad_fn]
    storages = {hidden.data_ptr(): hidden.nbytes}  # which the loss saves
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            value = getattr(node, name) if name.startswith("_saved_") else None
            if isinstance(value, torch.Tensor) and value.data_ptr() not in weights:
                storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        todo += [node for node, _ in node.next_functions]
    return sum(storages.values())


def refusal(args, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["distill", *args])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_after_several_prunings_the_first_model_is_the_teacher(
    run, tiny_llama, tmp_path, monkeypatch, capsys
):
    twice = tmp_path / "twice"
    prune = ["prune", str(run), "--structure=neurons", "--sparsity=0.5", "--num-samples=4"]
    main(
        [*prune, "--sequence-length=32", "--eval-samples=2", "--accelerator=cpu", f"--out={twice}"]
    )
    shown = capsys.readouterr().out
    assert "Evaluating the model before this run on" in shown
    assert "│ before " in shown
    assert "dense" not in shown
    main(["distill", str(twice), *SMALL])
    shown = "".join(capsys.readouterr().out.split())
    assert f"Loading{twice}and{tiny_llama}…" in shown

    def seen(module, *_):
        assert module.teacher.model.name_or_path == str(tiny_llama)
        raise RuntimeError("seen")

    monkeypatch.setattr(Distillation, "training_step", seen)
    again = [*prune, "--sequence-length=32", "--eval-samples=2", "--accelerator=cpu"]
    again += [f"--out={tmp_path / 'distilled'}", "--distill=640"]
    with pytest.raises(RuntimeError, match="seen"):
        main(again)
    report = json.loads((run / "pruning_report.json").read_text())
    report["config"]["base_model"] = str(run.with_name("moved"))
    (run / "pruning_report.json").write_text(json.dumps(report))
    with pytest.raises(SystemExit):
        main(again)
    assert "`--distill`: it learns from the dense model of" in capsys.readouterr().err


def test_mistakes_are_refused_before_work(run, tiny_llama, capsys):
    assert "expected the directory of a pruning" in refusal([str(tiny_llama)], capsys)
    assert "expected at least ten windows" in refusal([str(run), "--tokens=99"], capsys)
    large = [str(run), *SMALL, "--batch-size=64"]
    assert "expected at least a step, 2048 tokens. Got 640" in refusal(large, capsys)
    report = json.loads((run / "pruning_report.json").read_text())
    report["config"]["base_model"] = str(run.with_name("moved"))
    (run / "pruning_report.json").write_text(json.dumps(report))
    assert re.search("`--teacher`: the dense model .* is not there:", refusal([str(run)], capsys))
    report["config"]["bits"] = 4
    (run / "pruning_report.json").write_text(json.dumps(report))
    assert "on a grid of few bits" in refusal([str(run), *SMALL], capsys)
    assert "finite rate > 0" in refusal([str(run), *SMALL, "--learning-rate=nan"], capsys)
    assert "`--text`" in refusal([str(run), *SMALL, "--text=none.txt"], capsys)
    report["config"].update(bits=None, base_model=str(tiny_llama))
    (run / "pruning_report.json").write_text(json.dumps(report))
    assert "`--teacher`: it is RUN itself" in refusal([str(run), f"--teacher={run}"], capsys)
    assert "`--accelerator`" in refusal([str(run), *SMALL, "--accelerator=none"], capsys)
    # It shows when the models are loaded, and leaves nothing that would refuse the right command.
    long = [str(run), *SMALL, "--sequence-length=9999", "--tokens=99990", "--batch-size=1"]
    assert "positions" in refusal(long, capsys)
    cut = report | {"config": {"vocabulary": 700, "base_model": str(tiny_llama)}}
    (run / "pruning_report.json").write_text(json.dumps(cut))
    assert "`RUN`: the vocabulary of" in (error := refusal([str(run), *SMALL], capsys))
    assert "nothing pruned, so that there is nothing to win back" in error
    assert sorted(path.name for path in run.parent.iterdir()) == ["half"]


def test_an_unfinished_run_of_other_options_is_named(run, capsys):
    directory = run.with_name(".half-distilled.distilling")
    directory.mkdir()
    (directory / "options.json").write_text(json.dumps({"--tokens": 1}))
    assert "an unfinished distillation with another" in refusal([str(run), *SMALL], capsys)
    main(["distill", str(run), *SMALL, "--restart"])
    assert run.with_name("half-distilled").is_dir()


def test_a_restart_removes_an_unfinished_run_of_the_same_options_too(tmp_path):
    options, out = {"tokens": 2}, tmp_path / "out"
    begun = Unfinished.of(out, options, restart=False)
    (begun.directory / "training").mkdir(parents=True)
    assert (Unfinished.of(out, options, restart=False).directory / "training").is_dir()
    Unfinished.of(out, options, restart=True)
    assert not begun.directory.exists()


@pytest.mark.parametrize("bits", [[], ["--grid=q4_0", "--target=dense"]], ids=["16-bits", "4-bits"])
def test_a_pruning_distils_before_it_rounds(
    tiny_llama, tmp_path, monkeypatch, capsys, caplog, bits
):
    caplog.set_level("INFO")
    out = tmp_path / "out"
    if bits:  # and text is given
        text = tmp_path / "text.txt"
        text.write_text(" ".join(map(str, range(9999))))
        bits = [*bits, f"--text={text}"]
    prune = ["prune", str(tiny_llama), "--pattern=2:4", *bits, "--num-samples=4", f"--out={out}"]
    prune += ["--sequence-length=32", "--eval-samples=2", "--accelerator=cpu", "--distill=640"]

    def interrupted(module, *_):
        assert module.gradient_checkpointing
        raise RuntimeError("the power is gone")

    with monkeypatch.context() as little:  # memory
        little.setattr(distillation, "available_memory", lambda device: 2**20)
        little.setattr(Distillation, "training_step", interrupted)
        with pytest.raises(RuntimeError, match="the power is gone"):
            main(prune)
    assert "with activations that are computed again" in caplog.text
    unfinished = tmp_path / ".out.distilling"
    before, windows = weights(unfinished / "pruned"), load_file(unfinished / "windows.safetensors")
    first = json.loads((unfinished / "pruned" / "pruning_report.json").read_text())
    main(prune)
    after, shown = weights(out), capsys.readouterr().out
    assert "Distilling on 640 tokens" in caplog.text
    assert "an evaluation as before and without the distillation;" in " ".join(shown.split())
    name = r"2:4.q4_0, (distilled)?" if bits else "2:4, distilled"  # which may be wrapped
    row = rf"│ {name} +│ +[\d,.]+ │ +[\d.]+ │"
    assert re.search(row, shown)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []
    for name, weight in before.items():
        if "proj" in name:
            assert not after[name][weight == 0].any()
            assert not torch.equal(after[name], weight)
    report = json.loads((out / "pruning_report.json").read_text())
    # One text, written once, serves all steps; four windows of 32 tokens are calibrated on.
    texts = ["own", "text"] if bits else ["own"]
    assert {name: len(w) for name, w in windows.items() if "trained" in name} == {
        f"trained/{text}": 20 // len(texts) for text in texts
    }
    assert {layer["tokens"] for step in (first, report) for layer in step["layers"]} == {4 * 32}
    assert caplog.text.count("of the model's own text in") == 1
    assert report["config"]["base_model"] == str(tiny_llama)
    if bits:  # of the pruning that was put on a grid
        (earlier,) = report["provenance"]["pruned_before"]
        assert earlier == {"method": "JM", "pattern": "2:4", "trained": 10}
        assert "already had the pattern" not in caplog.text
        assert "by JM and trained for 10 steps" in (out / "README.md").read_text()
    assert (report["config"]["pattern"], report["config"]["bits"]) == ("2:4", 4 if bits else None)
    # The weights that are trained next are nearly at the optimum, those of the result are.
    tolerances = [step["config"]["tolerance"] for step in (first, report)]
    assert tolerances == [0.01, None if bits else 0.01]
    targets = [step["config"]["target"] for step in (first, report)]
    assert targets == ["own", "dense" if bits else "own"]
    half_own = "0.5 the model's own text + 0.5 train_files"
    for step in (first, report):
        calibrated_on = step["provenance"]["data"]["source"]
        assert calibrated_on == (half_own if bits else "the model's own text")
    whole = tmp_path / "whole"  # without an interruption
    main([*(f"--out={whole}" if word == f"--out={out}" else word for word in prune)])
    assert {*out.iterdir()} == {out / path.name for path in whole.iterdir()}
    for name, weight in weights(whole).items():
        assert torch.equal(weight, after[name])


def test_a_pruning_distils_with_moments_of_8_bits(tiny_llama, tmp_path, monkeypatch, capsys):
    def seen(module, *_):
        assert module.moment_bits == 8
        raise RuntimeError("seen")

    monkeypatch.setattr(Distillation, "training_step", seen)
    prune = ["prune", str(tiny_llama), "--pattern=2:4", "--moment-bits=8", "--num-samples=4"]
    prune += ["--sequence-length=32", "--eval-samples=2", "--accelerator=cpu"]
    prune += [f"--out={tmp_path / 'out'}"]
    with pytest.raises(SystemExit):
        main(prune)
    assert "`--moment-bits`: it is about the training of" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="seen"):
        main([*prune, "--distill=640"])


def test_a_refused_pruning_leaves_nothing_to_go_on_with(tiny_llama, tmp_path, capsys):
    """Else the corrected command would be refused for its other options."""
    out = ["--sparsity=0.5", "--sequence-length=32", f"--out={tmp_path / 'out'}"]
    for model, tokens in ((tmp_path / "absent", 640), (tiny_llama, 64)):
        with pytest.raises(SystemExit):
            main(["prune", str(model), *out, f"--distill={tokens}"])
    assert "expected at least ten windows" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_tuning_before_a_distillation_is_refused(tiny_llama, capsys):
    for options in (["--recipe=best"], ["--tuning"], ["--target=dense"]):
        with pytest.raises(SystemExit):
            main(["prune", str(tiny_llama), "--sparsity=0.5", "--distill=640", *options])
        assert "gain nothing before a distillation" in capsys.readouterr().err


def test_few_zeros_are_not_filled(tiny_llama, tmp_path, capsys):
    prune = ["prune", str(tiny_llama), "--sparsity=0.03", f"--out={tmp_path / 'few'}"]
    few = ["--num-samples=4", "--eval-samples=2", "--sequence-length=32", "--accelerator=cpu"]
    main([*prune, *few])
    assert "14 layers" in (error := refusal([str(tmp_path / "few"), *SMALL], capsys))
    assert "fewer than 5% of the weights, which training would fill" in error
    assert [path.name for path in tmp_path.iterdir()] == ["few"]
    with pytest.raises(SystemExit):
        main([*prune[:3], f"--out={tmp_path / 'other'}", *few, "--distill=640"])
    assert "`--distill`: training would fill the zeros" in capsys.readouterr().err


def test_a_narrower_model_is_not_to_be_packed(tiny_llama, tmp_path, capsys):
    out = tmp_path / "narrower"
    prune = ["prune", str(tiny_llama), "--structure=neurons", "--sparsity=0.5", f"--out={out}"]
    few = ["--num-samples=4", "--eval-samples=2", "--sequence-length=32", "--accelerator=cpu"]
    main([*prune, *few])
    capsys.readouterr()
    main(["distill", str(out), *SMALL])
    assert f"mrp-lightning gguf {out}-distilled" in capsys.readouterr().out.replace("\n", "")


def test_units_are_not_removed_a_second_time_to_round_the_head(tiny_llama, capsys):
    prune = ["prune", str(tiny_llama), "--structure=neurons", "--sparsity=0.5", "--head-grid=q8_0"]
    with pytest.raises(SystemExit):
        main([*prune, "--distill=640"])
    assert "`--head-grid`: what is left after a distillation of fewer" in capsys.readouterr().err


def test_bits_alone_are_not_distilled(tiny_llama, capsys):
    with pytest.raises(SystemExit):
        main(["prune", str(tiny_llama), "--bits=4", "--distill=640"])
    assert "trains what a pruning kept" in capsys.readouterr().err


def test_an_allocation_is_not_rounded_after_a_distillation(tiny_llama, capsys):
    prune = ["prune", str(tiny_llama), "--sparsity=0.5", "--allocation=output", "--bits=4"]
    with pytest.raises(SystemExit):
        main([*prune, "--distill=640"])
    assert "`--allocation`: its layers have other sparsities" in capsys.readouterr().err


def test_a_tokenizer_of_ones_own_serves_all_steps(tiny_llama, tmp_path):
    bare = shutil.copytree(tiny_llama, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(map(str, range(9999))))
    prune = ["prune", str(bare), "--tokenizer", str(tiny_llama), "--pattern=2:4", "--distill=640"]
    prune += [f"--text={text}", "--sequence-length=32", "--num-samples=4", "--eval-samples=2"]
    main([*prune, "--accelerator=cpu", f"--out={tmp_path / 'out'}"])
    assert (tmp_path / "out" / "distillation.json").is_file()
