"""One distillation from start to end: training, the best step, and the saved model."""

import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch import Trainer as LightningTrainer
from lightning.pytorch.callbacks import ModelCheckpoint

from mrp_lightning.callbacks import KeepBest, KeepSparsity, PruningCallback, SaveModel
from mrp_lightning.commands.command import unfinished_directory
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.devices import available_memory
from mrp_lightning.distillation.module import Distillation, needed_disk, needed_memory
from mrp_lightning.distillation.text import DistillationText
from mrp_lightning.environment import progress_log as log
from mrp_lightning.errors import OptionError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.trainer import Trainer
from mrp_lightning.records.report import NAME as NAME_OF_REPORT
from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.arithmetic import has_bfloat16_units
from mrp_lightning.storage.files import save_text
from mrp_lightning.storage.json_files import as_json
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.targets.blocks import LEAST_SPARSITY, pruned_layers
from mrp_lightning.text.mixture import beside_files

LENGTH, BATCH_SIZE = 512, 2
"""The default tokens of a window, and windows of a step."""
NAME = "distillation.json"
"""The file of `Distilled` in the directory of the distilled model."""
_WINDOWS = "windows.safetensors"
"""The file of an unfinished run for its text."""
_TOLERANCE = 1e-2
"""The relative distance to the optimal loss of a layer at which its compensation stops: training
moves the kept weights much farther."""
_SHARE = 0.9
"""The share of the available memory to fill: torch's allocator and files need some, too."""


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


def state_of_model(model: str | Path) -> list[list[Any]]:
    """Return the `state_of` the files that decide a model: empty for a hub id."""
    path = Path(model).expanduser()
    kinds = ("*.safetensors", "*.bin", "*.gguf", "config.json", "tokenizer.json")
    return state_of([path, *(file for kind in kinds for file in sorted(path.glob(kind)))])


def state_of(files: Iterable[Path]) -> list[list[Any]]:
    """Return name, size and time of the last change of each file, by which a change is noticed."""
    stats = [(file.name, file.stat()) for file in files if file.is_file()]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


@dataclass(frozen=True)
class Unfinished:
    """The directory of an unfinished command, `.OUT.distilling`, and the options it began with."""

    directory: Path
    options: Mapping[str, Any]  # by their names on the command line

    @classmethod
    def of(cls, out: Path, options: Mapping[str, Any], *, restart: bool) -> "Unfinished":
        """Return the unfinished run of these options, which may have done nothing yet.

        With `restart` the files of an unfinished run, of any options, are removed first.

        Raises:
            OptionError: It began with other options, and `restart` is false.
        """
        wanted = json.loads(json.dumps(options, default=str))
        unfinished = cls(unfinished_directory(out), wanted)
        record = unfinished.directory / "options.json"
        stored = json.loads(record.read_text()) if record.is_file() else wanted
        differing = [name for name in wanted if stored.get(name) != wanted[name]]
        if differing and not restart:
            raise OptionError(
                f"{unfinished.directory} holds an unfinished distillation with another "
                f"{', '.join(differing)}. Give the same options to go on with it, `--restart` to "
                "begin afresh, or another `--out`."
            )
        if restart and unfinished.directory.is_dir():
            shutil.rmtree(unfinished.directory)
        return unfinished

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Record the options for a context, and remove the directory at its end.

        After an error the directory stays, unless no work was done that the next run could use.
        """
        record = self.directory / "options.json"
        save_text(record, as_json(self.options))
        try:
            yield
        except BaseException:
            if not any(file.is_file() and file != record for file in self.directory.rglob("*")):
                shutil.rmtree(self.directory)
            raise
        shutil.rmtree(self.directory)


def distil(
    module: Distillation,
    data: DistillationText,
    out: Path,
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    unfinished: Path,
    precision: str,
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
        OptionError: `tokens` is less than a step, the disk has too little room for checkpoints, or
            so little of a layer is removed that `KeepSparsity` would not keep it.
    """
    steps = data.steps
    result = sum(parameter.nbytes for parameter in module.model.parameters())
    num_bytes = needed_disk(module) + result
    check_output_dir(out, overwrite=overwrite, argument="--out", num_bytes=num_bytes)
    every = max(1, steps // validations)
    last = unfinished / "checkpoint" / "last.ckpt"
    unfinished.mkdir(parents=True, exist_ok=True)
    data.keep = data.keep or unfinished / _WINDOWS
    best = KeepBest(file=unfinished / "best")
    pruned = {layer.name for layer in pruned_layers(module.model)}
    report = PruningReport.load(Path(module.model.name_or_path) / NAME_OF_REPORT)
    filled = [row.name for row in report.pruned if row.num_removed and row.name not in pruned]
    if filled and not report.narrowed:
        raise OptionError(
            f"{counted(len(filled), 'layer')} ({filled[0]}, …) lost fewer than "
            f"{LEAST_SPARSITY:.0%} of the weights, which training would fill. Prune more of each."
        )
    keep = [KeepSparsity()] if pruned else []  # a narrower model has no zeros
    saved = _SaveDistilled(best, data, save_dir=out, dtype=dtype, overwrite=overwrite)
    trainer = Trainer(
        max_epochs=1,
        max_steps=steps,
        accelerator=accelerator,
        precision=precision,
        gradient_clip_val=1.0,
        callbacks=[
            *keep,
            best,
            *callbacks,
            saved,
            # After each validation, whose step may be the best.
            ModelCheckpoint(
                last.parent,
                filename=last.stem,
                save_on_train_epoch_end=False,
                enable_version_counter=False,
            ),
        ],
        val_check_interval=every,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=-1,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
        log_every_n_steps=1,
    )
    trainer.fit(module, datamodule=data, ckpt_path=str(last) if last.is_file() else None)
    return saved.result


class _SaveDistilled(SaveModel):
    """Save the model and, in one step, so that a killed run leaves both or none, its figures.

    Attributes:
        result: The figures, once the model is saved.
    """

    result: Distilled

    def __init__(self, best: KeepBest, data: DistillationText, **options: Any) -> None:
        super().__init__(**options)
        self._best, self._data, self._started = best, data, time.perf_counter()

    def texts(self, trainer: LightningTrainer) -> Mapping[str, str]:
        """Return `distillation.json`."""
        steps, data = trainer.global_step, self._data
        self.result = Distilled(
            start=self._best.figures_at_start or {},
            end=self._best.figures,
            steps=steps,
            best_step=self._best.best_step,
            tokens=steps * data.batch_size * data.sequence_length,
            seconds=time.perf_counter() - self._started,
        )
        return {NAME: as_json(asdict(self.result))}


def training_device(accelerator: str) -> torch.device:
    """Return the kind of device, CPU or GPU, that an accelerator's name stands for here."""
    is_gpu = torch.cuda.is_available() and accelerator in ("auto", "gpu", "cuda")
    return torch.device("cuda" if is_gpu else "cpu")


def fast_precision(accelerator: str) -> str:
    """Return the faster precision of products; weights and their updates are float32 in both."""
    is_fast = has_bfloat16_units(training_device(accelerator))
    return "bf16-mixed" if is_fast else "32-true"


def dense_dtype(precision: str) -> str | None:
    """Return the type of the dense model's weights, `None` for that of its checkpoint."""
    # Mixed products would round them so in any case, and own text is written faster.
    return "bfloat16" if precision == "bf16-mixed" else None


def fit_memory(
    module: Distillation, tokens: int, *, precision: str, accelerator: str
) -> tuple[str, bool]:
    """Return a sentence on the memory that steps of `tokens` need, and whether it is available.

    Activations are computed again in the backward pass where they would not fit.
    """
    needed, device = needed_memory(module, tokens, precision), training_device(accelerator)
    available = available_memory(device)
    if device.type == "cuda" and available is not None:  # both models come there
        models = (module.model, module.teacher.model)
        available -= sum(p.nbytes for model in models for p in model.parameters())
    if available is None or needed <= _SHARE * available:
        return f"Training needs about {needed / 2**30:.1f} GiB beside the two models.", True
    module.gradient_checkpointing = True
    fewer = needed_memory(module, tokens, precision)
    sentence = (
        f"Training needs about {needed / 2**30:.1f} GiB beside the two models, or "
        f"{fewer / 2**30:.1f} with activations that are computed again, as they will be; "
        f"{available / 2**30:.1f} are available."
    )
    return sentence, fewer <= _SHARE * available


@dataclass(frozen=True)
class DistilledPruning:
    """A pruning with a distillation of what it keeps, before anything is rounded to few bits.

    One text serves all steps: pruning and rounding are calibrated on the windows trained on. A
    dense target and tuning are those of the rounding.
    """

    prune: PruningCallback  # with all settings; its `save_dir` gets the result
    teacher: Mapping[str, Any]  # the arguments of `CausalLM` for the dense model
    files: Sequence[str] | None  # to distil on; `None` for text of the teacher's own alone
    text: Mapping[str, Any]  # more arguments of the `DistillationText`, and the share of own text
    tokens: int
    moment_bits: int  # as of `Distillation`
    unfinished: Unfinished
    accelerator: str

    def data(self, calibration: TextDataModule) -> DistillationText:
        """Return the text to distil on, in windows that are no longer than the calibration's.

        Of it, `predict` reads at most as many tokens as the calibration has.
        """
        length, text = min(LENGTH, calibration.sequence_length), dict(self.text)
        own = text.pop("own", None)
        return DistillationText(
            self.files,
            calibration=None if own is None else beside_files(own),
            tokens=self.tokens,
            sequence_length=length,
            num_samples=calibration.num_samples * calibration.sequence_length // length,
            batch_size=BATCH_SIZE,
            keep=self.unfinished.directory / _WINDOWS,
            **text,
        )

    def check(self, model: LightningModule, calibration: TextDataModule) -> None:
        """Raise an OptionError for a model that predicts no next token, and for too few tokens."""
        if not isinstance(model, CausalLM):
            raise OptionError(
                "the model predicts no next token, and distillation trains that prediction. Leave "
                "it out.",
                "tokens",
            )
        self.data(calibration).steps  # noqa: B018  (raises)

    def pruning(self) -> PruningCallback:
        """Return the callback that prunes alone; its `report` is there if it is done already."""
        pruned = self._pruned
        settings = self.prune.settings.without_grids()
        # Distillation gains what the first two do before it; rounding, after it, needs them.
        settings |= {"target": "own", "tuning": False}
        if self.prune.settings.structure is None:
            settings["tolerance"] = settings["tolerance"] or _TOLERANCE
        alone = PruningCallback(save_dir=pruned, resume=self.prune.resume, **settings)
        if pruned.is_dir():  # it appears when it is complete
            alone.report = PruningReport.load(pruned / NAME_OF_REPORT)
        return alone

    @property
    def _pruned(self) -> Path:
        """The directory of the pruning alone."""
        return self.unfinished.directory / "pruned"

    def load(self, directory: Path) -> CausalLM:
        """Load a result of the steps as the dense model is loaded."""
        return CausalLM(directory, trust_remote_code=self.teacher["trust_remote_code"])

    def finish(self, source: CausalLM, trainer: Trainer, data: DistillationText) -> CausalLM:
        """Distil the pruned model, and put it on the grid of the settings; return the result."""
        assert self.prune.save_dir is not None
        log.info("Distilling on %s tokens, towards %s …", f"{self.tokens:,}", self.teacher["model"])
        settings = self.prune.settings
        is_rounded = bool(settings.recipe.grids)
        out = self.unfinished.directory / "distilled" if is_rounded else self.prune.save_dir
        dtype = str(source.model.dtype).removeprefix("torch.")
        name = PruningReport.load(self._pruned / NAME_OF_REPORT).config.get("base_model")
        if not (is_rounded and out.is_dir()):
            precision = fast_precision(self.accelerator)
            narrow = dense_dtype(precision) or self.teacher["dtype"]
            teacher = CausalLM(**{**self.teacher, "dtype": narrow})
            module = Distillation(source, teacher, dtype="float32", moment_bits=self.moment_bits)
            memory, _ = fit_memory(
                module,
                data.batch_size * data.sequence_length,
                precision=precision,
                accelerator=self.accelerator,
            )
            log.info(memory)
            distil(
                module,
                data,
                out,
                dtype=dtype,
                overwrite=self.prune.overwrite,
                unfinished=self.unfinished.directory / "training",
                precision=precision,
                accelerator=self.accelerator,
            )
        model = self.load(out)
        if is_rounded:
            # The result is one pruning of the dense model; the steps between are not kept.
            model.model.name_or_path = model.model.config.name_or_path = name or ""
            trainer.predict(model, datamodule=data, callbacks=[self.prune])
        return model
