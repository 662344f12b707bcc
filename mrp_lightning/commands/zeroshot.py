"""`mrp-lightning zeroshot MODEL`: run lm-eval's tasks on a checkpoint and keep the results."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from mrp_lightning.commands.command import add_model_options, make_parser, number_from
from mrp_lightning.errors import OptionError
from mrp_lightning.evaluation.zeroshot import PAPER_TASKS, evaluate, load_tasks, summarize
from mrp_lightning.records.evaluation import (
    BY_LENGTH,
    NAME,
    Scores,
    mean_accuracy,
    metrics,
    read,
    record,
    standard_error,
)
from mrp_lightning.terminal import Console


def main(args: Sequence[str] | None = None) -> None:
    """Evaluate, print a table, and write the results; `load_tasks` and `CausalLM` list errors."""
    parser = _parser()
    options = parser.parse_args(args)
    with parser.options_in_messages():
        _evaluate(options)


def _evaluate(options: Namespace) -> None:
    """Run the tasks of a command line on its model, then print and write the results."""
    # Imported late, since help and mistakes need not wait for torch, Lightning and transformers.
    from mrp_lightning.devices import device_named

    device = device_named(options.device)
    names = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not names:
        raise OptionError("`--tasks`: expected names of tasks, separated by commas.")
    from mrp_lightning.loop.causal_lm import CausalLM
    from mrp_lightning.models.gguf import located
    from mrp_lightning.models.loading import load_config

    options.model = located(options.model, options.gguf_file, options.revision)
    if options.out is not None:
        # Outputs, records, configuration and tasks are checked in the order of their cost, all
        # before the weights are loaded: an evaluation takes hours.
        _check_writable(options.out)
    if (Path(options.model).expanduser() / NAME).exists():
        read(Path(options.model).expanduser())  # raises early if the existing file is damaged
    hub = {"revision": options.revision, "trust_remote_code": options.trust_remote_code}
    load_config(options.model, **hub)
    tasks = load_tasks(names, include_path=options.include_path, num_fewshot=options.num_fewshot)
    model = CausalLM(options.model, dtype=options.dtype, **hub).to(device)
    results = evaluate(
        model.model, model.tokenizer, tasks, batch_size=options.batch_size, limit=options.limit
    )
    summary = summarize(results)
    _print_results(options.model, summary)
    _write(options, results, summary)


def _print_results(model: str, zeroshot: Mapping[str, Scores]) -> None:
    """Print every metric with its standard error, and the mean of the accuracies."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=model, title_justify="left")
    table.add_column("task", overflow="fold")
    for column in ("samples", "shots"):
        table.add_column(column, justify="right")
    table.add_column("metric")
    for column in ("value", "± standard error"):
        table.add_column(column, justify="right")
    for task, scores in zeroshot.items():
        sizes = [_number(scores.get(key), ",") for key in ("samples", "num_fewshot")]
        for metric, value in metrics(scores).items():
            error = standard_error(scores, metric)
            table.add_row(task, *sizes, metric, _number(value), _number(error))
            task, sizes = "", ["", ""]
    if (mean := mean_accuracy(zeroshot)) is not None:
        table.add_section()
        table.add_row("mean accuracy", "", "", "", _number(mean), "")
    console.print(table)
    if by_length := sorted(BY_LENGTH & zeroshot.keys()):
        console.print(f"The mean takes acc_norm of {' and '.join(by_length)}, acc of the others.")


def _write(options: Namespace, results: Mapping[str, Any], summary: Mapping[str, Scores]) -> None:
    """Write the results, and print where."""
    directory = Path(options.model).expanduser()
    is_writable = directory.is_dir() and os.access(directory, os.W_OK)
    if is_writable:
        there = read(directory).zeroshot if (directory / NAME).exists() else {}
        # A quick look with `--limit` must not replace the result of all samples.
        fuller = [task for task in summary if _samples(there, task) > _samples(summary, task)]
        added_tasks = {task: scores for task, scores in summary.items() if task not in fuller}
        path = record(directory, zeroshot=added_tasks, model=options.model)
        print(f"Recorded in {path}")
        for task in fuller:
            print(
                f"but for {task}: {_samples(there, task)} samples are recorded there, these were "
                f"{_samples(summary, task)}"
            )
    if options.out is not None:
        from lm_eval.utils import handle_non_serializable

        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        options.out.write_text(text + "\n", encoding="utf-8")
        print(f"lm-eval's results are in {options.out}")
    elif not is_writable:
        print(
            f"Not recorded: {options.model} is no local directory that can be written. "
            "`--out FILE` keeps the results."
        )


def _samples(zeroshot: Mapping[str, Scores], task: str) -> float:
    return zeroshot.get(task, {}).get("samples") or 0


def _number(value: float | int | None, style: str = ".4f") -> str:
    return "" if value is None else f"{value:{style}}"


def _check_writable(path: Path) -> None:
    if path.is_dir():
        raise OptionError(f"`--out`: expected a file, but {path} is a directory.")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"`--out`: there is no directory {path.parent}. Create it first.")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise PermissionError(f"`--out`: {path} cannot be written.")


def _parser() -> Any:
    parser = make_parser(
        "mrp-lightning zeroshot",
        "Run tasks of lm-eval on a dense, pruned or packed checkpoint. The results are "
        "added to evaluation.json in its directory.",
    )
    add_model_options(parser)
    option, tasks = parser.add_argument, ",".join(PAPER_TASKS)
    text = f"tasks or groups of lm-eval, * is a wildcard (default: {tasks})"
    option("--tasks", default=tasks, metavar="NAME,NAME", help=text)
    option("--include-path", metavar="DIR", help="YAML files of more tasks")
    text = "solved examples in each prompt (default: 0)"
    option("--num-fewshot", type=number_from(0), default=0, metavar="N", help=text)
    text = "requests at once, or auto: as many as fit (default: 8)"
    option("--batch-size", type=_batch_size, default=8, metavar="N", help=text)
    text = "only N samples a task, for a quick look"
    option("--limit", type=number_from(1), metavar="N", help=text)
    option("--device", help="where to run (default: cuda if present)")
    option("--dtype", help="of the weights (default: as stored)")
    option("--out", type=Path, metavar="FILE", help="all that lm-eval returns, as JSON")
    return parser


def _batch_size(text: str | int) -> int | str:
    return text if text == "auto" else number_from(1)(text)
