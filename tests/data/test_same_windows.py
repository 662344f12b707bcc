"""The same arguments give the same windows as ever: digests of each source and split."""

import hashlib
import json
import sysconfig

import pytest
import torch
from special_tokens import tokenizer_with

from mrp_lightning import TextDataModule

DIGESTS = {
    "files": ("be6bbcc880b4", "b42e636d5814"),
    "bos text": ("371e90bf8451", "0c21d07d1e57"),
    "lines": ("caae3af4c518", "6eb7790fc5bf"),
    "dataset": ("c88e2f2b3ca3", "9d64717ae4df"),
    "library": ("e464cbdaa548", "45da8be49766"),
    "c4": ("82633c9ed0f3", "ad14ee4c872b"),
    "c4 window": ("82633c9ed0f3", "fe4266fc46af"),
    "lambada": ("71d1f915cc8a", "0cebfe534ccc"),
    "lambada window": ("71d1f915cc8a", "679e9a3110cd"),
    "ptb": ("6b7dbf5cd378", "50dc929c348a"),
    "ptb window": ("6b7dbf5cd378", "9d8749ae251d"),
    "wikitext2": ("857c680e7085", "71526a4268ef"),
    "wikitext2 window": ("857c680e7085", "f62f9ac0d89a"),
    "evaluation": ("36553724efed", "63c9fa73d424"),
    "mixture": ("94b0e16f2beb", "4af60e5c50d9"),
    "named": ("b2652b30f536", "c20e7131ce5d"),
    "held out": ("73bf622ac1a9", "a211a3fa79be"),
    "held out lines": ("0ce74c3e050e", "e54227db116e"),
}
"""Of all windows of a source, with a tokenizer that puts nothing before a text, and with one."""


def digest(windows: list[torch.Tensor]) -> str:
    assert all(some.dtype == torch.int64 for some in windows)
    return hashlib.sha256(str([some.tolist() for some in windows]).encode()).hexdigest()[:12]


def ids_of(loader) -> torch.Tensor:
    batches = [batch["input_ids"] if isinstance(batch, dict) else batch for batch in loader]
    return torch.cat(batches)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    """Files of every kind, and a small standard library."""
    library = tmp_path / "library"
    for number in range(60):
        path = library / f"part{number % 7}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def function{number}(self):\n    return {number} * self\n" * 3)
    paths = {**sysconfig.get_paths(), "stdlib": str(library)}
    monkeypatch.setattr(sysconfig, "get_paths", lambda: paths)
    (tmp_path / "a.txt").write_text("\n".join(f"first = {i} + {i * 7}" for i in range(90)))
    (tmp_path / "b.txt").write_text("\n".join(f"second({i}, None)" for i in range(70)))
    lines = [json.dumps({"body": f"line {i} of many\n"}) for i in range(40)]
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    return tmp_path


def dataset():
    datasets = pytest.importorskip("datasets", reason="needs the extra data")
    rows = {name: [f"{name} row {i} is a text" for i in range(30)] for name in ("train", "test")}
    tables = {name: datasets.Dataset.from_dict({"text": row}) for name, row in rows.items()}
    return datasets.DatasetDict(tables)


def modules(texts, corpora_dir, options):
    """A module for each way to name text, and the stages that it has text for."""
    a, b, c = (str(texts / name) for name in ("a.txt", "b.txt", "c.jsonl"))
    corpora = {"corpora_dir": str(corpora_dir), **options}
    with_files = {"train_files": [a, b], "eval_files": b, **options}
    yield "files", TextDataModule(**with_files), ("predict", "fit", "validate", "test")
    yield "bos text", TextDataModule(**with_files, bos="text"), ("predict", "fit", "test")
    lines = TextDataModule(c, text_column="body", **options)
    yield "lines", lines, ("predict", "fit")
    yield "dataset", TextDataModule(dataset=dataset(), **options), ("predict", "fit", "test")
    yield "library", TextDataModule(**options), ("predict", "fit", "validate", "test")
    for name in ("c4", "lambada", "ptb", "wikitext2"):
        yield name, TextDataModule(calibration=name, **corpora), ("predict",)
        window = TextDataModule(calibration=name, bos="window", **corpora)
        yield f"{name} window", window, ("predict",)
    names = ["c4", "ptb", "wikitext2", "stdlib"]
    yield "evaluation", TextDataModule(evaluation=names, **corpora), ("validate", "test")
    shares = {"train_files": 0.25, "c4": 0.25, "ptb": 0.125, "stdlib": 0.125, b: 0.25}
    mixed = TextDataModule([a], calibration=shares, **corpora)
    yield "mixture", mixed, ("predict", "fit")
    named = {"one": a, "two": "stdlib", "three": "ptb"}
    chosen = TextDataModule(calibration=b, evaluation=named, **corpora)
    yield "named", chosen, ("predict", "test")
    yield "held out", TextDataModule([a, b], hold_out=True, **options), ("predict", "fit", "test")
    many = TextDataModule([c], hold_out=True, text_column="body", **options)
    yield "held out lines", many, ("predict", "fit", "test")


@pytest.mark.parametrize(("column", "template"), [(0, "$A"), (1, "[E] $A")])
def test_the_windows_are_those_of_earlier_versions(texts, corpora_dir, column, template):
    options = {"num_samples": 16, "sequence_length": 12, "seed": 5}
    options["tokenizer"] = tokenizer_with(template)
    found = {}
    for source, module, stages in modules(texts, corpora_dir, options):
        windows = []
        for stage in stages:
            module.setup(stage)
            kind = {"fit": "train", "validate": "val"}.get(stage, stage)
            loaders = getattr(module, f"{kind}_dataloader")()
            windows += loaders.values() if isinstance(loaders, dict) else [loaders]
        found[source] = digest([ids_of(loader) for loader in windows])
    assert found == {source: digests[column] for source, digests in DIGESTS.items()}
