"""Make the run of a trial as the command line would, and keep what it found."""

import gc
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches

from lightning.pytorch.cli import instantiate_class

from mrp_lightning.callbacks.saving import SaveEvaluation
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.errors import FormatError, OptionError
from mrp_lightning.evaluation.zeroshot import Tasks, evaluate, summarize
from mrp_lightning.experiments.configuration import Configured
from mrp_lightning.experiments.runs import FinishedTrial
from mrp_lightning.experiments.sweep import Sweep
from mrp_lightning.experiments.trials import CALLBACK, Trial
from mrp_lightning.files import output_path
from mrp_lightning.journal.journal import remove_journal
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.trainer import callbacks_that_prune
from mrp_lightning.models.gguf import located
from mrp_lightning.models.loading import load_config
from mrp_lightning.pruning.block_tuner import BlockTuning
from mrp_lightning.records.evaluation import NAME, Scores, record
from mrp_sparse.environment import machine

_BAR = "trainer.enable_progress_bar"


def require_pruning(sweep: Sweep) -> None:
    """Refuse a configuration with nothing in it that prunes, and arguments that it does not take.

    Raises:
        OptionError: There is no callback, or an argument is out of range.
        MethodError: A method does not go with another argument.
    """
    for model in dict.fromkeys(trial.model for trial in sweep.selected if trial.method):
        if not Configured(sweep.base, sweep.models[model].options).config.trainer.callbacks:
            raise OptionError(
                "`base` has no callback that prunes. Add one to `trainer.callbacks`, as the last: "
                "`- class_path: callbacks.MRPCallback`."
            )
    _require_options(sweep)
    recipes = {(t.recipe, t.setting): t for t in sweep.selected if t.recipe}
    for trial in recipes.values():
        callback = configure(trial, sweep).config.trainer.callbacks[-1]
        arguments = callback.as_dict()
        given = arguments["init_args"]
        if isinstance(given.get("tuning"), dict):  # which the command line makes one of
            given["tuning"] = BlockTuning(**given["tuning"])
        instantiate_class((), arguments)


def _require_options(sweep: Sweep) -> None:
    """Refuse to vary what no run has, such as a name that is misspelt."""
    if not sweep.vary:
        return
    pruned = next(trial for trial in sweep.selected if trial.method)
    has = configure(replace(pruned, changed=None), sweep).described()
    known = {re.sub(r"^(trainer\.callbacks)\.\d+", r"\1", key) for key in has}
    known |= {key.rpartition(".")[0] for key in known if key.count(".") > 1}  # such as a mixture
    leaves = {key.rpartition(".")[2]: key for key in sorted(known)}
    for key in sweep.vary:
        if key in known or any(key.startswith(f"{one}.") for one in known):
            continue
        near = get_close_matches(key, known, n=1, cutoff=0.8)
        near += [leaves[one] for one in get_close_matches(key.rpartition(".")[2], leaves, n=1)]
        meant = "Name one by its dotted key, such as `vary: {data.num_samples: [32, 128]}`."
        meant = f"Did you mean `{near[0]}`?" if near else meant
        raise OptionError(f"`vary`: there is no option `{key}`. {meant}")


def require_text(cli: Configured) -> None:
    """Refuse files of text that do not exist, or are none, before any run.

    Raises:
        FileNotFoundError: Files are missing; all are named.
        DataError: Files are tables, and no text.
        OptionError: Arguments contradict each other.
    """
    TextDataModule(**cli.config.data.as_dict())


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


def configure(trial: Trial, sweep: Sweep) -> Configured:
    """The configuration of the run of a trial."""
    options = sweep.options(trial)
    if trial.method is not None:
        directory = str(sweep.directory(trial))
        options[f"{CALLBACK}.save_dir"] = directory if sweep.save_checkpoints else None
        options[f"{CALLBACK}.overwrite"] = True
    return Configured(sweep.base, options)


def execute(trial: Trial, sweep: Sweep, tasks: Tasks | None = None) -> None:
    """Prune and evaluate one model, and write what was found into the directory of its run.

    That gets `pruning_report.json`, `evaluation.json`, and at last `run.json`. A journal is kept
    beside it until all is written, and gone on with. `tasks` are evaluated beside perplexity.
    """
    cli, directory = configure(trial, sweep), sweep.directory(trial)
    config = cli.described()
    cli.config[_BAR] = cli.config[_BAR] is not False and sys.stdout.isatty()
    gc.collect()  # a model and its trainer hold each other: the last run's would still be there
    with quiet_lightning():
        cli.build()
        if trial.method is not None:
            (callback,) = callbacks_that_prune(cli.trainer)
            callback.journal_beside = output_path(directory)
            cli.trainer.predict(cli.model, datamodule=cli.datamodule)
            assert callback.report is not None
            directory.mkdir(parents=True, exist_ok=True)
            callback.report.save(directory)
        (directory / NAME).unlink(missing_ok=True)  # of a model that was here before
        cli.trainer.callbacks.append(SaveEvaluation(directory))  # type: ignore[attr-defined]
        cli.trainer.test(cli.model, datamodule=cli.datamodule, verbose=False)
        device = cli.trainer.strategy.root_device
        zeroshot = _zeroshot(cli, tasks) if tasks else None
    record(directory, zeroshot=zeroshot)
    FinishedTrial(trial, machine(device), config).save(directory)
    remove_journal(directory)


def evaluate_again(trial: Trial, sweep: Sweep, tasks: Tasks) -> None:
    """Evaluate the model of a finished run on tasks, and add what is found to its evaluation.

    The model is dense, or lies in the directory of its run.
    """
    options, directory = sweep.options(Trial(trial.model)), sweep.directory(trial)
    if trial.method is not None:
        options |= {"model.model": str(directory), "model.gguf_file": None}
    gc.collect()
    with quiet_lightning():
        cli = Configured(sweep.base, options)
        cli.build()
        zeroshot = _zeroshot(cli, tasks)
    record(directory, zeroshot=zeroshot)


def _zeroshot(cli: Configured, tasks: Tasks) -> Mapping[str, Scores]:
    model = cli.model.to(cli.trainer.strategy.root_device)  # `test` leaves it on the CPU
    assert isinstance(model, CausalLM)
    return summarize(evaluate(model.model, model.tokenizer, tasks))
