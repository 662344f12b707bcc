"""`mrp-lightning distill RUN`: train what a pruning kept until it predicts as the dense model."""

import math
import shlex
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrp_lightning.commands.command import (
    CommandParser,
    check_directory,
    check_output,
    check_text,
    number_from,
)
from mrp_lightning.errors import OptionError
from mrp_lightning.models.locations import require_model

if TYPE_CHECKING:
    from mrp_lightning.commands.distillation import Distilled
    from mrp_lightning.distillation.module import Distillation

_DESCRIPTION = (
    "Train the kept weights of a pruned model against its dense model, on text that the dense "
    "model writes and on yours; the removed weights stay zero. The step that is best on held-out "
    "text is saved, and an interrupted run goes on."
)
_OWN = "self"
_OF_RUN = (
    *("run", "teacher", "train_files", "tokens", "sequence_length", "batch_size"),
    *("learning_rate", "seed", "dtype", "moment_bits", "precision", "text_column"),
)
"""The options that decide the result: an unfinished run of others is not gone on with."""


def main(args: list[str]) -> None:
    """Distil a pruned model, and print its divergence and perplexity before and after.

    Raises:
        OptionError: Options contradict each other, the run is on a grid of few bits, or an
            unfinished run of other options is in the way; before a model is loaded.
        FormatError: RUN has no report of a pruning that can be read.
    """
    parser = _parser()
    options = parser.parse_args(args)
    with parser.options_in_messages():
        check_directory(options.run, "RUN")
        own_alone = options.train_files == [_OWN]
        check_text(None if own_alone else options.train_files, options.text_column)
        rate = options.learning_rate
        if rate is not None and not 0 < rate < math.inf:
            raise OptionError(f"expected a finite rate > 0. Got {rate:g}.", "learning_rate")
        # Imported late, since help and mistakes need not wait for Lightning and transformers.
        from mrp_lightning.environment import quiet_lightning
        from mrp_lightning.signals import interruptible, unclaimed_signals

        _complete(options)
        check_output(options.save_dir, overwrite=options.overwrite)
        with interruptible(unclaimed_signals()), quiet_lightning():
            _distil(parser, options)


def _complete(options: Namespace) -> None:
    """Set the options that follow from the pruning where they are not given.

    Raises:
        OptionError: The run cannot be distilled, or its dense model or text is gone.
    """
    from mrp_lightning.records.report import (
        NAME,
        PruningReport,
        dense_model_of,
        is_of_vocabulary_alone,
    )
    from mrp_lightning.storage.files import output_path

    run = options.run = output_path(options.run)
    if not (run / NAME).is_file():
        raise OptionError(f"expected the directory of a pruning, with {NAME}. Got {run}.", "RUN")
    report = PruningReport.load(run / NAME)
    if is_of_vocabulary_alone(report.config):
        raise OptionError(
            f"the vocabulary of {run} was cut, and nothing pruned, so that there is nothing to win "
            "back. Prune it, and distil the result.",
            "RUN",
        )
    if report.amount.grids:
        raise OptionError(
            f"{run} is on a grid of few bits, which training would leave. Distil the pruning "
            "without bits, and then put what is kept on the grid, with the pattern or sparsity of "
            "the pruning: `mrp-lightning prune RUN-distilled --pattern 2:4 --bits 4`.",
            "RUN",
        )
    if report.vocabulary and options.teacher is None:
        raise OptionError(
            f"the vocabulary of {run} was cut in the run that pruned it, so that its dense model "
            "has another one. Cut the vocabulary alone first, prune the result, and distil that; "
            "or name a dense model of the same vocabulary.",
            "teacher",
        )
    options.teacher = options.teacher or dense_model_of(report)
    if options.teacher is None:
        raise OptionError(f"{run / NAME} does not name the dense model. Name it.", "teacher")
    try:
        require_model(options.teacher)
    except FileNotFoundError as error:
        raise OptionError(
            f"the dense model of {run} is not there: {options.teacher}. Name its directory or hub "
            "id.",
            "teacher",
        ) from error
    if output_path(options.teacher) == run:
        raise OptionError(
            "it is RUN itself, which cannot learn from its own predictions. Name the dense model.",
            "teacher",
        )
    data = report.provenance.get("data") or {}
    if options.train_files is None:
        options.text_column = options.text_column or data.get("text_column")
    options.train_files = _text_of(options, data)
    check_text(options.train_files, options.text_column)
    options.save_dir = output_path(options.save_dir or run.with_name(f"{run.name}-distilled"))


def _text_of(options: Namespace, data: Mapping[str, Any]) -> list[str] | None:
    """Return the files of the option or, without it, of the pruning; `None` for own text alone."""
    if options.train_files == [_OWN]:
        if options.text_column is not None:
            raise OptionError(
                f"names a column of files, and `--text {_OWN}` reads none. Leave it out, or give "
                "files.",
                "text_column",
            )
        return None
    if options.train_files is not None:
        return list(options.train_files)
    files: list[str] | None = data.get("files")
    gone = [file for file in files or [] if not Path(file).exists()]
    if gone:
        raise OptionError(
            f"the text of the pruning is gone: {', '.join(gone)}. Give files, or `--text {_OWN}`, "
            "with which all text is the teacher's own.",
            "train_files",
        )
    return files or None


def _distil(parser: CommandParser, options: Namespace) -> None:
    """Train, save and report."""
    from mrp_lightning.commands.distillation import (
        Unfinished,
        dense_dtype,
        distil,
        fast_precision,
        state_of,
        state_of_model,
    )
    from mrp_lightning.distillation.module import Distillation
    from mrp_lightning.distillation.text import DistillationText
    from mrp_lightning.loop.trainer import require_accelerator
    from mrp_lightning.models.loading import load_config
    from mrp_lightning.terminal import Console

    require_accelerator(options.accelerator)
    run, files = options.run, options.train_files
    console = Console(width=None if sys.stdout.isatty() else 100)
    data = DistillationText(
        files,
        tokens=options.tokens,
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        seed=options.seed,
        **({"text_column": options.text_column} if options.text_column else {}),
    )
    options.precision = options.precision or fast_precision(options.accelerator)
    chosen = parser.by_option(options, _OF_RUN)
    chosen |= {
        "content of RUN": state_of_model(run),
        "content of the dense model": state_of_model(options.teacher),
        "content of the text": state_of(data.local_files("predict")),
    }
    unfinished = Unfinished.of(options.save_dir, chosen, restart=options.restart)
    console.print(f"Loading {run} and {options.teacher} …")
    module = Distillation(
        run,
        options.teacher,
        dtype=options.dtype,
        teacher_dtype=dense_dtype(options.precision),
        learning_rate=options.learning_rate,
        moment_bits=options.moment_bits,
    )
    own = "text that the teacher writes"
    text = f"half {own}, half {', '.join(map(str, files))}" if files else own
    console.print(
        f"{data.steps} steps of {options.batch_size} windows of {options.sequence_length} tokens: "
        f"{text}. {_fit(module, options)} If it is interrupted, the same command goes on where it "
        "was."
    )
    with unfinished.begun():
        result = distil(
            module,
            data,
            options.save_dir,
            dtype=str(load_config(str(run)).dtype or "float32").removeprefix("torch."),
            overwrite=options.overwrite,
            unfinished=unfinished.directory,
            precision=options.precision,
            accelerator=options.accelerator,
        )
    _report(result, options, console)


def _fit(module: "Distillation", options: Namespace) -> str:
    """Return the sentence of `fit_memory`, with the options that need less if it does not fit."""
    from mrp_lightning.commands.distillation import fit_memory

    tokens = options.batch_size * options.sequence_length
    text, fits = fit_memory(
        module, tokens, precision=options.precision, accelerator=options.accelerator
    )
    if not fits:
        advice = ["`--dtype bfloat16`"] if options.dtype != "bfloat16" else []
        advice += ["`--moment-bits 8`"] if options.moment_bits != 8 else []
        text += f" Give {' and '.join([*advice, 'a smaller `--batch-size`'])}."
    return text


def _report(result: "Distilled", options: Namespace, console: Any) -> None:
    """Print the figures of the held-out text before and after."""
    from rich.table import Table

    from mrp_lightning.commands.numbers import number, perplexity
    from mrp_lightning.records.report import NAME, PruningReport

    table = Table()
    for column in ("held-out text", "KL before", "after", "perplexity before", "after", "dense"):
        table.add_column(column, justify="right")
    start, end = result.start, result.end
    names = sorted(name.partition("/")[2] for name in end if name.startswith("val_kl"))
    for name in [name for name in names if name] or [""]:
        text = f"/{name}" if name else ""
        table.add_row(
            name or "all",
            *(number(figures.get(f"val_kl{text}")) for figures in (start, end)),
            *(perplexity(figures.get(f"perplexity{text}")) for figures in (start, end)),
            perplexity(end.get(f"teacher{text}")),
        )
    console.print(table)
    out = shlex.quote(str(options.save_dir))
    is_narrower = bool(PruningReport.load(options.run / NAME).narrowed)
    console.print(
        f"{result.tokens:,} tokens in {result.steps} steps and {result.seconds:.0f} s; the weights "
        f"are those after step {result.best_step}.\nThe model is in {options.save_dir}. Next:\n"
        f"  mrp-lightning {'gguf' if is_narrower else 'export'} {out}",
        soft_wrap=True,
    )


def _parser() -> CommandParser:
    parser = CommandParser("mrp-lightning distill", _DESCRIPTION)
    option, number = parser.add_argument, number_from(1)
    option("run", metavar="RUN", help="the directory of a pruned model")
    text = "the dense model (default: what RUN was pruned from, in one run or in several)"
    option("--teacher", metavar="MODEL", help=text)
    text = "files to train on in half of the steps, in the others text of the teacher's own; self "
    text += "for its own alone (default: what RUN was calibrated on); a tenth is held out"
    option("--text", dest="train_files", nargs="+", metavar="FILE", help=text)
    option("--text-column", metavar="NAME", help="the key of the text in .jsonl files and tables")
    text = "the number of tokens to train on (default: 200000)"
    option("--tokens", type=number, default=200_000, metavar="N", help=text)
    text = "tokens a window (default: 512)"
    option("--sequence-length", type=number_from(2), default=512, metavar="N", help=text)
    text = "windows a step (default: 2)"
    option("--batch-size", type=number, default=2, metavar="N", help=text)
    text = "the peak rate, relative to the size of the weights (default: 1.6e-3, and 8e-4 for a "
    text += "model of 300 million weights or more)"
    option("--learning-rate", type=float, metavar="RATE", help=text)
    option("--seed", type=number_from(0), default=0, metavar="N", help="seed of the windows")
    text = "the type of the weights in training: float32 (default), or bfloat16 for less memory"
    option("--dtype", default="float32", choices=["float32", "bfloat16"], help=text)
    text = "the bits of each of the optimizer's two moments of a weight: 32 (default), or 8, for "
    text += "less memory (needs torchao)"
    option("--moment-bits", type=int, default=32, choices=[32, 8], help=text)
    text = "that of the products (default: bf16-mixed where the device multiplies bfloat16 faster "
    text += "than float32, 32-true elsewhere)"
    option("--precision", choices=["32-true", "bf16-mixed"], help=text)
    text = "the directory of the result (default: RUN-distilled)"
    option("--out", dest="save_dir", type=Path, metavar="DIR", help=text)
    text = "replace what this package wrote there before"
    option("--overwrite", action="store_true", help=text)
    text = "begin afresh, without the results of an unfinished run"
    option("--restart", action="store_true", help=text)
    option("--accelerator", default="auto", help="cpu, gpu, mps or auto (default)")
    return parser
