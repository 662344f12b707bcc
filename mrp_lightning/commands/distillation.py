"""One distillation from start to end: training, the best step, and the saved model."""

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from mrp_lightning.callbacks import KeepBest, KeepSparsity, SaveModel
from mrp_lightning.distillation.module import Distillation
from mrp_lightning.distillation.text import DistillationText
from mrp_lightning.errors import OptionError
from mrp_lightning.loop.trainer import Trainer
from mrp_lightning.storage.files import save_ours, save_text
from mrp_lightning.storage.json_files import as_json
from mrp_lightning.targets.blocks import find_blocks
from mrp_lightning.targets.values import pruned_layers

NAME = "distillation.json"
"""The file of `Distilled` in the directory of the distilled model."""


@dataclass(frozen=True)
class Distilled:
    """The figures of a distillation.

    Attributes:
        start: Metrics of the held-out text before it, by name: `val_kl`, `perplexity`, `teacher`
            (the teacher's perplexity) and, of several texts, each with `/text`.
        end: The same after `best_step`, whose weights are saved.
        steps: The number of optimizer steps.
        best_step: The step with the least `val_kl`.
        tokens: The number of tokens trained on.
        seconds: The duration of this run, not of those that it continues.
    """

    start: Mapping[str, float]
    end: Mapping[str, float]
    steps: int
    best_step: int
    tokens: int
    seconds: float


@dataclass(frozen=True)
class Unfinished:
    """The directory of an unfinished command, beside its result, and the options it began with.

    Attributes:
        directory: `.OUT.partial` for the result OUT; it is removed at the end.
    """

    directory: Path

    @classmethod
    def of(cls, out: Path, options: Mapping[str, Any], *, restart: bool) -> "Unfinished":
        """Return the unfinished run of these options, which may have done nothing yet.

        Raises:
            OptionError: It began with other options, and is not to be restarted.
        """
        unfinished = cls(out.with_name(f".{out.name}.partial"))
        record = unfinished.directory / "options.json"
        wanted = json.loads(json.dumps(options, default=str))
        stored = json.loads(record.read_text()) if record.is_file() else wanted
        differing = [name for name in wanted if stored.get(name) != wanted[name]]
        if differing and not restart:
            listed = ", ".join(f"--{name.replace('_', '-')}" for name in differing)
            raise OptionError(
                f"{unfinished.directory} holds an unfinished distillation with another {listed}. "
                "Give the same options to go on with it, `--restart` to begin afresh, or another "
                "`--out`."
            )
        if differing:
            shutil.rmtree(unfinished.directory)
        return unfinished

    def begin(self, options: Mapping[str, Any]) -> None:
        """Record the options."""
        save_text(self.directory / "options.json", json.dumps(options, default=str))

    def end(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory)


def needed_memory(module: Distillation, tokens: int) -> int:
    """Return about how many bytes a training step needs, beside both models.

    Trained weights have a gradient of their own width and a copy, the best so far; kept ones a
    float32 value and two moments. Of activations, the inputs and outputs of all linear layers are
    counted or, with gradient checkpointing, those of one block.

    Args:
        module: The pruned and the dense model.
        tokens: The number of tokens of a batch.
    """
    model = module.model
    tables = {id(p) for table in module.embeddings() for p in table.parameters()}
    trained = [p for p in model.parameters() if module.train_embeddings or id(p) not in tables]
    removed = sum(int((layer.view == 0).sum()) for layer in pruned_layers(model))
    kept = sum(parameter.numel() for parameter in trained) - removed
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    features = sum(sum(layer.weight.shape) for layer in linear if id(layer.weight) not in tables)
    if module.gradient_checkpointing:
        features //= max(1, len(find_blocks(model)))
    activations = tokens * features * model.dtype.itemsize
    return 2 * sum(parameter.nbytes for parameter in trained) + 12 * kept + activations


def distil(
    module: Distillation,
    data: DistillationText,
    out: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    unfinished: Path,
    precision: str = "32-true",
    accelerator: str = "auto",
    validations: int = 8,
    callbacks: Sequence[Callback] = (),
) -> Distilled:
    """Train a pruned model on all tokens of a text once, and save its best step.

    Args:
        module: The pruned and the dense model.
        data: The text, which says how many tokens are trained on.
        out: The directory of the result, which appears when it is complete.
        dtype: The type in which the weights are saved; `None` for that in which they are trained.
        overwrite: Whether a model that this package wrote to `out` is replaced.
        unfinished: A directory for the windows and the last checkpoint, with which the next call
            goes on.
        precision: The precision of the products, as Lightning names it.
        accelerator: The accelerator, as Lightning names it.
        validations: The number of times that held-out text is read, and a checkpoint is saved.
        callbacks: More callbacks, before the saving.

    Raises:
        OptionError: `tokens` is less than a step.
    """
    steps = data.steps
    every = max(1, steps // validations)
    last = unfinished / "last.ckpt"
    unfinished.mkdir(parents=True, exist_ok=True)
    data.keep = unfinished / "windows.safetensors"
    best = KeepBest()
    keep = [KeepSparsity()] if pruned_layers(module.model) else []  # a narrower model has no zeros
    trainer = Trainer(
        max_steps=steps,
        accelerator=accelerator,
        precision=precision,
        gradient_clip_val=1.0,
        callbacks=[
            *keep,
            best,
            *callbacks,
            SaveModel(out, dtype=dtype, overwrite=overwrite),
            ModelCheckpoint(
                unfinished,
                filename=last.stem,
                every_n_train_steps=every,
                enable_version_counter=False,
            ),
        ],
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    started = time.perf_counter()
    trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.is_file() else None)
    result = Distilled(
        start=best.figures_at_start or {},
        end=best.figures,
        steps=trainer.global_step,
        best_step=best.best_step,
        tokens=trainer.global_step * data.batch_size * data.sequence_length,
        seconds=time.perf_counter() - started,
    )
    save_ours(out / NAME, as_json(asdict(result)))
    return result
