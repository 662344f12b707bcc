"""Execute the runs of a sweep as the command line would, and resume interrupted ones."""

import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from jsonargparse import Namespace
from jsonargparse.typing import Path_fr
from lightning.pytorch.cli import LightningArgumentParser, instantiate_class

from mrp_lightning.callbacks.saving import SaveEvaluation
from mrp_lightning.commands.lightning_cli import PruningCLI
from mrp_lightning.commands.zeroshot import Tasks, evaluate, load_tasks, summarize
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.devices import machine
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.errors import ArgumentError, DataError, FormatError, OptionError
from mrp_lightning.experiments.design import Sweep
from mrp_lightning.experiments.runs import TRIAL, FinishedTrial, RunDirectory, read_run
from mrp_lightning.experiments.scores import scores_of
from mrp_lightning.experiments.trials import CALLBACK, Trial
from mrp_lightning.journal.journal import remove_journal
from mrp_lightning.journal.manifest import differences
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.trainer import callbacks_that_prune
from mrp_lightning.models.checkpoint import directory_of, weight_files
from mrp_lightning.models.gguf import located
from mrp_lightning.models.locations import find_gguf, require_model
from mrp_lightning.pruning.settings import BlockTuning
from mrp_lightning.records.evaluation import NAME, read, record
from mrp_lightning.records.report import NAME as REPORT
from mrp_lightning.storage.files import output_path, sha256_of
from mrp_lightning.storage.outputs import check_content, require_writable
from mrp_lightning.terminal import Console

_BAR = "trainer.enable_progress_bar"
_BESIDE_WEIGHTS = ("config.json", "*token*", "vocab*", "merges.txt", "*.model", "*.py")
"""Files that decide what a model computes, or its tokens. Cards and results may change."""


class RunConfiguration(PruningCLI):
    """The configuration of a run, read as a command line; `build` makes trainer, model and data.

    Args:
        files: The configurations, as `--config` takes them.
        options: Values by dotted key, which come after the files. A key through a list sets the
            list's last item.
    """

    _parsers: ClassVar[dict[Any, LightningArgumentParser]] = {}

    def __init__(self, files: Sequence[Path_fr], options: Mapping[str, Any]) -> None:
        words = [f"--config={file.absolute}" for file in files]
        for key, value in options.items():
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            words.append(f"--{key}={text}")
        with quiet_lightning():
            super().__init__(words, run=False)

    def setup_parser(self, *options: Any) -> None:
        """Make the parser once for all runs of a sweep: it takes longer than to read them."""
        classes = self.model_class, self.datamodule_class
        if classes not in self._parsers:
            super().setup_parser(*options)
            self._parsers[classes] = self.parser
        self.parser = self._parsers[classes]

    def instantiate_classes(self) -> None:
        """Do nothing: `build` instantiates, so that a configuration can be read without a model."""

    def build(self) -> None:
        """Instantiate the trainer, the model and the data."""
        super().instantiate_classes()

    def described(self) -> dict[str, Any]:
        """Return the configuration by dotted key, defaults included."""
        text = self.parser.dump(self.config, format="json", skip_unset=False)
        return dict(_flat(json.loads(text)))


def configure(trial: Trial, sweep: Sweep) -> RunConfiguration:
    """Return the configuration of the run of a trial."""
    options = sweep.options(trial)
    if trial.method is not None:
        directory = str(sweep.directory(trial))
        options[f"{CALLBACK}.save_dir"] = directory if sweep.save_checkpoints else None
        options[f"{CALLBACK}.overwrite"] = True
    return RunConfiguration(sweep.base, options)


def make_runs(sweep: Sweep, console: Console) -> dict[Trial, str]:
    """Execute the runs that do not exist yet; return the failed trials, with the reasons.

    Raises:
        OptionError: A finished run is of another configuration, or lacks a task.
        FileNotFoundError: A text that a run would read is not there.
        FileExistsError: A file is in the way of the directory of a run, or would be lost with it.
        FormatError: A finished run lacks its report or evaluation, or one of these is damaged.
    """
    # All checks come first: they cost seconds, and a run may take hours.
    _check_pruning(sweep)
    finished = _finished_runs(sweep, sweep.selected)
    for trial in finished:
        remove_journal(sweep.directory(trial))  # of a process that was killed as it ended
    _check_same_configurations(sweep, finished)
    waiting = [trial for trial in sweep.selected if trial not in finished]
    lacking = not all(
        set(sweep.zeroshot) <= {*run.evaluation.zeroshot} for run in finished.values()
    )
    tasks = _tasks(sweep, finished) if sweep.zeroshot and (waiting or lacking) else None
    _check_inputs_and_outputs(sweep, waiting)
    console.print(f"{len(sweep.selected)} runs, of which {len(waiting)} are to be made.")
    without = [run.name for trial, run in finished.items() if trial.method and not run.weight_bytes]
    if sweep.save_checkpoints and without:
        console.print(
            "Finished without keeping the model, since `save_checkpoints` was false: "
            f"{', '.join(without)}. Delete these runs to repeat them.",
            soft_wrap=True,
        )
    failed = {}
    for number, trial in enumerate(waiting, start=1):
        position = f"[{number}/{len(waiting)}]"
        console.print(f"{position} {trial.directory} …", soft_wrap=True)
        try:
            if not (sweep.directory(trial) / TRIAL).exists():  # another process may have made it
                execute(trial, sweep, tasks)
            rows = scores_of(read_run(sweep.directory(trial), str(trial.directory)))
            scores = [f"{row['score']} {row['score'].write(row['value'])}" for row in rows]
            result = f"{trial.directory}: {', '.join(scores)}"
        except Exception as error:
            # Hours of other runs should not be lost; the command ends with an error.
            failed[trial] = f"{type(error).__name__}: {error}"
            result = f"{trial.directory} failed: {error}"
        console.print(f"{position} {result}", soft_wrap=True)
    return failed


def _check_inputs_and_outputs(sweep: Sweep, waiting: Sequence[Trial]) -> None:
    """Raise if a run cannot write its directory, would evaluate nothing, or lacks its texts."""
    for trial in waiting:  # files in the way of a directory would be met after the run
        require_writable(sweep.directory(trial), "out")
        if sweep.save_checkpoints and trial.method is not None:
            check_content(output_path(sweep.directory(trial)), "out", overwrite=True)
    # One trial for each model and varied option: trials that differ otherwise read the same files.
    for trial in {(t.model, t.changed and t.changed.key): t for t in waiting}.values():
        config = configure(trial, sweep).config
        _check_batches(config.trainer)
        if "class_path" in config.model:
            raise OptionError(
                "`class_path`: a sweep measures perplexity. Name a language model, `model.model`."
            )
        if isinstance(config.model.model, str):
            require_model(config.model.model)
        data = TextDataModule(**config.data.as_dict())  # refuses missing files
        data.local_files("test")
        if trial.method is not None:
            data.local_files("predict")


def comparable_runs(sweep: Sweep, console: Console) -> list[RunDirectory]:
    """Return the finished runs of this configuration, and of the files as they are now."""
    runs = _finished_runs(sweep, sweep.trials)
    # The selected ones, too: a text may have been replaced while other runs were made.
    stale = [trial for trial, run in runs.items() if _difference(sweep, trial, run)]
    if stale:
        names = ", ".join(runs[trial].name for trial in stale)
        console.print(
            f"Left out, as made with another configuration or other files: {names}.", soft_wrap=True
        )
    return [run for trial, run in runs.items() if trial not in stale]


def execute(trial: Trial, sweep: Sweep, tasks: Tasks | None = None) -> None:
    """Prune and evaluate one model, and write the results into the directory of its run.

    The results are `pruning_report.json`, `evaluation.json`, and at last `run.json`. A journal is
    kept next to the directory until all is written, and resumed. `tasks` are evaluated in addition
    to perplexity.

    Raises:
        DataError: `test` measured no perplexity.
    """
    cli, directory = configure(trial, sweep), sweep.directory(trial)
    config, inputs = cli.described(), digests(cli.config, prunes=trial.method is not None)
    cli.config[_BAR] = cli.config[_BAR] is not False and sys.stdout.isatty()
    gc.collect()  # a model and its trainer hold each other: the last run's would still be there
    with quiet_lightning():
        cli.build()
        if trial.method is not None:
            (callback,) = callbacks_that_prune(cli.trainer)
            # The journal stays until the evaluation is written, too: a run that dies in between
            # resumes with pruned blocks and only evaluates.
            callback.run_directory = output_path(directory)
            cli.trainer.predict(cli.model, datamodule=cli.datamodule)
            assert callback.report is not None
            directory.mkdir(parents=True, exist_ok=True)
            callback.report.save(directory)
        (directory / NAME).unlink(missing_ok=True)  # of a model that was here before
        cli.trainer.callbacks.append(SaveEvaluation(directory))  # type: ignore[attr-defined]
        cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
        device = cli.trainer.strategy.root_device
        zeroshot = None
        if tasks is not None:
            model = cli.model.to(device)  # `test` leaves it on the CPU
            assert isinstance(model, CausalLM)
            zeroshot = summarize(evaluate(model, tasks))
    record(directory, zeroshot=zeroshot)
    if not read(directory).perplexity:
        raise DataError("`test` gave no perplexity, which each row of the tables has.")
    # A run is finished if this file is there, so it is the last. The journal outlives it for a
    # moment: a run that dies before is resumed, not repeated.
    FinishedTrial(trial, machine(device), config, inputs).save(directory)
    remove_journal(directory)


def _tasks(sweep: Sweep, finished: Mapping[Trial, RunDirectory]) -> Tasks:
    """Load the tasks of a sweep."""
    try:
        tasks = load_tasks(sweep.zeroshot, include_path=sweep.include_path)
    except ArgumentError as error:
        if error.argument == "tasks":
            error.argument = "zeroshot"
        raise
    checksums = tasks.checksums()
    other = [
        f"{run.name} ({', '.join(names)})"
        for run in finished.values()
        if (names := [
            name
            for name in tasks.by_name
            if name not in run.evaluation.zeroshot
            or run.evaluation.zeroshot[name].get("checksum") not in (None, checksums.get(name))
        ])
    ]  # fmt: skip
    if other:
        raise OptionError(
            f"`zeroshot`: {sweep.out} holds runs without these tasks, or with other samples or "
            f"prompts of them: {', '.join(other)}. Name another `out`, or delete these runs to "
            "repeat them; `mrp-lightning zeroshot --model RUN` adds tasks to a model that was kept."
        )
    return tasks


def _finished_runs(sweep: Sweep, trials: Sequence[Trial]) -> dict[Trial, RunDirectory]:
    """Return the finished runs, in the order of their trials."""
    finished = [trial for trial in trials if (sweep.directory(trial) / TRIAL).exists()]
    for trial in finished:
        directory = sweep.directory(trial)
        names = [NAME] if trial.method is None else [REPORT, NAME]
        if missing := [name for name in names if not (directory / name).exists()]:
            raise FormatError(
                f"{directory} is a finished run without {' and '.join(missing)}. Delete {TRIAL} "
                "there to make the run again."
            )
    return {trial: read_run(sweep.directory(trial), str(trial.directory)) for trial in finished}


def _difference(sweep: Sweep, trial: Trial, run: RunDirectory) -> str:
    """Describe how configuration or files of a run differ from the sweep's; "" if they do not."""
    if run.finished is None:
        return ""
    configuration, recorded = configure(trial, sweep), run.finished.inputs
    difference = "; ".join(differences(run.finished.config, configuration.described()))
    # Other options name other files, which would be a second message on one cause.
    if difference or not recorded:
        return difference
    present = digests(configuration.config, prunes=trial.method is not None)
    changed = [name for name, digest in recorded.items() if present.get(name, digest) != digest]
    return f"other files of {' and '.join(changed)}" if changed else ""


def _check_pruning(sweep: Sweep) -> None:
    """Raise an `OptionError` if nothing prunes, or a recipe, an option or a value is wrong."""
    for model in dict.fromkeys(trial.model for trial in sweep.selected if trial.method):
        config = RunConfiguration(sweep.base, sweep.models[model].options).config
        callbacks = config.trainer.callbacks or []
        callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
        # The configuration holds paths of classes: a callback that prunes has these arguments.
        prune = [{"sparsity", "pattern"} <= {*one.get("init_args", {}).keys()} for one in callbacks]
        if sum(prune) != 1 or not prune[-1]:
            names = ", ".join(one.class_path for one in callbacks) or "none"
            raise OptionError(
                "`base`: the last of `trainer.callbacks`, and no other, prunes with the settings "
                f"of `runs`: `- class_path: callbacks.MRPCallback`. There are {names}."
            )
    # Other trials have only arguments that `Sweep` checks by itself.
    arguments_of = {
        (t.recipe, t.setting, t.changed): t for t in sweep.selected if t.recipe or t.changed
    }
    for trial in arguments_of.values():
        callback = configure(trial, sweep).config.trainer.callbacks[-1].as_dict()
        arguments = callback["init_args"]
        if isinstance(arguments.get("tuning"), dict):  # as the command line parses it
            arguments["tuning"] = BlockTuning(**arguments["tuning"])
        instantiate_class((), callback)


def _check_batches(trainer: Namespace) -> None:
    """Raise an `OptionError` if a run would prune or evaluate nothing, and count as finished."""
    limits = ("limit_predict_batches", "limit_test_batches")
    wrong = [f"`trainer.{name}` is 0" for name in limits if trainer.get(name) == 0]
    if trainer.get("fast_dev_run"):
        wrong = ["`trainer.fast_dev_run` makes no result"]
    if wrong:
        raise OptionError(
            f"{' and '.join(wrong)}, so that runs would have no figures. Leave it out; for a short "
            "trial, set `data.num_samples` and `trainer.limit_test_batches` to a few."
        )


def _check_same_configurations(sweep: Sweep, finished: Mapping[Trial, RunDirectory]) -> None:
    differing: dict[str, list[str]] = {}
    for trial, run in finished.items():
        if difference := _difference(sweep, trial, run):
            differing.setdefault(difference, []).append(run.name)
    if differing:
        listed = "; and ".join(
            f"{difference} ({', '.join(names)})" for difference, names in differing.items()
        )
        raise OptionError(
            f"`out`: {sweep.out} holds runs with another configuration: {listed}. "
            "Name another directory, or delete these runs to repeat them."
        )


def _flat(values: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings, and of lists of mappings, by dotted key."""
    if isinstance(values, list) and any(isinstance(value, dict) for value in values):
        # Lists of mappings, such as callbacks, are taken apart by index, so that a difference names
        # one argument, and not the whole list.
        values = dict(enumerate(values))
    if not isinstance(values, dict) or not values:
        yield key, values
        return
    for name, value in values.items():
        yield from _flat(value, f"{key}.{name}" if key else name)


def digests(config: Any, *, prunes: bool) -> dict[str, str]:
    """Return a SHA-256 by input (`the model`, `the tokenizer`, `the evaluation text`, …) of a run.

    Inputs without files on this machine are left out: texts of the hub, whose revision is fixed, a
    text that the model writes, and files that do not exist (any more).

    Args:
        config: The configuration of the run, as `RunConfiguration.config`.
        prunes: Whether the run reads calibration text.
    """

    def texts(stage: str) -> list[Path]:
        return TextDataModule(**config.data.as_dict()).local_files(stage)

    inputs: dict[str, Callable[[], Iterable[Path]]] = {
        "the model": lambda: _model_files(config.model),
        "the evaluation text": lambda: texts("test"),
    }
    if prunes:
        inputs["the calibration text"] = lambda: texts("predict")
    if config.data.tokenizer is not None:
        inputs["the tokenizer"] = lambda: _beside_weights(Path(config.data.tokenizer).expanduser())
    by_name = {}
    for name, files in inputs.items():
        with suppress(FileNotFoundError, DataError, FormatError, OptionError):
            stats = [(file, file.stat()) for file in files()]
            if checksums := [_checksum(f, s.st_size, s.st_mtime_ns) for f, s in stats]:
                by_name[name] = hashlib.sha256("\n".join(checksums).encode()).hexdigest()
    return by_name


def _model_files(options: Any) -> list[Path]:
    """Return the files of a model and of its tokenizer, on this machine or in the hub's cache.

    Args:
        options: The options `model`, `gguf_file` and `revision` of a `CausalLM`.
    """
    source = located(options.model, options.gguf_file, options.revision)
    if (file := find_gguf(source)) is not None:
        return [file]
    directory = directory_of(source, options.revision)
    return [] if directory is None else [*weight_files(directory), *_beside_weights(directory)]


def _beside_weights(directory: Path) -> list[Path]:
    files = {file for pattern in _BESIDE_WEIGHTS for file in directory.glob(pattern)}
    return sorted(file for file in files if file.is_file())


@cache  # size and time of change are a part of the key: a file that was replaced is read again
def _checksum(file: Path, size: int, changed: int) -> str:  # noqa: ARG001
    return sha256_of(file)
