"""One pruning and its comparison with the dense model, on the same windows of held-out text."""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.commands.distillation import DistilledPruning
from mrp_lightning.commands.main import command_named
from mrp_lightning.commands.numbers import memory, number, percent, perplexity
from mrp_lightning.commands.quiet import quiet_lightning
from mrp_lightning.commands.subject import Subject
from mrp_lightning.commands.vocabulary import cut_words
from mrp_lightning.errors import OptionError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import plan_for
from mrp_lightning.loop.progress import roughly
from mrp_lightning.loop.pruned_module import check_save_dir
from mrp_lightning.loop.text_model import TextModel
from mrp_lightning.loop.trainer import require_accelerator
from mrp_lightning.loop.vocabulary import save_cut
from mrp_lightning.narrowing.structure import BLOCKS
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.evaluation import Scores, record
from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.targets.plan import Plan
from mrp_lightning.terminal import Console

_USELESS_RATIO = 3.0
"""The ratio of perplexities above which a pruned model is of little use."""
_USELESS_COSINE = 0.5
"""The mean cosine below which outputs point elsewhere: the angle is above 60°."""


@dataclass(frozen=True)
class Conversion:
    """A command that converts a pruned model, the path that it writes, and its other options."""

    command: str
    out: Path
    options: Sequence[str]

    def check(self, model: CausalLM | TextModel) -> None:
        """Raise if the command would refuse its output or the model, hours later."""
        overwrite = "--overwrite" in self.options
        if self.command == "export":
            check_output_dir(self.out, overwrite=overwrite, argument="--pack")
        elif self.out.exists() and not overwrite:
            raise FileExistsError(f"{self.out} exists. Name another, or add `--overwrite`.")
        elif isinstance(model, TextModel):
            raise OptionError(
                f"a {type(model.model).__name__} predicts no next token, and files for llama.cpp "
                "are made of models that do. Leave it out.",
                "gguf",
            )

    def words(self, directory: Path) -> list[str]:
        """Return the words of the command line after the program's."""
        return [self.command, str(directory), "--out", str(self.out), *self.options]

    def convert(self, directory: Path, console: Console) -> int:
        """Run the command, which is shown if it fails; return the bytes of the weights."""
        try:
            command_named(self.command)(self.words(directory)[1:])
        except (Exception, SystemExit):  # a command exits after a mistake
            again = shlex.join(self.words(directory))
            line = f"The model is saved. What failed is: mrp-lightning {again}"
            console.print(line, soft_wrap=True)
            raise
        files = [file for kind in ("safetensors", "bin") for file in self.out.glob(f"*.{kind}")]
        return sum(file.stat().st_size for file in files or [self.out])


@dataclass(frozen=True, kw_only=True)
class Job:
    """The steps of one command, each of which may be left out.

    Attributes:
        source: The arguments of `CausalLM` that name the model.
        text: The arguments of the `TextDataModule`; see `Subject`.
        windows: The largest number of windows to evaluate on.
        accelerator: The accelerator, as Lightning names it.
        out: The directory of the result.
        overwrite: Whether it may be replaced.
        words: The number of words to which the vocabulary is cut first. Pruned and dense model are
            then those of these words.
        prune: The callback that prunes, with `save_dir=out`.
        distilled: The distillation after the pruning.
        conversions: The conversions of the result to other formats.
    """

    source: Mapping[str, Any]
    text: Mapping[str, Any]
    windows: int
    accelerator: str
    out: Path
    overwrite: bool = False
    words: int | None = None
    prune: PruningCallback | None = None
    distilled: DistilledPruning | None = None
    conversions: Sequence[Conversion] = field(default_factory=list)


def run(job: Job, console: Console) -> str | None:
    """Evaluate a model, prune it, save it, evaluate it again, convert it, and print the results.

    Arguments and text are checked before the first evaluation. `evaluation.json`, in the directory
    of the result, has the scores, too.

    Returns:
        The reason why the result is of no use, `None` if it may be useful.

    Raises:
        OptionError: The accelerator is missing, or the number of words out of range; `Subject`
            raises more.
        TargetError: The vocabulary cannot be cut.
        FileExistsError: The output, or that of a conversion, exists.
    """
    require_accelerator(job.accelerator)
    # Each step needs the one before: the plan a model, the estimate the speed of an evaluation.
    with quiet_lightning():
        console.print(f"Loading {job.source['model']} …")
        subject = Subject(job.source, job.text, job.windows, job.accelerator)
        check_save_dir(job.out, subject.model, overwrite=job.overwrite, argument="--out")
        for conversion in job.conversions:
            conversion.check(subject.model)
        if job.words is not None:
            if job.prune is not None:
                plan_for(subject.model, job.prune.settings)  # refuses before the cut
            scores = cut_words(subject, job.words, console)
        if job.prune is None:
            assert isinstance(subject.model, CausalLM)  # else its words cannot be cut
            save_cut(subject.model, job.out, overwrite=job.overwrite)
            record(job.out, perplexity={subject.text: scores}, model=str(job.out))
            table = problem = None
        else:
            table, problem = _prune(subject, job.prune, job.distilled, console)
    try:
        for conversion in job.conversions:
            size = memory(conversion.convert(job.out, console))
            if table is None:
                console.print(f"{conversion.out}: {size}")
            else:
                table.add_row(str(conversion.out), "", "", "", size)
    finally:  # also if a conversion fails: the model is saved
        if table is not None:
            read = f"{counted(len(subject.windows), 'window')} of {subject.windows.ids.shape[1]}"
            console.print(table, f"Evaluated on {read} tokens of the {subject.text}.")
    return problem


def _prune(
    subject: Subject, prune: PruningCallback, distilled: DistilledPruning | None, console: Console
) -> tuple[Table, str | None]:
    """Prune and distil; return the table of the results, and why they are of no use, if so."""
    assert prune.save_dir is not None
    settings, plan = prune.settings, subject.plan(prune.settings)
    if distilled is not None:
        distilled.check(subject.model, subject.data)
    console.print(_announcement(subject, plan, settings))
    # The dense evaluation comes before the pruning, which changes the model in memory.
    dense, sizes = subject.evaluate("dense model", console), [subject.num_bytes]
    console.print(_expectation(subject, plan, settings))
    start = time.perf_counter()
    first = prune if distilled is None else distilled.pruning()
    if first.report is None:
        subject.trainer.predict(subject.model, datamodule=subject.data, callbacks=[first])
    else:
        subject.model = CausalLM(str(first.save_dir))
    pruned = final = subject.evaluate("pruned model", console)
    if distilled is not None:
        subject.model = distilled.finish(first, subject.trainer, subject.data)
        final = subject.evaluate("distilled model", console)
    seconds = time.perf_counter() - start
    sizes.append(subject.num_bytes)
    report = PruningReport.load(prune.save_dir / NAME)
    table = _table(dense, pruned, first.settings, report, sizes, seconds)
    if distilled is not None:
        table.add_row(f"{amount(settings)}, distilled", *_quality(dense, final))
    scores = {"perplexity": {subject.text: final}, "dense": {subject.text: dense}}
    if isinstance(subject.model, TextModel):
        scores = {"similarity": {subject.text: final}}
    record(prune.save_dir, **scores, model=str(prune.save_dir))
    return table, why_useless(dense, final)


def _announcement(subject: Subject, plan: Plan, settings: Settings) -> str:
    """Return a sentence on the layers, the settings and the text of the pruning."""
    verb = "quantised" if isinstance(settings.recipe.pattern, Dense) else "pruned"
    text = f"{subject.data.calibration_source}."
    if not subject.has_files:
        text = "text that the model writes itself. Text that is like yours is given by `--text "
        text += "FILE`: it is then evaluated on, too."
    of_blocks = settings.structure == BLOCKS
    num = len(plan.blocks) if of_blocks else plan.num_layers
    return (
        f"{counted(num, 'block' if of_blocks else 'layer')} {'is' if num == 1 else 'are'} to "
        f"be {verb} to {amount(settings)} by {method(settings)}, calibrated on "
        f"{counted(subject.num_samples, 'window')} of {text}"
    )


def _expectation(subject: Subject, plan: Plan, settings: Settings) -> str:
    """Return a sentence on the expected time and memory."""
    work, writing = subject.estimate(plan, settings)
    part = f" ({roughly(writing.seconds)} of it to write that text)" * (not subject.has_files)
    return (
        f"Pruning may take {roughly(work.seconds)}{part} and, beside the model, "
        f"{memory(work.num_bytes)} of memory. This is a rough estimate, with an evaluation as "
        "before; small models, few bits and busy machines take longer. If it is interrupted, "
        "the same command goes on where it was."
    )


def amount(settings: Settings) -> str:
    """Return what is removed and the grid of the rest, such as `2:4+4bit`."""
    if settings.structure is None:
        return str(settings.recipe)
    of = "the blocks" if settings.structure == BLOCKS else f"their {settings.structure}"
    return f"{percent(1 - (settings.sparsity or 0))} of {of}"


def method(settings: Settings) -> str:
    """Return the method with the parts that it goes with, such as `JM, dense target, tuned`."""
    if settings.structure == BLOCKS:
        return "least change of the output"
    parts = [
        settings.method,
        "dense target" * (settings.target == "dense"),
        "allocation by output" * (settings.allocation == "output"),
        "tuned" * (settings.block_tuning is not None),
    ]
    return ", ".join(filter(None, parts))


def _table(
    dense: Scores,
    pruned: Scores,
    settings: Settings,
    report: PruningReport,
    sizes: Sequence[int],
    seconds: float,
) -> Table:
    """Return a table of both models; `seconds` is the time of pruning and writing."""
    totals, narrowed = report.totals, report.narrowed
    share = totals["removed"] / totals["model_weights"]
    if narrowed:
        share = 1 - narrowed["model_weights"] / totals["model_weights"]
    measures = [f"perplexity @{dense['context']}", "× dense"]
    if "cosine" in dense:
        measures = ["mean cosine of outputs", ""]
    table = Table()
    table.add_column("model", overflow="fold")
    for column in (*measures, "weights removed", "weights", "time"):
        table.add_column(column, justify="right")
    table.add_row("dense", _quality(dense, dense)[0], "", "", memory(sizes[0]))
    spent = roughly(max(seconds, totals["seconds"]))  # includes interrupted runs
    name = f"{amount(settings)} by {method(settings)}"
    table.add_row(name, *_quality(dense, pruned), percent(share), memory(sizes[1]), spent)
    return table


def _quality(dense: Scores, scores: Scores) -> tuple[str, str]:
    """Return the cells of a quality: the perplexity and its ratio to the dense one, or a cosine."""
    if "cosine" in scores:
        return f"{scores['cosine']:.4g}", ""
    return perplexity(scores["perplexity"]), number(_ratio(dense, scores))


def _ratio(dense: Scores, pruned: Scores) -> float:
    return (pruned["perplexity"] or math.inf) / (dense["perplexity"] or math.inf)


def why_useless(dense: Scores, pruned: Scores) -> str | None:
    """Return why a pruned model is of no use, `None` if it may be useful."""
    # The negations also catch NaN, which compares as false: a model that computes NaN is of no use.
    if "cosine" in pruned:
        cosine = pruned["cosine"] or 0.0
        is_useless = not cosine >= _USELESS_COSINE
        loss = f"The mean cosine of the outputs with those before is {number(cosine)}"
    else:
        ratio = _ratio(dense, pruned)
        is_useless = not ratio < _USELESS_RATIO
        loss = f"The perplexity is {number(ratio)} times that of the dense model"
    if not is_useless:
        return None
    return (
        f"{loss}, which is of little use. Remove less (a lower `--sparsity`, a `--pattern` that "
        "keeps more, or more bits), or lose less: `--recipe best` and calibration `--text` that is "
        "like yours."
    )
