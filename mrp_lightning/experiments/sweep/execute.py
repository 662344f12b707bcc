"""Make the runs of a sweep, each as the command line would, and keep what each gave."""

import gc
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from transformers.utils import logging as transformers_logging

from mrp_lightning.environment import machine
from mrp_lightning.errors import OptionError
from mrp_lightning.evaluation.records import record
from mrp_lightning.evaluation.zeroshot import Tasks, evaluate, summarize
from mrp_lightning.experiments.sweep.plan import Plan, Run
from mrp_lightning.files import as_json, save_text
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.cli import PruningCLI
from mrp_lightning.pruning.report import PruningReport

NAME = "run.json"
"""Written last: a directory that has it holds a finished run."""


class _Configured(PruningCLI):
    """A command line that has been parsed; models and data are made by `build`."""

    def instantiate_classes(self) -> None:
        """Later."""

    def build(self) -> None:
        """Make the trainer, the model and the data."""
        super().instantiate_classes()


@runtime_checkable
class _Pruning(Protocol):
    """What is needed of a `PruningCallback`, which belongs to another package."""

    report: PruningReport | None
    save_dir: str | PathLike[str] | None
    overwrite: bool


def stored_config(directory: Path) -> dict[str, Any] | None:
    """The configuration of the finished run in a directory; `None` if there is none."""
    path = directory / NAME
    return json.loads(path.read_text("utf-8"))["config"] if path.exists() else None


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What two configurations do not share, such as "`data.num_samples` was 4, is 5"."""
    changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return "; ".join(f"`{key}` was {before.get(key)}, is {now.get(key)}" for key in changed)


def require_pruning(model: str, plan: Plan, config: Sequence[Path]) -> None:
    """Refuse a configuration with nothing in it that prunes.

    Raises:
        OptionError: There is no callback.
    """
    if not _parse(config, plan.models[model].options).config.trainer.callbacks:
        raise OptionError(
            "`base` has no callback that prunes. Add one to `trainer.callbacks`, as the last: "
            "`- class_path: callbacks.MRPCallback`."
        )


def configure(run: Run, plan: Plan, config: Sequence[Path]) -> _Configured:
    """The command line of a run, parsed."""
    return _parse(config, plan.models[run.model].options | run.options())


def _parse(config: Sequence[Path], options: Mapping[str, Any]) -> _Configured:
    arguments = [f"--config={path}" for path in config]
    arguments += [f"--{key}={_text(value)}" for key, value in options.items()]
    with _quiet():
        return _Configured(arguments, run=False)


def execute(
    run: Run,
    cli: _Configured,
    directory: Path,
    *,
    tasks: Tasks | None = None,
    save_checkpoint: bool = False,
) -> None:
    """Prune and evaluate one model, and write what it gave into a directory.

    Args:
        run: Which one.
        cli: Its configuration; see `configure`.
        directory: Gets `pruning_report.json`, `evaluation.json`, `run.json`.
        tasks: Of lm-eval, to evaluate beside perplexity.
        save_checkpoint: Whether it gets the pruned model, too.
    """
    config = described(cli)
    gc.collect()  # a model and its trainer hold each other: the last run's would still be there
    with _quiet():
        cli.build()
        if run.method is not None:
            _prune(cli, directory, save_checkpoint=save_checkpoint)
        cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
        assert isinstance(cli.model, CausalLM)
        device = cli.trainer.strategy.root_device
        zeroshot = None
        if tasks is not None:
            model = cli.model.to(device).model  # `test` left it on the CPU
            zeroshot = summarize(evaluate(model, cli.model.tokenizer, tasks))
    record(directory, perplexity=cli.model.evaluation, zeroshot=zeroshot)
    content = {
        "format_version": 1,
        "run": asdict(run),
        "machine": machine(device),
        "config": config,
    }
    save_text(directory / NAME, as_json(content))


def described(cli: _Configured) -> dict[str, Any]:
    """What decides the result: the configuration by dotted key, defaults included."""
    return dict(_flatten(json.loads(cli.parser.dump(cli.config, format="json"))))


def _prune(cli: _Configured, directory: Path, *, save_checkpoint: bool) -> None:
    callbacks: list[Any] = cli.trainer.callbacks  # type: ignore[attr-defined]
    (callback,) = [c for c in callbacks if isinstance(c, _Pruning)]
    callback.save_dir, callback.overwrite = directory if save_checkpoint else None, True
    cli.trainer.predict(cli.model, datamodule=cli.datamodule)
    directory.mkdir(parents=True, exist_ok=True)
    assert callback.report is not None
    callback.report.save(directory)


def _flatten(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(values, dict) and values:
        for key, value in values.items():
            yield from _flatten(value, f"{prefix}.{key}" if prefix else key)
    elif isinstance(values, list) and any(isinstance(value, dict) for value in values):
        for index, value in enumerate(values):
            yield from _flatten(value, f"{prefix}.{index}")
    elif values is not None:  # a new option that is not used is no other configuration
        yield prefix, values


def _text(value: Any) -> str:
    """A value as the command line takes it."""
    return value if isinstance(value, str) else json.dumps(value)


@contextmanager
def _quiet() -> Iterator[None]:
    """What every run would say again: a sweep shows its own progress."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    argv, bars = sys.argv, transformers_logging.is_progress_bar_enabled()
    sys.argv = argv[:1]  # LightningCLI warns when it is given arguments beside these
    transformers_logging.disable_progress_bar()
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*")
            yield
    finally:
        sys.argv = argv
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()
