"""Which runs a sweep is made of, and what each changes of the configuration that they share."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from typing import Any

from mrp_lightning.errors import OptionError
from mrp_lightning.solver.methods import parse_method
from mrp_lightning.solver.patterns import Pattern, make_pattern

_CALLBACK = "trainer.callbacks.init_args"  # of the last callback, which prunes


@dataclass(frozen=True)
class Run:
    """One run: the dense model, or one method at one sparsity with one calibration set.

    Attributes:
        model: Its name in the sweep.
        setting: `dense`, a percentage such as `50%`, or a pattern such as `2:4`.
        method: As `MRPCallback` takes it; `None` for the dense model.
        block_size: Columns a block; `None` for all, and where it means nothing.
        seed: Of the calibration set; `None` where it means nothing.
        changed: The one option that an ablation changes, and its value.
    """

    model: str
    setting: str = "dense"
    method: str | None = None
    block_size: int | None = None
    seed: int | None = None
    changed: tuple[str, Any] | None = None

    @property
    def directory(self) -> PurePosixPath:
        """Where its results lie in the sweep's directory, such as `opt/2of4-SM-s128-seed0`."""
        if self.method is None:
            return PurePosixPath(self.model, "dense")
        parts = [self.setting.replace(":", "of").rstrip("%"), self.method]
        if has_blocks(self.method):
            parts.append("sall" if self.block_size is None else f"s{self.block_size}")
        if self.changed:
            parts.append(f"{short(self.changed[0])}={self.changed[1]}")
        if self.seed is not None:
            parts.append(f"seed{self.seed}")
        return PurePosixPath(self.model, "-".join(parts))

    def options(self) -> dict[str, Any]:
        """What the run changes of the configuration, by dotted key."""
        if self.method is None:
            return {"trainer.callbacks": None}
        percent = self.setting.endswith("%")
        options = {
            f"{_CALLBACK}.pattern": None if percent else self.setting,
            f"{_CALLBACK}.sparsity": float(self.setting[:-1]) / 100 if percent else None,
            f"{_CALLBACK}.method": self.method,
        }
        if has_blocks(self.method):
            options[f"{_CALLBACK}.block_size"] = self.block_size
        if self.seed is not None:
            options["data.seed"] = self.seed
        return options | dict([self.changed] if self.changed else [])


@dataclass(frozen=True)
class ModelRuns:
    """One model of a sweep.

    Args:
        options: What its runs change of the configuration, by dotted key, such as `model.model`.
        block_sizes: Each run is repeated with each; `null` is all columns.
        runs: In place of those of the sweep.
    """

    options: dict[str, Any]
    block_sizes: list[int | None] = field(default_factory=lambda: [128])
    runs: dict[str, list[str]] | None = None


@dataclass(kw_only=True)
class Plan:
    """The runs of a sweep; `mrp_lightning.commands.sweep` says what the fields mean.

    Raises:
        OptionError: A setting or method does not exist, or nothing is left to do.
    """

    models: dict[str, ModelRuns]
    runs: dict[str, list[str]]
    seeds: list[int] = field(default_factory=lambda: [0])
    vary: dict[str, list[Any]] = field(default_factory=dict)
    only: list[str] | str = field(default_factory=list)

    def __post_init__(self) -> None:
        for runs in [self.runs, *(model.runs or {} for model in self.models.values())]:
            for setting, methods in runs.items():
                pattern = parse_setting(setting)
                for method in methods:
                    parse_method(method).mask.check(pattern)
        if not self.seeds:
            raise OptionError("`seeds` is empty; expected at least one, such as [0].")
        self.only = [self.only] if isinstance(self.only, str) else self.only
        if not self.selected:
            raise OptionError(
                f"`only` {self.only} matches no run. There are, for instance: "
                + ", ".join(str(run.directory) for run in self.all_runs[:5])
            )

    @property
    def all_runs(self) -> list[Run]:
        """Every run, each model's dense one first."""
        runs = []
        for model, of_model in self.models.items():
            runs.append(Run(model))
            own = self.runs if of_model.runs is None else of_model.runs
            for setting, methods in own.items():
                for method in methods:
                    runs += self._repeat(model, of_model, setting, method)
        return list(dict.fromkeys(runs))

    @property
    def selected(self) -> list[Run]:
        """The runs that `only` names, and the dense runs of their models."""
        if not self.only:
            return self.all_runs
        named = {run for run in self.all_runs if _matches(run, self.only)}
        named |= {Run(run.model) for run in named}
        return [run for run in self.all_runs if run in named]

    def _repeat(self, model: str, of_model: ModelRuns, setting: str, method: str) -> list[Run]:
        """A method at one setting: each block size, seed and ablation in which it differs."""
        sizes = of_model.block_sizes if has_blocks(method) else [None]
        seeds = self.seeds if _sees_inputs(method) else [None]
        changes: list[tuple[str, Any] | None] = [
            (key, value) for key, values in self.vary.items() for value in values
        ] or [None]
        return [
            Run(model, setting, method, size, seed, changed)
            for size in sizes
            for changed in changes
            for seed in seeds
        ]


def parse_setting(setting: str) -> Pattern:
    """The pattern of `50%` or `2:4`.

    Raises:
        OptionError: It is neither, such as what YAML makes of an unquoted 2:4.
        PatternError: Its numbers are out of range.
    """
    if isinstance(setting, str) and (percent := re.fullmatch(r"(\d+(\.\d+)?)%", setting)):
        return make_pattern(float(percent[1]) / 100, None)
    if isinstance(setting, str) and ":" in setting:
        return make_pattern(None, setting)
    raise OptionError(
        f'`runs` has the setting {setting!r}; expected a percentage such as "50%" or a pattern '
        'such as "2:4", in quotes: YAML reads an unquoted 2:4 as a number.'
    )


def has_blocks(method: str) -> bool:
    """Whether the block size means anything to a method."""
    return parse_method(method).mask.by_block


def _sees_inputs(method: str) -> bool:
    """Whether the calibration set has a say in the weights."""
    parsed = parse_method(method)
    return (parsed.mask.name, parsed.compensation.name) != ("magnitude", "none")


def short(key: str) -> str:
    """The last part of a dotted key."""
    return key.rpartition(".")[2]


def _matches(run: Run, names: Sequence[str]) -> bool:
    return any(fnmatchcase(str(run.directory), name) for name in names)
