"""`mrp-lightning zeroshot MODEL`: run tasks of EleutherAI's lm-eval and record the scores.

The prompts, the scores and their standard errors are lm-eval's own, so that values compare with
published ones.
"""

import json
import os
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from zlib import crc32

from mrp_lightning.commands.command import (
    CommandParser,
    add_model_options,
    check_model,
    number_from,
)
from mrp_lightning.environment import extra, progress_log, require_extra, why_no_hub
from mrp_lightning.errors import DataError, MissingFileError, OptionError
from mrp_lightning.records import evaluation
from mrp_lightning.records.evaluation import Scores
from mrp_lightning.storage.files import save_text
from mrp_lightning.upstream.other_names import hub_away

if TYPE_CHECKING:
    from mrp_lightning.loop.causal_lm import CausalLM

PAPER_TASKS = ("lambada_openai", "hellaswag", "piqa", "arc_easy", "arc_challenge", "winogrande")
"""The tasks of the paper's table of Mamba models."""


@dataclass(frozen=True)
class Tasks:
    """Tasks and groups with their data, and lm-eval's manager of them, for any number of models."""

    manager: Any
    loaded: list[Any]
    by_name: Mapping[str, Any]
    """All tasks, including the members of groups."""

    def checksums(self) -> dict[str, int]:
        """Return the CRC-32 of each task's prompts and answers, over all of its samples."""
        for task in self.by_name.values():
            task.build_all_requests()
        return {name: _checksum(task) for name, task in self.by_name.items()}


def load_tasks(
    names: Sequence[str],
    *,
    include_path: str | os.PathLike[str] | None = None,
) -> Tasks:
    """Find tasks or groups of lm-eval by name, and read their data; no prompt has examples.

    Args:
        names: The names; `*` and `?` are wildcards.
        include_path: A directory with YAML files of more tasks, which take precedence.

    Raises:
        DependencyError: lm-eval is not installed.
        MissingFileError: `include_path` is no directory.
        OptionError: A name matches no task; the nearest names are listed. Or its YAML file is
            wrong.
        DataError: Data sets cannot be read; the message lists all of them.
    """
    with extra("zeroshot", "Running zero-shot tasks"):
        import lm_eval.models.huggingface  # noqa: F401  (needs accelerate, too)
        from lm_eval.tasks import TaskManager
    path = None if include_path is None else Path(include_path).expanduser()
    if path is not None and not path.is_dir():
        raise MissingFileError(f"there is no directory {include_path}.", "include_path")
    manager = TaskManager(include_path=path, include_defaults=path is None)
    if not set(names) <= set(manager.all_subtasks):  # lm-eval's own index takes seconds
        manager = TaskManager(include_path=path)
    # All names are matched before any data are read: a misspelt last name costs no download.
    matching = {name: manager.match_tasks([name]) for name in names}
    if unknown := [name for name, matches in matching.items() if not matches]:
        nearest = {name: get_close_matches(name, manager.all_tasks) for name in unknown}
        listed = [f"{name} (nearest: {', '.join(x) or 'none'})" for name, x in nearest.items()]
        raise OptionError(
            f"lm-eval has no task {'; '.join(listed)}. `lm_eval ls tasks` lists all; a directory "
            "with tasks of your own is given as `include_path`.",
            "tasks",
        )
    if away := why_no_hub():
        progress_log.warning("Data sets are read from the cache alone: %s.", away)
    tasks: dict[str, Any] = {}
    loaded: list[Any] = []
    missing = []
    for name in dict.fromkeys(chain(*matching.values())):
        try:
            with hub_away() if away else nullcontext():
                content = manager.load([name])
        except (OSError, ValueError) as error:  # ConnectionError and FileNotFoundError are OSErrors
            data = (manager.task_index[name].cfg or {}).get("dataset_path")
            missing.append(f"{name} (dataset {data}: {error})")
            continue
        except Exception as error:  # of many types: an unknown column or metric of a YAML file
            raise OptionError(
                f"lm-eval cannot make {name} of its YAML file: {type(error).__name__}: {error}. "
                "Correct that file.",
                "tasks",
            ) from error
        tasks |= content["tasks"]
        # A group stays whole, so that lm-eval aggregates its members as the group asks for.
        group = content["groups"].get(name)
        loaded += content["tasks"].values() if group is None else [group]
    if missing:
        raise DataError(
            f"the data of these tasks cannot be read: {'; '.join(missing)}. "
            "`datasets.load_dataset` downloads them, on a machine with a network, into "
            "~/.cache/huggingface (`HF_HOME`), which can be copied here; or describe local files "
            "of the same schema as YAML tasks and name their directory with `include_path`.",
            "tasks",
        )
    for task in tasks.values():  # some have solved examples in each prompt by default
        task.set_config(key="num_fewshot", value=0)
    return Tasks(manager, loaded, tasks)


def evaluate(
    model: "CausalLM", tasks: Tasks, *, batch_size: int | str = 8, limit: int | None = None
) -> dict[str, Any]:
    """Run tasks on the device where a model is; return lm-eval's results and their `checksums`.

    `batch_size` may be `auto`, and affects only rounding; of each task, `limit` samples are taken.
    A model without a tokenizer raises a DataError.
    """
    if model.tokenizer is None:
        raise DataError(
            "Zero-shot tasks are texts, but the model comes without a tokenizer. Save one beside "
            "the model: `AutoTokenizer.from_pretrained(...).save_pretrained(DIR)`."
        )
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    # lm-eval resamples in forked processes, which can hang once torch has threads.
    with patch.dict(os.environ, DISABLE_MULTIPROC="1"):
        results: dict[str, Any] = simple_evaluate(
            model=HFLM(model.model, tokenizer=model.tokenizer, batch_size=batch_size),
            tasks=tasks.loaded,
            task_manager=tasks.manager,
            limit=limit,
            # Resamples for the standard errors that have no closed form. Of one sample, the
            # standard deviation is undefined: lm-eval would divide by zero.
            bootstrap_iters=0 if limit == 1 else 1000,
            log_samples=False,
        )
    checksums = {name: _checksum(task) for name, task in tasks.by_name.items()}
    return {**results, "checksums": checksums}


def _checksum(task: Any) -> int:
    """Return the CRC-32 of the requests of a task, which were built before."""
    parts = ((x.doc_id, x.request_type, x.arguments) for x in task.instances)
    return crc32("".join(json.dumps(part, default=str) for part in parts).encode())


def summarize(results: Mapping[str, Any]) -> dict[str, Scores]:
    """Return metrics, standard errors, sizes and checksums by task, as in `evaluation.json`.

    The results are those of `evaluate`, which are lm-eval's with `checksums`. A metric that lm-eval
    computes after a filter is called `metric,filter`. Members of groups that have metrics
    themselves get a `depth`, the number of these groups.
    """
    summary: dict[str, dict[str, Any]] = {}
    for task, row in results["results"].items():
        # lm-eval's keys are `metric,filter`; others, such as `alias`, are no metrics. A missing
        # standard error is "N/A".
        scores = {
            key.removesuffix(",none"): float(value)
            for key, value in row.items()
            if "," in key and isinstance(value, int | float)
        }
        if scores:  # a group without metrics of its own has none
            sizes = [results["n-samples"].get(x) for x in {task, *_members(results, task)}]
            scores["samples"] = sum(size["effective"] for size in sizes if size)
            facts = {"num_fewshot": results["n-shot"], "checksum": results.get("checksums", {})}
            summary[task] = scores | {key: x[task] for key, x in facts.items() if task in x}
    depths = Counter(member for task in summary for member in set(_members(results, task)))
    for task in depths.keys() & summary.keys():
        summary[task]["depth"] = depths[task]
    return {**summary}


def _members(results: Mapping[str, Any], group: str) -> Iterator[str]:
    """Yield the tasks and groups that a group of tasks contains, also by other groups."""
    for member in results.get("group_subtasks", {}).get(group, []):
        yield member
        yield from _members(results, member)


def main(args: Sequence[str] | None = None) -> None:
    """Evaluate, print a table, and write the results; `load_tasks` and `CausalLM` list errors."""
    parser = _parser()
    options = parser.parse_args(args)
    require_extra("zeroshot", "Running zero-shot tasks")
    check_model(options.model, options.gguf_file)
    with parser.options_in_messages():
        _run(options)


def _run(options: Namespace) -> None:
    # Imported late, since help and mistakes need not wait for torch, Lightning and transformers.
    from mrp_lightning.devices import device_named
    from mrp_lightning.loop.causal_lm import CausalLM
    from mrp_lightning.models.gguf import located
    from mrp_lightning.models.loading import load_config

    # Outputs, records, configuration and tasks are checked before the weights are loaded.
    device = device_named(options.device)
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise OptionError("expected names of tasks, separated by commas.", "tasks")
    out = options.out and options.out.absolute()
    if out and (out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK)):
        raise OptionError(f"expected a file in a directory that can be written. Got {out}.", "out")
    source = located(options.model, options.gguf_file, options.revision)
    directory = Path(source).expanduser()
    has_record = (directory / evaluation.NAME).exists()
    recorded = evaluation.read(directory) if has_record else evaluation.Evaluation()
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    load_config(source, **hub)
    tasks = load_tasks(names, include_path=options.include_path)
    from lm_eval.utils import handle_non_serializable, make_table

    model = CausalLM(source, dtype=options.dtype, **hub).to(device)
    results = evaluate(model, tasks, batch_size=options.batch_size, limit=options.limit)
    summary = summarize(results)
    print(make_table(results))
    if (mean := evaluation.mean_accuracy(summary)) is not None:
        by_length = " and ".join(sorted(evaluation.BY_LENGTH & summary.keys()))
        of = f", of acc_norm of {by_length} and acc of the others" if by_length else ""
        print(f"mean accuracy: {mean:.4f}{of}")
    if out:
        content = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        save_text(out, f"{content}\n")
        print(f"lm-eval's results are in {options.out}")
    if directory.is_dir() and os.access(directory, os.W_OK):
        # A quick look with `--limit` must not replace the result of all samples.
        sizes = {task: recorded.zeroshot.get(task, {}).get("samples") or 0 for task in summary}
        fuller = {task: n for task, n in sizes.items() if n > (summary[task]["samples"] or 0)}
        added = {task: scores for task, scores in summary.items() if task not in fuller}
        print(f"Recorded in {evaluation.record(directory, zeroshot=added, model=source)}")
        for task, n in fuller.items():
            print(f"but for {task}: {n} samples are recorded there, these were fewer")
    elif not out:
        print(
            f"Not recorded: {source} is no local directory that can be written. "
            "`--out FILE` keeps the results."
        )


def _parser() -> Any:
    parser = CommandParser(
        "mrp-lightning zeroshot",
        "Run tasks of lm-eval on a dense, pruned or packed checkpoint. The results are "
        "added to evaluation.json in its directory.",
    )
    add_model_options(parser)
    option, tasks = parser.add_argument, ",".join(PAPER_TASKS)
    text = f"tasks or groups of lm-eval, * is a wildcard (default: {tasks})"
    option("--tasks", default=tasks, metavar="NAME,NAME", help=text)
    option("--include-path", metavar="DIR", help="YAML files of more tasks")
    text = "requests at once, or auto: as many as fit (default: 8)"
    option("--batch-size", type=_batch_size, default=8, metavar="N", help=text)
    text = "only N samples a task, for a quick look"
    option("--limit", type=number_from(1), metavar="N", help=text)
    option("--device", help="where to run (default: cuda if present)")
    option("--dtype", help="of the weights (default: as stored)")
    option("--out", type=Path, metavar="FILE", help="all that lm-eval returns, as JSON")
    return parser


def _batch_size(text: str) -> int | str:
    return text if text == "auto" else number_from(1)(text)
