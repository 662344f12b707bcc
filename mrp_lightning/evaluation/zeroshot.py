"""Tasks of EleutherAI's lm-eval, run on a loaded model.

The prompts, the scores and their standard errors are lm-eval's own, so that values compare with
published ones. This module chooses tasks, checks them before any work, and summarizes the results.
"""

import difflib
import json
import logging
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

from mrp_lightning.environment import extra, progress_log, why_no_hub
from mrp_lightning.errors import DataError, MissingFileError, OptionError
from mrp_lightning.records.evaluation import Scores
from mrp_lightning.upstream.other_names import hub_away

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PAPER_TASKS = (
    "lambada_openai",
    "hellaswag",
    "piqa",
    "arc_easy",
    "arc_challenge",
    "winogrande",
)
"""The tasks of the paper's table of Mamba models."""


@dataclass(frozen=True)
class Tasks:
    """Tasks with their loaded data, for any number of runs.

    Attributes:
        manager: lm-eval's `TaskManager`.
        loaded: lm-eval's tasks and groups of tasks.
        by_name: All tasks by name, including the members of groups.
    """

    manager: Any
    loaded: list[Any]
    by_name: Mapping[str, Any]

    def checksums(self) -> dict[str, int]:
        """Return the checksum of each task with all of its samples, as `evaluate` records it."""
        for task in self.by_name.values():
            task.build_all_requests()
        return {name: _checksum(task) for name, task in self.by_name.items()}


def load_tasks(
    names: Sequence[str] = PAPER_TASKS,
    *,
    include_path: str | PathLike[str] | None = None,
    num_fewshot: int = 0,
) -> Tasks:
    """Find tasks by name and read their data.

    Args:
        names: Names of tasks or groups; `*` and `?` are wildcards.
        include_path: A directory with YAML files of more tasks, which take precedence over those of
            lm-eval.
        num_fewshot: Number of solved examples in each prompt, unless a task fixes it to 0.

    Raises:
        DependencyError: lm-eval is not installed.
        MissingFileError: `include_path` is no directory.
        OptionError: A name matches no task; the nearest names are listed.
        DataError: Data sets cannot be read; the message lists all of them.
    """
    _require_lm_eval()
    away = why_no_hub()
    if away:
        progress_log.warning("Data sets are read from the cache alone: %s.", away)
    # All names are matched before any data are read: a misspelt last name costs seconds, not a
    # download.
    manager = _manager(names, include_path)
    matching = {name: manager.match_tasks([name]) for name in names}
    if unknown := [name for name, matches in matching.items() if not matches]:
        nearest = {name: difflib.get_close_matches(name, manager.all_tasks) for name in unknown}
        listed = [f"{name} (nearest: {', '.join(x) or 'none'})" for name, x in nearest.items()]
        raise OptionError(
            f"lm-eval has no task {'; '.join(listed)}. `lm_eval ls tasks` lists all; a directory "
            "with tasks of your own is given as `include_path`.",
            "tasks",
        )
    # One by one, so that all tasks whose data are missing are reported at once.
    loaded: list[Any] = []
    tasks: dict[str, Any] = {}
    missing = []
    for name in dict.fromkeys(name for matches in matching.values() for name in matches):
        try:
            with hub_away() if away else nullcontext():
                content = manager.load([name])
        except (OSError, ValueError) as error:  # ConnectionError and FileNotFoundError are OSErrors
            config = manager.task_index[name].cfg or {}
            parts = [config.get("dataset_path"), config.get("dataset_name")]
            missing.append(f"{name} ({' '.join(['dataset', *filter(None, parts)])}: {error})")
            continue
        tasks |= content["tasks"]
        for task in content["tasks"].values():
            # A task that fixes 0 examples keeps them out of its prompt.
            if task.get_config("num_fewshot") != 0:
                task.set_config(key="num_fewshot", value=num_fewshot)
        group = content.get("groups", {}).get(name)
        # A group stays whole, so that lm-eval aggregates its members as the group asks for.
        loaded += [group] if group is not None else content["tasks"].values()
    if missing:
        raise DataError(
            f"the data of these tasks cannot be read: {'; '.join(missing)}. "
            "`datasets.load_dataset` downloads them, on a machine with a network, into "
            "~/.cache/huggingface (`HF_HOME`), which can be copied here; or describe local files "
            "of the same schema as YAML tasks and name their directory with `include_path`.",
            "tasks",
        )
    return Tasks(manager, loaded, tasks)


def evaluate(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase | None",
    tasks: Tasks,
    *,
    batch_size: int | str = 8,
    limit: int | None = None,
    bootstrap_iters: int = 1000,
) -> dict[str, Any]:
    """Run tasks on the device where the model is.

    A context longer than the model's number of positions is truncated on the left, as usual in
    lm-eval.

    Args:
        model: A causal language model.
        tokenizer: The tokenizer of the model; `None` raises a DataError.
        tasks: The result of `load_tasks`.
        batch_size: Requests a batch, or `auto` for as many as fit. It affects only rounding.
        limit: The number of samples of each task, `None` for all.
        bootstrap_iters: Resamples for the standard errors that have no closed form.

    Returns:
        lm-eval's results, without the samples, and under `checksums` the CRC-32 of each task's
        requests: prompts and answers of all samples. It distinguishes tasks of one name.

    Raises:
        DataError: The model comes without a tokenizer.
        DependencyError: lm-eval is not installed.
    """
    if tokenizer is None:
        raise DataError(
            "Zero-shot tasks are texts, but the model comes without a tokenizer. Save one beside "
            "the model: `AutoTokenizer.from_pretrained(...).save_pretrained(DIR)`."
        )
    _require_lm_eval()
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    with _only_errors("lm_eval.models.huggingface"):  # it warns that the model is loaded already
        adapter = HFLM(
            pretrained=model,
            tokenizer=tokenizer,
            batch_size=batch_size,
            backend="causal",
        )
    with _one_process():
        results: dict[str, Any] = simple_evaluate(
            model=adapter,
            tasks=tasks.loaded,
            task_manager=tasks.manager,
            limit=limit,
            # The standard deviation of one sample is undefined: lm-eval would divide by zero.
            bootstrap_iters=0 if limit == 1 else bootstrap_iters,
            log_samples=False,
        )
    checksums = {name: _checksum(task) for name, task in tasks.by_name.items()}
    return {**results, "checksums": checksums}


def summarize(results: Mapping[str, Any]) -> dict[str, Scores]:
    """Return metrics, standard errors, sizes and checksums by task, as in `evaluation.json`.

    A metric that lm-eval computes after a filter is called `metric,filter`. Members of a group that
    has metrics itself get a `depth`.
    """
    summary: dict[str, Scores] = {}
    groups, checksums = results.get("group_subtasks", {}), results.get("checksums", {})
    for task, row in results["results"].items():
        scores: dict[str, float | int | None] = {}
        for key, value in row.items():
            # lm-eval's keys are `metric,filter`; those without a comma are no metrics, such as
            # `alias`.
            metric, comma, filter_name = key.partition(",")
            if comma and isinstance(value, int | float):  # a missing standard error is "N/A"
                scores[metric if filter_name == "none" else key] = float(value)
        if not scores:
            continue  # a group without metrics of its own
        if samples := _samples(task, results):
            scores["samples"] = samples
        if task in results["n-shot"]:
            scores["num_fewshot"] = results["n-shot"][task]
        if task in checksums:  # a group has none, nor have results of lm-eval itself
            scores["checksum"] = checksums[task]
        summary[task] = scores
    depths = {task: _depth(task, groups, summary) for task in summary}
    return {
        task: {**scores, "depth": depths[task]} if depths[task] else scores
        for task, scores in summary.items()
    }


def _checksum(task: Any) -> int:
    """Return the CRC-32 of the requests of a task, which were built before."""
    value = 0
    for request in task.instances:
        parts = [request.doc_id, request.request_type, request.arguments]
        value = crc32(json.dumps(parts, default=str).encode(), value)
    return value


def _samples(task: str, results: Mapping[str, Any]) -> int:
    """Return the number of samples of a task, or of all members of a group."""
    if task in results["n-samples"]:
        return int(results["n-samples"][task]["effective"])
    return sum(_samples(x, results) for x in results.get("group_subtasks", {}).get(task, []))


def _depth(task: str, groups: Mapping[str, Sequence[str]], scored: Collection[str]) -> int:
    """Return the nesting depth of a task: the number of scored groups that contain it."""
    around = [group for group, members in groups.items() if task in members]
    # A task may be in several groups: the longest chain counts. Groups without scores have no row
    # to be indented under.
    return max(((group in scored) + _depth(group, groups, scored) for group in around), default=0)


def _require_lm_eval() -> None:
    """Import lm-eval, and accelerate, which it needs to run Hugging Face models."""
    with extra("zeroshot", "Running zero-shot tasks"):
        import lm_eval.models.huggingface  # noqa: F401


def _manager(names: Sequence[str], include_path: str | PathLike[str] | None) -> Any:
    """Return lm-eval's index of tasks, with its own 14,000 only if needed: they take seconds."""
    from lm_eval.tasks import TaskManager

    if include_path is None:
        return TaskManager()
    path = Path(include_path).expanduser()
    if not path.is_dir():
        raise MissingFileError(f"there is no directory {include_path}.", "include_path")
    user_tasks = TaskManager(include_path=path, include_defaults=False)
    return (
        user_tasks if set(names) <= set(user_tasks.all_subtasks) else TaskManager(include_path=path)
    )


@contextmanager
def _one_process() -> Iterator[None]:
    """Prevent lm-eval from forking processes, which can hang once torch has started threads."""
    value = os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        yield
    finally:
        if value is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = value


@contextmanager
def _only_errors(name: str) -> Iterator[None]:
    """Let a logger show only errors in this context."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
