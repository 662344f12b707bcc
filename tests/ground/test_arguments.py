"""Values are of the types that a signature gives, or all that are not are named; other errors."""

import inspect
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

import export
from callbacks import MRPCallback, PruningCallback, SaveModel
from mrp_ground.arguments import checked
from mrp_lightning import CausalLM, HessianAccumulator, TextDataModule, Trainer, prune_weight
from mrp_lightning.callbacks.saving import SaveEvaluation
from mrp_lightning.errors import MethodError, OptionError, PatternError, TargetError, first_line


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
        (TextDataModule, {"seed": "128", "num_samples": 2.5}, "num_samples.*seed"),
        (CausalLM, {"model": "x", "streaming": "false", "offload": 1}, "offload.*streaming"),
        (SaveModel, {"save_dir": 5, "overwrite": "no"}, "save_dir.*overwrite"),
        (SaveEvaluation, {"save_dir": None}, "save_dir"),
        (MRPCallback, {"pattern": "2:4", "overwrite": "no", "resume": "x"}, "overwrite.*resume"),
        (MRPCallback, {"offload": "false", "targets": 5, "balance": "0"}, "balance.*targets.*off"),
        (PruningCallback, {"method": 5, "sparsity": "50%"}, "method.*sparsity"),
    ],
)
def test_public_classes_are_checked(kind, arguments, names):
    with pytest.raises(OptionError, match=f"{names}.*` must be"):
        kind(**arguments)


@pytest.mark.parametrize("kind", [TextDataModule, CausalLM, SaveModel, PruningCallback])
def test_signatures_stay_what_they_are(kind):
    parameters = inspect.signature(kind).parameters
    assert "args" not in parameters
    assert all(p.annotation is not p.empty for p in parameters.values())


COLUMNS = HessianAccumulator(4)
COLUMNS.update(torch.eye(4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda w, h: prune_weight(w.numpy(), h, sparsity=0.5), OptionError, "torch.from_numpy"),
        (lambda w, h: prune_weight(w, COLUMNS, sparsity=0.5), OptionError, r"its `hessian\(\)`"),
        (lambda w, h: prune_weight(nn.Linear(4, 2), h, sparsity=0.5), OptionError, "its `weight`"),
        (lambda w, h: prune_weight(w, h, sparsity="0.5"), PatternError, "None; got '0.5'"),
        (lambda w, h: prune_weight(w, h, sparsity=0.5, method=5), MethodError, "must be text"),
        (lambda w, h: prune_weight(w, h, pattern=124), PatternError, 'write `pattern: "2:4"`'),
        (lambda w, h: prune_weight(w, h, pattern="1:3"), PatternError, "multiple of 3"),
        (lambda w, h: prune_weight(w, h, pattern="1:3", block_size=3), PatternError, "groups of p"),
        (lambda w, h: prune_weight(w.to("meta"), h, sparsity=0.5), TargetError, "got a meta"),
        (lambda w, h: prune_weight(w, h.to_sparse(), sparsity=0.5), TargetError, "sparse_coo"),
        (lambda w, h: COLUMNS.update(w.numpy()), OptionError, "`x` must be a Tensor"),
        (lambda w, h: COLUMNS.merge(h), OptionError, "`other` must be a HessianAccumulator"),
        (lambda w, h: Trainer(devices=1.5), OptionError, "`devices` must be a list of whole numb"),
        (lambda w, h: MRPCallback(pattern="2:4", tuning=5), OptionError, "or a BlockTuning; got 5"),
        (lambda w, h: MRPCallback(pattern="2:4").save(5), OptionError, "`directory` must be"),
        (lambda w, h: export.load(5), OptionError, "`directory` must be text or a path; got 5"),
        (lambda w, h: export.load_into(5, "x"), OptionError, "`module` must be a Module; got 5"),
        (lambda w, h: export.pack(w.numpy()), OptionError, "`weight` must be a Tensor"),
        (lambda w, h: export.Sparse24Linear.from_linear(w), OptionError, "`linear` must be a Mod"),
        (lambda w, h: export.BitmaskLinear.from_linear(nn.Embedding(2, 4)), TargetError, "Embedd"),
    ],
)
def test_public_functions_are_checked(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.ones(2, 4), torch.eye(4))


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (EOFError(), "EOFError"),
        (RuntimeError("\n  \n"), "RuntimeError"),
        (RuntimeError("\nno kernel\nat line 3"), "RuntimeError: no kernel"),
        (KeyError("weight"), "KeyError: 'weight'"),
    ],
)
def test_the_kind_and_the_first_line_that_says_something(error, told):
    assert first_line(error) == told
