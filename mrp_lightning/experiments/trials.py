"""A trial: one way to prune one model, as changes to the configuration of its sweep."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from mrp_lightning.errors import ArgumentError, OptionError
from mrp_lightning.solver.arguments import COMPENSATION_NAMES, MASK_NAMES, NAMED, method_parts

if TYPE_CHECKING:
    from mrp_lightning.solver.recipe import Recipe

_SETTING = re.compile(
    r"((?P<percent>\d+(\.\d+)?)%|(?P<pattern>[^+]*:[^+]*))?((^|(?<=.)\+)(?P<bits>\d+)bit)?"
)

HEAD_ALONE = "head"
"""The setting of a run that quantised the output head alone."""

CALLBACK = "trainer.callbacks.init_args"
"""The dotted key of the arguments of the last callback, which prunes."""

METHODS = ("magnitude", "wanda", "SS", "MS", "SM", "MM")
"""The paper's methods in the order in which they are shown; `JM` and all others follow."""

_LABELS = {"wanda": "Wanda", "SS": "SparseGPT"}
_CANONICAL = {pair: name for name, pair in reversed(NAMED.items())}  # of several names the first
_PAIRS = [f"{mask}+{compensation}" for mask in MASK_NAMES for compensation in COMPENSATION_NAMES]
_ORDER = list(dict.fromkeys((*METHODS, "JM", *(_CANONICAL.get(pair, pair) for pair in _PAIRS))))


def canonical_method(name: str) -> str:
    """Return the canonical name of a method: `sparsegpt` and `S+S` are `SS`, `wanda+M` is itself.

    Raises:
        MethodError: There is no such method.
    """
    pair = "+".join(method_parts(name))
    return _CANONICAL.get(pair, pair)


def method_rank(method: str) -> int:
    """Return the position of a canonical method in tables."""
    return _ORDER.index(method)


@dataclass(frozen=True)
class ChangedOption:
    """The one option that an ablation changes.

    Attributes:
        key: The dotted key of the option, such as `data.num_samples`.
        text: The new value as JSON with sorted keys, which makes changes comparable: trials are
            keys of dicts, and a list has no hash.
    """

    key: str
    text: str

    @classmethod
    def of(cls, key: str, value: Any) -> "ChangedOption":
        """Return the change of an option to a value, which may be a list or a mapping."""
        return cls(key, json.dumps(value, sort_keys=True, default=str))

    @property
    def value(self) -> Any:
        """The new value."""
        return json.loads(self.text)

    @property
    def option(self) -> str:
        """The last part of the key."""
        return self.key.rpartition(".")[2]

    def __str__(self) -> str:
        return f"{self.option}={self.value_text}"

    @property
    def value_text(self) -> str:
        """The value in labels and names of directories; lists and mappings are JSON."""
        return self.text if isinstance(self.value, list | dict) else str(self.value)

    @property
    def name(self) -> str:
        """The change as a part of a directory's name, with a hash if the value is no plain text."""
        text = self.value_text
        plain = re.sub(r"[^\w.+-]+", "_", text).strip("_")
        if plain == text and len(text) <= 40:
            return f"{self.option}={text}"
        # Replaced or cut characters could make two values alike, which the digest keeps apart.
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:8]
        return f"{self.option}={plain[:40]}~{digest}"


@dataclass(frozen=True)
class Trial:
    """The dense model, or one method or recipe at one sparsity with one calibration set.

    Attributes:
        model: The name of the model in the sweep; empty for a run that no sweep made.
        setting: `dense`, a percentage such as `50%`, a pattern such as `2:4`, either of them with
            `+4bit`, or `4bit`; `head` in the report of a run that quantised the head alone.
        method: The canonical name of the method; `None` for the dense model.
        block_size: Columns a block; `None` for all columns, and for methods without blocks.
        seed: The seed of the calibration set; `None` for methods without one.
        changed: The option that an ablation changes.
        recipe: The name that the sweep gives to the method with more options; `None` for a method
            alone.
    """

    model: str
    setting: str = "dense"
    method: str | None = None
    block_size: int | None = None
    seed: int | None = None
    changed: ChangedOption | None = None
    recipe: str | None = None

    def __post_init__(self) -> None:
        if self.method is not None:
            # Trials are compared and hashed by the canonical name, so that two names of one method
            # are one trial.
            object.__setattr__(self, "method", canonical_method(self.method))

    @property
    def directory(self) -> PurePosixPath:
        """The directory of the run in that of the sweep, such as `opt/2of4-SM-s128-seed0`."""
        if self.method is None:
            return PurePosixPath(self.model, "dense")
        parts = [self.setting_name, self.recipe or self.method]
        parts += [f"s{self.columns}"] if self.columns else []
        parts += [self.changed.name] if self.changed else []
        parts += [] if self.seed is None else [f"seed{self.seed}"]
        return PurePosixPath(self.model, "-".join(parts))

    @property
    def label(self) -> str:
        """The name for a reader: the name of the recipe, or the usual name of the method."""
        return self.recipe or _LABELS.get(self.method or "", self.method or "")

    @property
    def setting_name(self) -> str:
        """The setting as a part of a file's name."""
        return self.setting.replace(":", "of").replace("%", "")

    @property
    def sparsity(self) -> float:
        """The fraction of the weights that is removed."""
        if self.method is None or self.setting == HEAD_ALONE:
            return 0.0
        return parse_setting(self.setting, "magnitude").pattern.sparsity

    @property
    def columns(self) -> str:
        """The block size for a reader; empty for methods without blocks."""
        if self.method is None or not has_blocks(self.method):
            return ""
        return "all" if self.block_size is None else str(self.block_size)

    def options(self) -> dict[str, Any]:
        """Return the options that the trial changes, by dotted key, without those of its recipe."""
        if self.method is None:
            return {"trainer.callbacks": None}
        arguments = _arguments(self.setting)
        options = {
            f"{CALLBACK}.pattern": arguments["pattern"],
            f"{CALLBACK}.sparsity": arguments["sparsity"],
            f"{CALLBACK}.method": self.method,
        }
        if arguments["bits"] is not None:
            options[f"{CALLBACK}.bits"] = arguments["bits"]
        # Options that the method ignores are not set, so that configurations of equal runs are
        # equal.
        if has_blocks(self.method):
            options[f"{CALLBACK}.block_size"] = self.block_size
        if self.seed is not None:
            options["data.seed"] = self.seed
        return options | ({self.changed.key: self.changed.value} if self.changed else {})

    @classmethod
    def of_report(cls, config: Mapping[str, Any]) -> "Trial":
        """Return the trial that the arguments in a report describe, of a model without a name."""
        arguments = {key: config.get(key) for key in ("sparsity", "pattern", "bits")}
        setting = HEAD_ALONE
        if any(arguments.values()):
            setting = _recipe(method="magnitude", **arguments).of_layers
        return cls("", setting, str(config.get("method")), config.get("block_size"))


def parse_setting(setting: str, method: str, block_size: int | None = None) -> "Recipe":
    """Return the recipe of `50%`, `2:4`, `2:4+4bit` or `4bit` with a method and a block size.

    Raises:
        OptionError: The setting is none of these, such as the number that YAML reads in an unquoted
            2:4, or its bits are out of range.
        PatternError: Its numbers are out of range, or the block size splits groups of a pattern.
        MethodError: The method does not exist, or not with the setting.
    """
    arguments = _arguments(setting)
    try:
        return _recipe(method=method, block_size=block_size, **arguments)
    except ArgumentError as error:
        raise type(error)(f"`runs` has {method!r} at {setting!r}, but {error}") from error


def _recipe(**arguments: Any) -> "Recipe":
    """Parse the arguments of a layer; imported late, since help need not wait for torch."""
    from mrp_lightning.solver.recipe import Recipe

    return Recipe.of(**arguments)


def _arguments(setting: str) -> dict[str, Any]:
    """Return the arguments `sparsity`, `pattern` and `bits` of a setting."""
    match = _SETTING.fullmatch(setting) if isinstance(setting, str) and setting else None
    if match is None:
        raise OptionError(
            f'`runs` has the setting {setting!r}; expected a percentage such as "50%" or a pattern '
            'such as "2:4", in quotes: YAML reads an unquoted 2:4 as a number. Either may be '
            'followed by bits, as in "50%+4bit", and "4bit" quantises alone.'
        )
    percent, bits = match["percent"], match["bits"]
    return {
        "sparsity": float(percent) / 100 if percent else None,
        "pattern": match["pattern"],
        "bits": int(bits) if bits else None,
    }


def has_blocks(method: str) -> bool:
    """Return whether a method chooses weights block by block."""
    from mrp_lightning.solver.recipe import parse_method  # late, as in `_recipe`

    return parse_method(method).mask.by_block


def sees_inputs(setting: str, method: str) -> bool:
    """Return whether the result of a method at a setting depends on the calibration set."""
    return canonical_method(method) != "magnitude" or _arguments(setting)["bits"] is not None
