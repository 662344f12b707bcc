"""`evaluation.json`: the scores of a model, in the directory of the model or of its run."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mrp_lightning.environment import versions
from mrp_lightning.storage.files import save_ours
from mrp_lightning.storage.json_files import as_json, read_as

FORMAT_VERSION = 1
NAME = "evaluation.json"
UNNAMED = "text"
"""The name of an unnamed evaluation text, such as a single one."""

Scores = Mapping[str, float | int | None]
"""Numbers by name, such as `{"acc": 0.74, "acc_stderr": 0.006, "samples": 5153}`."""

BY_LENGTH = frozenset({"hellaswag", "arc_challenge"})
"""Tasks whose published accuracy compares log-likelihoods per character (`acc_norm`).

The Mamba paper does so, too. The paper's table of Mamba models names no metric, but its values fit:
pruned Mamba-130M has 32.4% on HellaSwag, where the dense model has an `acc_norm` of 35.3%.
"""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The content of `evaluation.json`.

    A number is `None` where it was not finite: a perplexity beyond the range of floats.

    Attributes:
        perplexity: By text: `perplexity`, `loss` (nats a token), `context` (tokens a window),
            `windows`, `tokens` (that were predicted), and where they are known `prefix` (tokens
            such as BOS that stood before the text in each window) and `checksum` (the CRC-32 of the
            tokens of the windows).
        zeroshot: By task: its metrics as fractions, each with its standard error under
            `<metric>_stderr`, then `samples`, `num_fewshot` and `checksum` (the CRC-32 of all
            prompts and answers), and of a member of a group that has scores itself `depth`, the
            number of such groups around it.
        similarity: By text, of an encoder or classifier: the mean `cosine` of its outputs before
            and after the pruning, with the `context` and the number of `windows`.
        dense: By text: the entries of `perplexity` for the model before it was pruned, on the same
            windows.
        model: The directory or hub id of the model.
        versions: The version of each library in the last recorded evaluation that used it.
        format_version: Increased when a key changes its meaning.
    """

    perplexity: dict[str, Scores] = field(default_factory=dict)
    zeroshot: dict[str, Scores] = field(default_factory=dict)
    similarity: dict[str, Scores] = field(default_factory=dict)
    dense: dict[str, Scores] = field(default_factory=dict)
    model: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


def record(directory: str | os.PathLike[str], **scores: Any) -> Path:
    """Add scores to `evaluation.json`; those of other texts and tasks stay as they are.

    `scores` are fields of `Evaluation`; `None` adds nothing. The directory is made if need be. A
    FormatError is raised if the existing file cannot be read, which is left as it is. The result is
    the path of the file.
    """
    path = Path(directory) / NAME
    recorded = read(directory) if path.exists() else Evaluation()
    added = {key: value for key, value in scores.items() if value is not None}
    # Merged by text and by task, one level deep: a new score of one text replaces that text's
    # alone.
    by_name = {
        key: {**getattr(recorded, key), **value} for key, value in added.items() if key != "model"
    }
    content = replace(recorded, **{**added, **by_name, "versions": recorded.versions | versions()})
    text = as_json({"format_version": FORMAT_VERSION, **asdict(content)})
    save_ours(path, text, adds=True)
    return path


def read(directory: str | os.PathLike[str]) -> Evaluation:
    """Read the results in a directory; a FormatError is raised for a damaged or newer file."""
    path = Path(directory) / NAME
    return read_as(Evaluation, path, "evaluate the model again", FORMAT_VERSION)


def metrics(scores: Scores) -> Scores:
    """Return the metrics of a task: its scores without standard errors, sizes and checksum."""
    # Names of errors come from the metrics, since a metric's own name may end in anything.
    errors = {_stderr(metric) for metric in scores}
    left_out = errors | {"samples", "num_fewshot", "checksum", "depth"}
    return {name: value for name, value in scores.items() if name not in left_out}


def standard_error(scores: Scores, metric: str) -> float | None:
    """Return the standard error of a metric, in the metric's unit; `None` if there is none."""
    return scores.get(_stderr(metric))


def accuracy(task: str, scores: Scores) -> float | None:
    """Return the accuracy that papers report for a task, as a fraction; `None` if it has none.

    It is `acc_norm` for the tasks in `BY_LENGTH` and `acc` for all others.
    """
    return scores.get("acc_norm" if task in BY_LENGTH else "acc")


def averaged(zeroshot: Mapping[str, Scores]) -> dict[str, float]:
    """Return the `accuracy` of each task that has one and does not count in its group's."""
    values = {task: accuracy(task, x) for task, x in zeroshot.items() if not x.get("depth")}
    return {task: value for task, value in values.items() if value is not None}


def mean_accuracy(zeroshot: Mapping[str, Scores]) -> float | None:
    """Return the mean accuracy over the tasks of `averaged`; `None` if there are none."""
    values = averaged(zeroshot).values()
    return sum(values) / len(values) if values else None


def _stderr(metric: str) -> str:
    """Return the key of a metric's standard error; the name of a filter stays at the end."""
    name, comma, filter_name = metric.partition(",")
    return f"{name}_stderr{comma}{filter_name}"
