"""Values are of the types that a signature gives, or all that are not are named."""

import inspect
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from callbacks import MRPCallback, PruningCallback, SaveModel
from mrp_lightning import CausalLM, TextDataModule
from mrp_lightning.arguments import checked
from mrp_lightning.errors import OptionError
from mrp_lightning.loop.save_evaluation import SaveEvaluation


class Takes:
    @checked
    def __init__(
        self,
        flag: bool = False,
        count: int = 1,
        rate: float | None = None,
        names: list[str] | str | None = None,
        files: Sequence[str | PathLike[str]] = (),
        other: bool | dict[str, Any] = True,
        choice: Literal["a", "b"] = "a",
        **options: Any,
    ) -> None:
        self.given = flag, count, rate, names, files, other, choice, options


@pytest.mark.parametrize(
    "arguments",
    [
        {"flag": True, "count": 3, "rate": 2, "names": "x", "files": ["a", Path("b")]},
        {"count": np.int64(3), "rate": np.float32(0.5), "names": ["x", "y"], "files": ("a",)},
        {"rate": None, "names": None, "other": "for the class to check", "choice": 5, "more": 1},
    ],
)
def test_what_the_types_allow_is_taken(arguments):
    Takes(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"flag": "no"}, "`flag` must be true or false; got 'no'."),
        ({"flag": 1}, "`flag` must be true or false; got 1."),
        ({"flag": None}, "`flag` must be true or false; got None."),
        ({"count": True}, "`count` must be a whole number; got True."),
        ({"count": 2.5}, "`count` must be a whole number; got 2.5."),
        ({"rate": "1e-3"}, "`rate` must be a number or None; got '1e-3'."),
        ({"names": 5}, "`names` must be a list of text or text or None; got 5."),
        ({"names": ["a", 5]}, "`names` must be a list of text or text or None; got ['a', 5]."),
        ({"files": "a"}, "`files` must be a list of text or a path; got 'a'."),
        (
            {"flag": "x", "count": "128"},
            "`flag` must be true or false; got 'x'. `count` must be a whole number; got '128'.",
        ),
    ],
)
def test_all_else_is_named(arguments, message):
    with pytest.raises(OptionError) as refused:
        Takes(**arguments)
    assert str(refused.value) == message


def test_a_wrong_call_is_explained_by_python():
    with pytest.raises(TypeError, match=r"Takes\.__init__\(\) takes from 1 to 8 positional"):
        Takes(*range(9))


@pytest.mark.parametrize(
    ("kind", "arguments", "names"),
    [
        (
            TextDataModule,
            {"sequence_length": "128", "num_samples": 2.5},
            "num_samples.*sequence_length",
        ),
        (TextDataModule, {"seed": "x"}, "seed"),
        (CausalLM, {"model": "x", "streaming": "false"}, "streaming"),
        (CausalLM, {"model": "x", "offload": 1}, "offload"),
        (SaveModel, {"save_dir": "x", "overwrite": "no"}, "overwrite"),
        (SaveModel, {"save_dir": 5}, "save_dir"),
        (SaveEvaluation, {"save_dir": None}, "save_dir"),
        (MRPCallback, {"pattern": "2:4", "overwrite": "no"}, "overwrite"),
        (MRPCallback, {"pattern": "2:4", "resume": "false"}, "resume"),
        (MRPCallback, {"pattern": "2:4", "true_sequential": "false"}, "true_sequential"),
        (MRPCallback, {"pattern": "2:4", "offload": "false", "targets": 5}, "targets.*offload"),
        (PruningCallback, {"method": 5, "sparsity": "50%"}, "method.*sparsity"),
    ],
)
def test_public_classes_are_checked(kind, arguments, names):
    with pytest.raises(OptionError, match=f"{names}` must be"):
        kind(**arguments)


@pytest.mark.parametrize("kind", [TextDataModule, CausalLM, SaveModel, PruningCallback])
def test_signatures_stay_what_they_are(kind):
    parameters = inspect.signature(kind).parameters
    assert "args" not in parameters
    assert all(p.annotation is not p.empty for p in parameters.values())
