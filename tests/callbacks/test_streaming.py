"""A streamed model is pruned to the bits that it has when it is pruned in memory."""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from slow_pruning import killed_after
from torch import Tensor

from callbacks import MRPCallback
from mrp_lightning import CausalLM, Trainer
from mrp_lightning.errors import FormatError, OptionError, StrategyError, TargetError
from mrp_lightning.journal.journal import Journal
from mrp_lightning.loop.module_parts import start_streamed
from mrp_lightning.pruning.settings import BlockTuning
from mrp_lightning.storage.files import MANIFEST

TUNING = BlockTuning(epochs=1, learning_rate=1e-3, batch_size=2)
NAN = "model.layers.1.mlp.up_proj.weight"
SEEN = {"seconds", "base_model", "command", "files", "resumed_blocks", "cpu_seconds", "peak_rss"}


@pytest.fixture
def source(build, tmp_path):
    """Write a tiny model of a family as a checkpoint whose blocks are in several files."""

    def write(family: str, dtype: torch.dtype = torch.float32) -> Path:
        build(family).to(dtype).save_pretrained(tmp_path / "source", max_shard_size="20KB")
        return tmp_path / "source"

    return write


@pytest.fixture
def prune(loader, quiet, tmp_path):
    """Prune the model of a directory into `out`, and die after some blocks."""

    def run(
        model: Path, out: str, survives: int | None = None, lm: Any = None, **arguments: Any
    ) -> tuple[CausalLM, MRPCallback]:
        trainer = quiet | arguments.pop("trainer", {})
        module = CausalLM(model, **lm or {})
        options = {"sparsity": 0.5, "save_dir": tmp_path / out} | arguments
        callback = MRPCallback(**options)
        with nullcontext() if survives is None else killed_after(survives):
            Trainer(**trainer).predict(module, loader, callbacks=[callback])
        return module, callback

    return run


def tensors_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def report_of(directory: Path) -> Any:
    def without_times(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_times(inner) for key, inner in value.items() if key not in SEEN}
        return [without_times(inner) for inner in value] if isinstance(value, list) else value

    return without_times(json.loads((directory / "pruning_report.json").read_text()))


def assert_same_checkpoints(ours: Path, theirs: Path) -> None:
    a, b = tensors_of(ours), tensors_of(theirs)
    assert a.keys() == b.keys()
    for name, tensor in b.items():
        assert a[name].dtype == tensor.dtype
        assert torch.equal(a[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert report_of(ours) == report_of(theirs)
    for name in ("config.json", "generation_config.json"):
        assert (ours / name).read_text() == (theirs / name).read_text()
    files = {file.name for file in ours.iterdir()} - {MANIFEST}
    assert files == set(json.loads((ours / "pruning_report.json").read_text())["files"])
    index = json.loads((ours / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == b.keys()


@pytest.mark.parametrize(
    ("family", "survives", "arguments"),
    [
        ("llama", 1, {"target": "dense", "tuning": TUNING, "allocation": "output"}),
        ("mixtral", 1, {"pattern": "2:4", "sparsity": None, "targets": ["experts", "lm_head"]}),
        ("gpt_neox", 1, {"ignore": "layers.1", "offload": True}),  # renamed; a dense block
        ("gemma3n_text", 1, {}),  # run again from the start
        ("llama", 1, {"bits": 4, "group_size": 16, "balance": True, "target": "dense"}),
    ],
)  # fmt: skip
def test_it_ends_with_the_bits_of_a_run_in_memory(
    family, survives, arguments, source, prune, loader, quiet, tmp_path
):
    model = source(family)
    prune(model, "whole", **arguments)
    streamed, callback = prune(model, "streamed", lm={"streaming": True}, **arguments)
    walk = "rerun" if family == "gemma3n_text" else "inject"
    assert callback.report.config["walk"] == walk
    assert_same_checkpoints(tmp_path / "streamed", tmp_path / "whole")
    assert not list(tmp_path.glob(".*"))
    assert all(p.is_meta for block in streamed.streamed.blocks.values() for p in block.parameters())

    interrupted, callback = prune(model, "resumed", survives, lm={"streaming": True}, **arguments)
    assert len(interrupted.streamed.shards) == survives
    Trainer(**quiet).predict(interrupted, loader, callbacks=[callback])  # the same model goes on
    assert callback.report.totals["resumed_blocks"] == survives
    assert_same_checkpoints(tmp_path / "resumed", tmp_path / "whole")


def test_it_is_stored_in_the_dtype_of_its_source(source, prune, tmp_path, loader, quiet):
    model = source("llama", torch.bfloat16)
    prune(model, "whole", lm={"dtype": "float32"})
    lm = {"dtype": "float32", "streaming": True}
    prune(model, "streamed", 1, lm=lm)
    module, _ = prune(model, "streamed", lm=lm)  # another process
    assert_same_checkpoints(tmp_path / "streamed", tmp_path / "whole")
    assert {t.dtype for t in tensors_of(tmp_path / "streamed").values()} == {torch.bfloat16}
    found = [
        Trainer(**quiet).test(lm, loader, verbose=False)
        for lm in (module, CausalLM(tmp_path / "whole", dtype="float32"))
    ]
    assert found[0] == found[1]  # it is read from the directory that was written


def test_the_trainers_precision_is_that_of_each_block(source, prune, tmp_path):
    model = source("llama")
    for out, lm in (("whole", {}), ("streamed", {"streaming": True})):
        module, _ = prune(model, out, lm=lm, trainer={"precision": "bf16-true"})
    assert module.model.dtype == torch.bfloat16
    assert_same_checkpoints(tmp_path / "streamed", tmp_path / "whole")


def test_a_failed_save_can_be_tried_again(source, prune, tmp_path, monkeypatch):
    model = source("llama")
    prune(model, "whole")

    def fail(*_: Any) -> None:
        raise OSError("No space left")

    with monkeypatch.context() as patch:
        patch.setattr("mrp_lightning.models.saving.os.link", fail)
        patch.setattr("mrp_lightning.models.saving.shutil.copyfile", fail)
        with pytest.raises(OSError, match="No space left"):
            prune(model, "streamed", lm={"streaming": True})
        assert not (tmp_path / "streamed").exists()
    _, callback = prune(model, "streamed", lm={"streaming": True})
    assert callback.report.totals["resumed_blocks"] == 3
    assert_same_checkpoints(tmp_path / "streamed", tmp_path / "whole")


def test_what_would_be_lost_is_refused(source, loader, quiet, tmp_path):
    module = CausalLM(source("llama"), streaming=True)
    for trainer, callback in (
        (quiet, MRPCallback(sparsity=0.5)),
        (quiet | {"fast_dev_run": True}, MRPCallback(sparsity=0.5, save_dir=tmp_path / "out")),
    ):
        with pytest.raises(OptionError, match="`streaming` keeps each block.*`save_dir`"):
            Trainer(**trainer).predict(module, loader, callbacks=[callback])
    module.head = torch.nn.Linear(2, 2)
    with pytest.raises(OptionError, match=r"weights beside it: head\.weight, head\.bias"):
        Trainer(**quiet).predict(
            module, loader, callbacks=[MRPCallback(sparsity=0.5, save_dir=tmp_path / "out")]
        )


def test_other_blocks_are_refused(source, loader, quiet, tmp_path):
    module = CausalLM(source("llama"), streaming=True)
    callback = MRPCallback(sparsity=0.5, blocks="model.layers.1.mlp", save_dir=tmp_path / "out")
    with pytest.raises(TargetError, match=r"Leave `blocks` out.*: model\.layers\.1\.mlp"):
        Trainer(**quiet).predict(module, loader, callbacks=[callback])


def test_a_dense_target_needs_blocks_that_run_on_stored_inputs(source, prune):
    with pytest.raises(TargetError, match="with `streaming` there is no dense one left"):
        prune(source("gemma3n_text"), "out", lm={"streaming": True}, target="dense")


def test_weights_that_are_not_finite_are_refused(source, prune, tmp_path):
    model = source("llama")
    (file,) = [f for f in model.glob("*.safetensors") if NAN in load_file(f)]
    weights = load_file(file)
    weights[NAN][0, 0] = float("nan")
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(TargetError, match=NAN.removesuffix(".weight") + ": 1"):
        prune(model, "out", lm={"streaming": True})


def test_several_processes_are_refused(source, tmp_path):
    module = CausalLM(source("llama"), streaming=True)
    with pytest.raises(StrategyError, match=r"Got 2. Use Trainer\(devices=1\)"):
        start_streamed(module, processes=2, is_kept=True)
    start_streamed(CausalLM(module.hparams["model"]), processes=2, is_kept=False)  # in memory


def test_a_source_that_is_replaced_meanwhile_is_not_mixed_in(source, prune, tmp_path):
    model, lm = source("llama"), {"streaming": True}
    prune(model, "whole", lm=lm)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    last = model / index["model.layers.2.mlp.up_proj.weight"]
    kept, times = last.read_bytes(), (last.stat().st_atime_ns, last.stat().st_mtime_ns)
    other = {name: tensor + 1 for name, tensor in load_file(last).items()}

    def move_over_it() -> None:
        save_file(other, tmp_path / "other", {"format": "pt"})
        os.utime(tmp_path / "other", ns=times)
        (tmp_path / "other").rename(last)

    def write_in_place() -> None:
        save_file(other, tmp_path / "other", {"format": "pt"})
        last.write_bytes((tmp_path / "other").read_bytes())

    write = Journal.write
    for number, change in enumerate((move_over_it, write_in_place, last.unlink)):

        def write_and_change(self: Journal, step: int, record: Any, change: Any = change) -> None:
            write(self, step, record)
            if step == 0:
                change()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "write", write_and_change)
            message = rf"{last} .* since the model was loaded.* load the"
            with pytest.raises(FormatError, match=message):
                prune(model, f"out-{number}", lm=lm)
        assert not (tmp_path / f"out-{number}").exists()
        last.write_bytes(kept)
    _, callback = prune(model, "out-2", lm=lm)
    assert callback.report.totals["resumed_blocks"] == 2
    assert_same_checkpoints(tmp_path / "out-2", tmp_path / "whole")
