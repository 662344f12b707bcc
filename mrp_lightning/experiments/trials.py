"""A trial: one way to prune one model, and what it changes of the configuration of its sweep."""

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from mrp_lightning.errors import OptionError
from mrp_lightning.experiments.methods import canonical_method, method_label
from mrp_lightning.solver.methods import parse_method
from mrp_lightning.solver.patterns import Pattern, make_pattern

CALLBACK = "trainer.callbacks.init_args"
"""The key of the arguments of the last callback, which prunes."""


@dataclass(frozen=True)
class Change:
    """The one option that an ablation changes.

    Attributes:
        key: The dotted key of the option, such as `data.num_samples`.
        value: Its value, which may be a list or a mapping.
        text: The value as JSON: by it two changes are compared, whatever the value holds.
    """

    key: str
    value: Any = field(compare=False)
    text: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", json.dumps(self.value, sort_keys=True, default=str))

    @property
    def option(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.option}={self.value_text}"

    @property
    def value_text(self) -> str:
        """The value for a reader."""
        return self.text if isinstance(self.value, list | dict) else str(self.value)

    @property
    def number(self) -> float | None:
        """The value if it is a number; `None` if it is a text, a list or the like."""
        is_number = isinstance(self.value, int | float) and not isinstance(self.value, bool)
        return float(self.value) if is_number else None

    @property
    def name(self) -> str:
        """The change as a part of a directory's name, which other values do not have."""
        text = self.value_text
        plain = re.sub(r"[^\w.+-]+", "_", text).strip("_")
        if plain == text and len(text) <= 40:
            return f"{self.option}={text}"
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return f"{self.option}={plain[:40]}~{digest}"


@dataclass(frozen=True)
class Trial:
    """The dense model, or one method or recipe at one sparsity with one calibration set.

    Attributes:
        model: The name of the model in the sweep.
        setting: `dense`, a percentage such as `50%`, or a pattern such as `2:4`.
        method: The canonical name of the method; `None` for the dense model.
        block_size: Columns a block; `None` for all columns, and where it means nothing.
        seed: The seed of the calibration set; `None` where it means nothing.
        changed: The option that an ablation changes.
        recipe: The name that the sweep gives to the method with more options; `None` for a method
            alone.
    """

    model: str
    setting: str = "dense"
    method: str | None = None
    block_size: int | None = None
    seed: int | None = None
    changed: Change | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.method is not None:
            object.__setattr__(self, "method", canonical_method(self.method))

    @property
    def directory(self) -> PurePosixPath:
        """Where its run lies in the sweep's directory, such as `opt/2of4-SM-s128-seed0`."""
        if self.method is None:
            return PurePosixPath(self.model, "dense")
        parts = [self.setting_name, self.recipe or self.method]
        if has_blocks(self.method):
            parts.append("sall" if self.block_size is None else f"s{self.block_size}")
        parts += [self.changed.name] if self.changed else []
        parts += [] if self.seed is None else [f"seed{self.seed}"]
        return PurePosixPath(self.model, "-".join(parts))

    @property
    def label(self) -> str:
        """What was done, for a reader: the recipe, or what the field calls the method."""
        return self.recipe or method_label(self.method)

    @property
    def setting_name(self) -> str:
        """The setting as a part of a file's name."""
        return self.setting.replace(":", "of").rstrip("%")

    @property
    def columns(self) -> str:
        """The block size as the tables write it."""
        if self.method is None or not has_blocks(self.method):
            return ""
        return "all" if self.block_size is None else str(self.block_size)

    def options(self) -> dict[str, Any]:
        """What the trial changes of the configuration, by dotted key, but for its recipe."""
        if self.method is None:
            return {"trainer.callbacks": None}
        percent = self.setting.endswith("%")
        options = {
            f"{CALLBACK}.pattern": None if percent else self.setting,
            f"{CALLBACK}.sparsity": float(self.setting[:-1]) / 100 if percent else None,
            f"{CALLBACK}.method": self.method,
        }
        if has_blocks(self.method):
            options[f"{CALLBACK}.block_size"] = self.block_size
        if self.seed is not None:
            options["data.seed"] = self.seed
        return options | ({self.changed.key: self.changed.value} if self.changed else {})

    def to_dict(self) -> dict[str, Any]:
        """The trial as `run.json` keeps it."""
        changed = [self.changed.key, self.changed.value] if self.changed else None
        return {**vars(self), "changed": changed}

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> "Trial":
        """The trial that `run.json` keeps.

        Raises:
            TypeError: A key is missing or unknown.
            MethodError: There is no such method.
        """
        changed = content.get("changed")
        return cls(**{**content, "changed": Change(*changed) if changed else None})


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


def sees_inputs(method: str) -> bool:
    """Whether the calibration set has a say in the weights."""
    return canonical_method(method) != "magnitude"
