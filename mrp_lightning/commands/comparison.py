"""The cost of a pruning or of a cut vocabulary: a model before and after it, on held-out text."""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.commands.distillation import DistilledPruning
from mrp_lightning.commands.main import command_module, command_named
from mrp_lightning.commands.numbers import memory, number, percent, perplexity
from mrp_lightning.commands.subject import Subject
from mrp_lightning.errors import OptionError, TargetError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.progress import roughly
from mrp_lightning.loop.text_model import TextModel
from mrp_lightning.loop.vocabulary import cut_vocabulary
from mrp_lightning.narrowing.structure import BLOCKS
from mrp_lightning.narrowing.tokenizer import Vocabulary
from mrp_lightning.narrowing.vocabulary import require_cuttable
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.evaluation import Scores, record
from mrp_lightning.records.report import NAME, PruningReport, pruned_before, was_pruned
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.storage.outputs import check_output_dir, check_output_file
from mrp_lightning.targets.plan import Plan
from mrp_lightning.terminal import Console
from mrp_lightning.text.windows import Windows

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
            return
        if self.out.exists() and not overwrite:
            raise FileExistsError(f"{self.out} exists. Name another, or add `--overwrite`.")
        check_output_file(self.out, "--gguf")
        if isinstance(model, TextModel):
            raise OptionError(
                f"a {type(model.model).__name__} predicts no next token, and files for llama.cpp "
                "are made of models that do. Leave it out.",
                "gguf",
            )
        if "--like" not in self.options:
            source = model.model.name_or_path
            try:
                command_module(self.command).check_config(model.model.config, source)
            except OptionError as error:
                remedy = "Leave it out: `prune` has no --like, and `gguf` takes one for the result."
                raise OptionError(f"{error}\n{remedy}", "gguf") from error

    def convert(self, directory: Path, console: Console) -> None:
        """Run the command, which is shown if it fails, and print the size of the weights."""
        words = [str(directory), "--out", str(self.out), *self.options]
        try:
            command_named(self.command)(words)
        except (Exception, SystemExit):  # a command exits after a mistake
            again = shlex.join(["mrp-lightning", self.command, *words])
            console.print(f"The model is saved. What failed is: {again}", soft_wrap=True)
            raise
        files = [file for kind in ("safetensors", "bin") for file in self.out.glob(f"*.{kind}")]
        size = memory(sum(file.stat().st_size for file in files or [self.out]))
        console.print(f"{self.out}: {size}", soft_wrap=True)


def prune_and_compare(
    subject: Subject, prune: PruningCallback, distilled: DistilledPruning | None, console: Console
) -> str | None:
    """Evaluate a model, prune and distil it, save it, evaluate it again, and print the results.

    `evaluation.json`, in the `save_dir` of the callback, has the scores, too. Returns the reason
    why the result is of no use, `None` if it may be useful.

    Raises:
        OptionError: Distillation does not suit the model or its text. `Subject.plan` raises more.
    """
    assert prune.save_dir is not None
    settings = prune.settings
    if distilled is not None:
        distilled.check(subject.model, subject.data)
        subject.calibration = distilled.data(subject.data)
    plan = subject.plan(settings)
    console.print(_announcement(subject, plan, settings))
    # The first evaluation comes before the pruning, which changes the model in memory.
    given, state = _given(subject)
    dense, sizes = subject.evaluate(state, console), [subject.num_bytes]
    console.print(_expectation(subject, plan, settings, distils=distilled is not None))
    start = time.perf_counter()
    first = prune if distilled is None else distilled.pruning()
    if first.report is None:
        subject.trainer.predict(subject.model, datamodule=subject.calibration, callbacks=[first])
    if distilled is not None:
        assert first.save_dir is not None
        subject.model = distilled.load(first.save_dir)  # that which a resumed run distils, too
    pruned = final = subject.evaluate(f"{_done(first.settings)} model", console)
    if distilled is not None:
        assert isinstance(subject.model, CausalLM)  # else `check` has refused it
        text = distilled.data(subject.data)
        subject.model = distilled.finish(subject.model, subject.trainer, text)
        final = subject.evaluate("distilled model", console)
    seconds = time.perf_counter() - start
    sizes.append(subject.num_bytes)
    report = PruningReport.load(prune.save_dir / NAME)
    table = _table(given, dense, pruned, first.settings, report, sizes, seconds)
    if distilled is not None:
        table.add_row(f"{amount(settings)}, distilled", *_quality(dense, final))
    scores = {"perplexity": {subject.text: final}, "dense": {subject.text: dense}}
    if isinstance(subject.model, TextModel):
        scores = {"similarity": {subject.text: final}}
    record(prune.save_dir, **scores, model=str(prune.save_dir))
    read = f"{counted(len(subject.windows), 'window')} of {subject.windows.ids.shape[1]}"
    console.print(table, f"Evaluated on {read} tokens of the {subject.text}.")
    return why_useless(dense, final, state, settings.structure)


def _given(subject: Subject) -> tuple[str, str]:
    """Return two names of the model before the run, `dense` unless it was pruned earlier."""
    if was_pruned(pruned_before(str(subject.model.model.name_or_path))):
        return "before", "model before this run"
    return "dense", "dense model"


def _announcement(subject: Subject, plan: Plan, settings: Settings) -> str:
    """Return a sentence on the layers, the settings and the text of the pruning."""
    to = " to" if settings.structure is None else ":"
    text = f"{subject.source}."
    if subject.has_files and subject.calibration.own_windows:
        text = f"{subject.source} and of text that the model writes itself."
    if not subject.has_files:
        text = "text that the model writes itself. Give text like its later input by `--text "
        text += "FILE`: the model is then evaluated on it, too."
    of_blocks = settings.structure == BLOCKS
    num = len(plan.blocks) if of_blocks else plan.num_layers
    return (
        f"{counted(num, 'block' if of_blocks else 'layer')} {'is' if num == 1 else 'are'} to "
        f"be {_done(settings)}{to} {amount(settings)} by {method(settings)}, calibrated on "
        f"{counted(subject.num_samples, 'window')} of {text}"
    )


def _expectation(subject: Subject, plan: Plan, settings: Settings, *, distils: bool) -> str:
    """Return a sentence on the expected time and memory."""
    work, writing = subject.estimate(plan, settings)
    part = f" ({roughly(writing.seconds)} of it to write own text)" * bool(writing.seconds)
    more = " and without the distillation" * distils
    return (
        f"Pruning may take {roughly(work.seconds)}{part} and, beside the model, "
        f"{memory(work.num_bytes)} of memory. This is a rough estimate, with an evaluation as "
        f"before{more}; small models, few bits and busy machines take longer. If it is "
        "interrupted, the same command goes on where it was."
    )


def _done(settings: Settings) -> str:
    """Return the word for a model from which weights are removed, or for one with fewer bits."""
    return "quantised" if isinstance(settings.recipe.pattern, Dense) else "pruned"


def amount(settings: Settings) -> str:
    """Return what is removed and the grid of the rest, such as `2:4+4bit` or `20% fewer blocks`."""
    if settings.structure is None:
        return str(settings.recipe)
    return f"{percent(settings.sparsity or 0)} fewer {settings.structure}"


def method(settings: Settings) -> str:
    """Return the method with the parts that it goes with, such as `JM, dense target, tuned`."""
    if settings.structure == BLOCKS:
        return "least change of the output"
    parts = [
        settings.method,
        "dense target" * (settings.target == "dense"),
        "allocation by output" * (settings.allocation == "output"),
        "tuned" * (settings.block_tuning is not None),
        "balanced" * settings.balance,
    ]
    return ", ".join(filter(None, parts))


def _table(
    given: str,
    dense: Scores,
    pruned: Scores,
    settings: Settings,
    report: PruningReport,
    sizes: Sequence[int],
    seconds: float,
) -> Table:
    """Return a table of the `given` model, dense or before, and the pruned one.

    `seconds` is the time of pruning and writing.
    """
    totals, narrowed = report.totals, report.narrowed
    share = totals["removed"] / totals["model_weights"]
    if narrowed:
        share = 1 - narrowed["model_weights"] / totals["model_weights"]
    measures = [f"perplexity @{dense['context']}", f"× {given}"]
    if "cosine" in dense:
        measures = ["mean cosine of outputs", ""]
    table = Table()
    table.add_column("model", overflow="fold")
    for column in (*measures, "weights removed", "weights", "time"):
        table.add_column(column, justify="right")
    table.add_row(given, _quality(dense, dense)[0], "", "", memory(sizes[0]))
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


def why_useless(
    dense: Scores, pruned: Scores, state: str = "dense model", structure: str | None = None
) -> str | None:
    """Return why a pruned model is of no use, and what to do; `None` if it may be useful.

    `state` names the model with the scores `dense`, and `structure` the units that were removed.
    """
    # The negations also catch NaN, which compares as false: a model that computes NaN is of no use.
    if "cosine" in pruned:
        cosine = pruned["cosine"] or 0.0
        is_useless = not cosine >= _USELESS_COSINE
        loss = f"The mean cosine of the outputs with those before is {number(cosine)}"
    else:
        ratio = _ratio(dense, pruned)
        is_useless = not ratio < _USELESS_RATIO
        loss = f"The perplexity is {number(ratio)} times that of the {state}"
    if not is_useless:
        return None
    remedy = (
        "Remove less (a lower `--sparsity`, a `--pattern` that keeps more, or more bits), or lose "
        "less: `--recipe best` and calibration `--text` that is like yours."
    )
    if structure is not None:
        remedy = f"Remove fewer {structure} (a lower `--sparsity`)"
        remedy += "." if "cosine" in pruned else ", or train those left: `mrp-lightning distill`."
    return f"{loss}, which is of little use. {remedy}"


def cut_and_compare(subject: Subject, size: int, console: Console) -> Scores:
    """Cut the vocabulary of a model in place to `size` tokens, and print what that costs.

    It is evaluated on the same bytes of held-out text before and after; the record of the module
    gets `held_out`. Returns the scores after the cut.

    Raises:
        OptionError: The number of tokens is out of range.
        TargetError: The model is no causal language model, or its vocabulary cannot be cut.
    """
    model, data = subject.model, subject.data
    if not isinstance(model, CausalLM):
        raise TargetError(
            f"`vocabulary`: a {type(model.model).__name__} predicts no next token, so that it "
            "has no head with a row for each. Leave `--vocabulary` out."
        )
    model.tokenizer = data.tokenizer
    require_cuttable(model.model, model.tokenizer, size)
    sizes = [subject.num_bytes]
    subject.cut_windows()
    _, state = _given(subject)
    dense = _evaluate_bytes(subject, state, console)
    console.print(f"Counting the tokens of {subject.source} …")
    cut_vocabulary(model, size, data.documents("train"))
    data.tokenizer = model.tokenizer
    subject.windows = _of_as_many_bytes(subject, dense["bytes"] or 0)
    cut = _evaluate_bytes(subject, f"model with a vocabulary of {size:,}", console)
    model.vocabulary["held_out"] = {
        "bytes": [dense["bytes"], cut["bytes"]],
        **{key: [dense[key], cut[key]] for key in ("bytes_per_token", "bits_per_byte")},
    }
    sizes.append(subject.num_bytes)
    console.print(_table_of_cut(model.vocabulary, sizes))
    console.print(_sentences(model.vocabulary, subject.text))
    return cut


def _evaluate_bytes(subject: Subject, state: str, console: Console) -> Scores:
    scores: Any = subject.evaluate(state, console)
    num_bytes = sum(_bytes(subject.windows, subject.model.tokenizer))
    return {
        **scores,
        "bytes": num_bytes,
        "bytes_per_token": num_bytes / scores["tokens"],
        "bits_per_byte": scores["loss"] * scores["tokens"] / math.log(2) / num_bytes,
    }


def _of_as_many_bytes(subject: Subject, num_bytes: float) -> Windows:
    """Return the windows of about as much of the text, of which there are more tokens now."""
    # Twice as many are more than enough where tokens of the text itself were kept.
    windows = subject.data.windows("test", 2 * len(subject.windows))
    rest, count = num_bytes, 0
    for size in _bytes(windows, subject.model.tokenizer):
        if rest < size / 2 and count:
            break
        rest, count = rest - size, count + 1
    return Windows(windows.ids[:count], windows.prefix)


def _bytes(windows: Windows, tokenizer: Any) -> list[int]:
    """Return the number of bytes of the predicted tokens of each window."""
    sizes = Vocabulary.of(tokenizer).num_bytes
    rows = windows.ids[:, windows.prefix + 1 :].tolist()
    return [sum(sizes[token] for token in row) for row in rows]


def _table_of_cut(record: Mapping[str, Any], sizes: Sequence[int]) -> Table:
    """Return a table of a model of `sizes` bytes before and after the cut of its vocabulary."""
    rows, held_out = Table(), record["held_out"]
    rows.add_column("model", overflow="fold")
    for column in ("bits a byte", "bytes a token", "weights"):
        rows.add_column(column, justify="right")
    names = [f"vocabulary of {record[key]:,}" for key in ("size", "kept")]
    figures = zip(names, held_out["bits_per_byte"], held_out["bytes_per_token"], sizes, strict=True)
    for name, bits, per_token, size in figures:
        rows.add_row(name, f"{bits:.4f}", f"{per_token:.3f}", memory(size))
    return rows


def _sentences(record: Mapping[str, Any], text: str) -> str:
    """Return sentences on what was measured, what it costs on other text, and what is proven."""
    held_out, proof = record["held_out"], record["proof"]
    times = {name: after / max(before, 1) for name, (before, after) in record["tokens"].items()}
    listed = ", ".join(f"{name} {number(factor)}" for name, factor in times.items())
    read, read_after = (f"{size:,}" for size in held_out["bytes"])
    exact = "to the bit" if not proof["logits"] else f"up to {proof['logits']:.2g} (rounding)"
    return (
        f"Bits a byte are those of the negative log-likelihood of {read} and then {read_after} "
        f"bytes of the {text}; perplexities of two vocabularies do not compare. "
        f"Tokens of other text, times those before: {listed}. Proven: "
        f"{counted(proof['text'] + proof['unicode'], 'string')} decode to themselves as before, "
        f"{proof['same_tokens']:,} of kept tokens have the same ones, and the logits of these "
        f"are equal {exact}."
    )
