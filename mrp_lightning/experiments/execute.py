"""Make the run of a trial as the command line would, and keep what it found."""

import gc
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import instantiate_class
from transformers.utils import logging as transformers_logging

from mrp_lightning.cli.lightning_cli import PruningCLI
from mrp_lightning.environment import machine
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.evaluation.zeroshot import Tasks, evaluate, summarize
from mrp_lightning.experiments.configuration import BAR, described
from mrp_lightning.experiments.runs import FinishedTrial
from mrp_lightning.experiments.sweep import Sweep
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.journal.journal import remove_journal
from mrp_lightning.loop import progress
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.pruning_callback import callbacks_that_prune
from mrp_lightning.loop.save_evaluation import SaveEvaluation
from mrp_lightning.models.gguf import located
from mrp_lightning.models.loading import load_config
from mrp_lightning.records.evaluation import NAME, Scores, record


class _Configured(PruningCLI):
    """A command line that has been parsed; models and data are made by `build`."""

    def instantiate_classes(self) -> None:
        """Make nothing yet: a configuration can be looked at before a model is loaded."""

    def build(self) -> None:
        """Make the trainer, the model and the data."""
        super().instantiate_classes()


def require_pruning(sweep: Sweep) -> None:
    """Refuse a configuration with nothing in it that prunes, and arguments that it does not take.

    Raises:
        OptionError: There is no callback, or an argument is out of range.
        MethodError: A method does not go with another argument.
    """
    for model in dict.fromkeys(trial.model for trial in sweep.selected if trial.method):
        if not _parse(sweep, sweep.models[model].options).config.trainer.callbacks:
            raise OptionError(
                "`base` has no callback that prunes. Add one to `trainer.callbacks`, as the last: "
                "`- class_path: callbacks.MRPCallback`."
            )
    recipes = {(t.recipe, t.setting): t for t in sweep.selected if t.recipe}
    for trial in recipes.values():
        callback = configure(trial, sweep).config.trainer.callbacks[-1]
        instantiate_class((), callback.as_dict())


def why_no_model(model: str, sweep: Sweep) -> str | None:
    """Why no run of a model of the sweep can be made, `None` if nothing speaks against it.

    Only its configuration is read: a name that gives nothing is found before any run, and once.
    """
    options = configure(Trial(model), sweep).config.model
    if "class_path" in options:
        return "`class_path`: a sweep measures perplexity. Name a language model, `model.model`."
    source = options.model
    if not isinstance(source, str):
        return None
    try:
        source = located(source, options.gguf_file, options.revision)
        load_config(source, revision=options.revision, trust_remote_code=options.trust_remote_code)
    except (FileNotFoundError, FormatError, OptionError) as error:
        return str(error)
    return None


def configure(trial: Trial, sweep: Sweep) -> _Configured:
    """The command line of a trial, parsed."""
    return _parse(sweep, sweep.options(trial))


def execute(
    trial: Trial,
    cli: _Configured,
    directory: Path,
    *,
    tasks: Tasks | None = None,
    save_checkpoint: bool = False,
) -> None:
    """Prune and evaluate one model, and write what was found into a directory.

    It keeps a journal beside the directory until all is written, and goes on with one.

    Args:
        trial: Which way to prune which model.
        cli: Its configuration; see `configure`.
        directory: Gets `pruning_report.json`, `evaluation.json`, `run.json`.
        tasks: Tasks of lm-eval, to evaluate beside perplexity.
        save_checkpoint: Whether the directory gets the pruned model, too.
    """
    config = described(cli)
    cli.config[BAR] = cli.config[BAR] is not False and sys.stdout.isatty()
    gc.collect()  # a model and its trainer hold each other: the last run's would still be there
    with _quiet():
        cli.build()
        if trial.method is not None:
            _prune(cli, directory, save_checkpoint=save_checkpoint)
        (directory / NAME).unlink(missing_ok=True)  # of a model that was here before
        cli.trainer.callbacks.append(SaveEvaluation(directory))  # type: ignore[attr-defined]
        cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
        device = cli.trainer.strategy.root_device
        zeroshot = _zeroshot(cli, tasks) if tasks else None
    record(directory, zeroshot=zeroshot)
    FinishedTrial(trial, machine(device), config).save(directory)
    remove_journal(directory)


def evaluate_again(trial: Trial, sweep: Sweep, directory: Path, tasks: Tasks) -> None:
    """Evaluate the model of a finished run on tasks, and add what is found to its evaluation.

    Args:
        trial: A trial whose model is dense, or lies in `directory`.
        sweep: The sweep that it belongs to.
        directory: The directory of its run.
        tasks: Tasks of lm-eval.
    """
    options = sweep.options(Trial(trial.model))
    if trial.method is not None:
        options |= {"model.model": str(directory), "model.gguf_file": None}
    gc.collect()
    with _quiet():
        cli = _parse(sweep, options)
        cli.build()
        zeroshot = _zeroshot(cli, tasks)
    record(directory, zeroshot=zeroshot)


def _prune(cli: _Configured, directory: Path, *, save_checkpoint: bool) -> None:
    (callback,) = callbacks_that_prune(cli.trainer)
    callback.save_dir, callback.overwrite = directory if save_checkpoint else None, True
    callback.journal_beside = directory
    cli.trainer.predict(cli.model, datamodule=cli.datamodule)
    directory.mkdir(parents=True, exist_ok=True)
    assert callback.report is not None
    callback.report.save(directory)


def _zeroshot(cli: _Configured, tasks: Tasks) -> Mapping[str, Scores]:
    model = cli.model.to(cli.trainer.strategy.root_device)  # `test` leaves it on the CPU
    assert isinstance(model, CausalLM)
    return summarize(evaluate(model.model, model.tokenizer, tasks))


def _parse(sweep: Sweep, options: Mapping[str, Any]) -> _Configured:
    arguments = [f"--config={path.absolute}" for path in sweep.base]
    arguments += [f"--{key}={_text(value)}" for key, value in options.items()]
    with _quiet():
        return _Configured(arguments, run=False)


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence what every run would say again, but for where it is."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    argv, bars = sys.argv, transformers_logging.is_progress_bar_enabled()
    sys.argv = argv[:1]  # LightningCLI warns when it is given arguments beside these
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    progress.log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        sys.argv = argv
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        progress.log.setLevel(logging.NOTSET)
        if bars:
            transformers_logging.enable_progress_bar()
