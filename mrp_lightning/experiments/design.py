"""The design of a sweep: trials that compare models, settings, methods and options."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from jsonargparse.typing import Path_fr

from mrp_lightning.errors import MethodError, OptionError
from mrp_lightning.experiments.trials import (
    CALLBACK,
    ChangedOption,
    Trial,
    has_blocks,
    parse_setting,
    sees_inputs,
)
from mrp_lightning.solver.arguments import method_parts


@dataclass(frozen=True)
class ModelTrials:
    """One model of a sweep.

    Args:
        options: Options that replace those of the configuration, by dotted key, such as
            `model.model`.
        block_sizes: Block sizes in columns, for each of which every trial is repeated; `null` means
            all columns.
        runs: Methods and recipes in place of those of the sweep.
    """

    options: dict[str, Any]
    block_sizes: list[int | None] = field(default_factory=lambda: [128])
    runs: dict[str, list[str]] | None = None


@dataclass(kw_only=True)
class Sweep:
    """Prune models in many ways, evaluate each result, and compare.

    Every run is equivalent to `predict` and `test` with the configuration `base`, the options of
    the model, and those of the trial. Its results are in `<out>/<model>/<trial>`; existing runs are
    not repeated. The tables are `<out>/results.{md,csv}`.

    Args:
        base: Configurations that all trials share, as `predict --config` takes them; the last of
            `trainer.callbacks` prunes.
        models: The models, by their names in tables.
        runs: The methods and recipes at each setting: a percentage ("50%") or a pattern ("2:4"),
            quoted, either of them with bits ("2:4+4bit"), or bits alone ("4bit").
        recipes: Arguments of the pruning callback, by the name that `runs` and tables use: `method`
            and any others except the setting, such as
            `{method: JM, target: dense, tuning: {epochs: 15}}`.
        out: Directory of the runs and their tables.
        seeds: Seeds of calibration sets, for each of which every trial is repeated.
        vary: Ablations: the values of one option at a time, by its dotted key, such as
            `{data.num_samples: [32, 128]}`. If given, only these trials are executed.
        only: Names of the runs to make, `<model>/<trial>` with shell wildcards, such as
            `*/2of4-SM-*`. If it is empty, all runs are made.
        zeroshot: Tasks of lm-eval to evaluate in addition to perplexity.
        include_path: Directory with YAML files of more tasks.
        save_checkpoints: Whether to keep the pruned models, each with the results of its run.

    Raises:
        OptionError: An argument is empty or malformed, a setting does not exist, `only` matches no
            run, or two trials have one name.
        PatternError: A setting's numbers are out of range, or a block size splits its groups.
        MethodError: A method does not exist, or not with a setting.
    """

    base: list[Path_fr]
    models: dict[str, ModelTrials]
    runs: dict[str, list[str]]
    out: str
    recipes: dict[str, dict[str, Any]] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    vary: dict[str, Any] = field(default_factory=dict)
    only: list[str] | str = field(default_factory=list)
    zeroshot: list[str] = field(default_factory=list)
    include_path: str | None = None
    save_checkpoints: bool = False

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise OptionError("\n".join(problems))
        lists = {k: v if isinstance(v, list) else [v] for k, v in self.vary.items()}
        self.vary = lists  # a single value needs no list
        if not any(trial.method for trial in self.trials):
            raise OptionError('`runs` is empty; expected at least one, such as `{"2:4": [SM]}`.')
        self.only = [self.only] if isinstance(self.only, str) else self.only
        if not self.selected:
            raise OptionError(
                f"`only` {self.only} matches no run. There are, for instance: "
                + ", ".join(str(trial.directory) for trial in self.trials[:5])
            )
        # Trials are different here, since equal ones were joined. Two of them in one directory
        # would overwrite each other's results.
        directories = Counter(trial.directory for trial in self.trials)
        if shared := [str(name) for name, number in directories.items() if number > 1]:
            raise OptionError(
                "`vary` has options that end alike, or `recipes` a name like that of another run, "
                f"so that several trials would be called {', '.join(shared)}. Rename the recipe; "
                "vary the options in sweeps of their own, each with its `out`."
            )

    @cached_property
    def trials(self) -> list[Trial]:
        """Every trial, the dense one of each model first."""
        trials = []
        for model, of_model in self.models.items():
            trials.append(Trial(model))
            methods = self.runs if of_model.runs is None else of_model.runs
            for setting, names in methods.items():
                for name in names:
                    trials += self._repeat(model, setting, name)
        # Several names of a method give equal trials, of which one is made.
        return list(dict.fromkeys(trials))

    @property
    def selected(self) -> list[Trial]:
        """The trials that `only` selects, and the dense trials of their models."""
        if not self.only:
            return self.trials
        named = {
            trial
            for trial in self.trials
            if any(fnmatchcase(str(trial.directory), name) for name in self.only)
        }
        # Without its dense run, a pruned one has no "before".
        named |= {Trial(trial.model) for trial in named}
        return [trial for trial in self.trials if trial in named]

    def directory(self, trial: Trial) -> Path:
        """Return the directory of the run of a trial."""
        return Path(self.out, trial.directory)

    def options(self, trial: Trial) -> dict[str, Any]:
        """Return the options of the configuration `base` that a trial changes, by dotted key."""
        recipe = self.recipes[trial.recipe] if trial.recipe else {}
        arguments = {f"{CALLBACK}.{key}": value for key, value in recipe.items()}
        # The order is from general to special: a trial's setting and seed override its recipe, and
        # this the model's options.
        return self.models[trial.model].options | arguments | trial.options()

    def _problems(self) -> Iterator[str]:
        for name, recipe in self.recipes.items():
            key = f"`recipes.{name}`"
            if not re.fullmatch(r"[\w.+-]+", name):
                yield f"{key} names directories; expected letters, digits and . + - _ alone."
            if _is_method(name):
                yield f"{key} is the name of a method. Choose another."
            if not isinstance(recipe.get("method"), str):
                yield f"{key} names no `method`; expected one, such as `method: SM`."
            for setting in {"sparsity", "pattern"} & recipe.keys():
                yield f"{key} has `{setting}`, and `runs` gives the settings. Leave it out."
        of_trials = {"data.seed", *(f"{CALLBACK}.{x}" for x in ("method", "pattern", "sparsity"))}
        if taken := sorted(of_trials & self.vary.keys()):
            yield f"`vary` has {', '.join(taken)}, which `runs` and `seeds` give. Leave it out."
        model = "{tiny: {options: {model.model: PATH}}}"
        for key, example in {"models": model, "out": "runs", "seeds": "[0]"}.items():
            if not getattr(self, key):
                yield f"`{key}` is empty. Give it, such as `{key}: {example}`."
        for name, of_model in self.models.items():
            # A name is a part of paths below `out`: an absolute one, or `..`, would lead elsewhere.
            path = PurePosixPath(name if isinstance(name, str) and name.isprintable() else "")
            if not path.parts or path.is_absolute() or ".." in path.parts:
                yield (
                    f"`models`: {name!r} is no name of a directory in `out`. Expected text such as "
                    "`opt-125m`, in quotes if it is a number."
                )
            if not of_model.block_sizes:
                yield f"`models.{name}.block_sizes` is empty; expected at least one, such as [128]."

    def _method_of(self, name: str) -> str:
        """Return the method of a recipe, or the method of this name."""
        if name in self.recipes:
            return str(self.recipes[name]["method"])
        if self.recipes and not _is_method(name):
            raise MethodError(
                f"`runs`: {name!r} is neither one of `recipes` ({', '.join(self.recipes)}) nor a "
                "method."
            )
        return name

    def _repeat(self, model: str, setting: str, name: str) -> list[Trial]:
        """Return the trials of a method or recipe for all block sizes, seeds and changes."""
        method = self._method_of(name)
        recipe = self.recipes.get(name)
        parse_setting(setting, method)  # raises: a sweep would end after other runs' hours
        # Options that do not change a method's result are not varied, since equal runs would count
        # as independent ones. A recipe may have tuning, which sees the inputs, so it takes all
        # seeds.
        sizes = self.models[model].block_sizes if has_blocks(method) else [None]
        if recipe and "block_size" in recipe:
            sizes = [recipe["block_size"]]
        for size in sizes:
            parse_setting(setting, method, size)
        seeds = self.seeds if recipe or sees_inputs(setting, method) else [None]
        changes: list[ChangedOption | None] = [
            ChangedOption.of(key, value) for key, values in self.vary.items() for value in values
        ] or [None]
        return [
            Trial(model, setting, method, size, seed, changed, name if recipe else None)
            for size in sizes
            for changed in changes
            for seed in seeds
        ]


def _is_method(name: str) -> bool:
    try:
        method_parts(name)
    except MethodError:
        return False
    return True
