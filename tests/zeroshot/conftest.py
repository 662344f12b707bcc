import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrp_lightning.solver.patterns import SemiStructured
from mrp_lightning.targets.layers import is_linear
from mrp_lightning.text.sources import standard_library


@pytest.fixture(autouse=True)
def short_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make lm-eval's index of its own tasks, which takes a minute, that of one folder of them."""
    tasks = pytest.importorskip("lm_eval.tasks", reason="needs the extra `zeroshot`")
    manager, folder = tasks.TaskManager, Path(tasks.__file__).with_name("lambada")
    make = manager.__init__

    def make_short(
        self: Any, *, include_path: Any = None, include_defaults: bool = True, **options: Any
    ) -> None:
        paths = [folder] * include_defaults + ([] if include_path is None else [include_path])
        make(self, include_path=paths, include_defaults=False, **options)

    monkeypatch.setattr(manager, "__init__", make_short)


NUMBER = 10
"""Of samples of a task."""
METRICS = {
    "continuation": ["acc", "acc_norm"],
    "last_word": ["perplexity", "acc"],
    "rolling": ["word_perplexity", "byte_perplexity", "bits_per_byte"],
}


def documents() -> dict[str, list[dict[str, Any]]]:
    """Samples of the three kinds of tasks, from source code that the model has not seen."""
    texts = [text for text in standard_library("test") if len(text) > 8000][:NUMBER]
    lines = [text.splitlines() for text in texts]
    choices: list[dict[str, Any]] = []
    for i in range(NUMBER):
        following = ["\n".join(lines[(i + j) % NUMBER][40 : 41 + i % 3 + j]) for j in range(4)]
        choices.append(
            {
                "context": "\n".join(lines[i][20 + i : 40]),
                "choices": [*following[-i % 4 :], *following[: -i % 4]],
                "answer": i % 4,
            }
        )
    # One context is longer than the model's 1024 positions.
    choices[0]["context"] = "\n".join(lines[0][-300:])
    # Last words that are easy to guess, and others.
    keyword = re.compile(r"(for \w+ in|from [\w.]+ import| is not| as| the| to)(?= )")
    ends = [keyword.search(text, 1000 + 50 * i) for i, text in enumerate(texts)]
    words = [end.string[end.end() - 600 : end.end()] for end in ends if end]
    sizes = (60, 900, 6000)
    return {
        "continuation": choices,
        "last_word": [{"text": text} for text in words],
        "rolling": [{"text": text[:size]} for text, size in zip(texts, sizes, strict=False)],
    }


def write_tasks(samples: dict[str, list[dict[str, Any]]], directory: Path) -> None:
    """YAML files of a task of each kind over local data files."""
    kinds: dict[str, dict[str, Any]] = {
        "continuation": {
            "output_type": "multiple_choice",
            "doc_to_text": "{{context}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "target_delimiter": "\n",
        },
        "last_word": {
            "output_type": "loglikelihood",
            "doc_to_text": "{{text.split(' ')[:-1]|join(' ')}}",
            "doc_to_target": "{{' ' + text.split(' ')[-1]}}",
        },
        "rolling": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
        },
    }
    for name, kind in kinds.items():
        data = directory / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in samples[name]))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(directory)},
            "test_split": "test",
            "metric_list": [{"metric": metric} for metric in METRICS[name]],
        }
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(task | kind))


@pytest.fixture(scope="session")
def task_documents() -> dict[str, list[dict[str, Any]]]:
    """The samples by task."""
    return documents()


@pytest.fixture(scope="session")
def task_directory(
    task_documents: dict[str, list[dict[str, Any]]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The tasks, to be given as `--include-path`."""
    directory = tmp_path_factory.mktemp("tasks")
    write_tasks(task_documents, directory)
    return directory


@pytest.fixture(scope="session")
def checkpoints(
    embedded: Path, tmp_path_factory: pytest.TempPathFactory, shortened: Any
) -> dict[str, Path]:
    """The embedded model: dense, pruned to 2:4 by magnitude, and that packed."""
    from export.to_sparse import main

    root = tmp_path_factory.mktemp("checkpoints")
    dense = Path(shutil.copytree(embedded, root / "dense"))
    model = AutoModelForCausalLM.from_pretrained(dense)
    with torch.no_grad():
        for name, module in model.named_modules():
            if is_linear(module) and name != "lm_head":
                module.weight[SemiStructured(2, 4).select(module.weight.abs(), 0)] = 0
    model.save_pretrained(root / "pruned")
    AutoTokenizer.from_pretrained(dense).save_pretrained(root / "pruned")
    with shortened():  # what packing proves has tests of its own
        main([str(root / "pruned"), "--out", str(root / "packed")])
    return {kind: root / kind for kind in ("dense", "pruned", "packed")}


@pytest.fixture
def checkpoint(checkpoints: dict[str, Path], tmp_path: Path) -> Callable[[str], Path]:
    """A function that gives a checkpoint a directory of the test's own."""
    return lambda kind: Path(shutil.copytree(checkpoints[kind], tmp_path / kind))
