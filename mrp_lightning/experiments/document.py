"""The Markdown page of a sweep: what was run, which claims hold, and every value."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

from mrp_lightning.experiments import plots
from mrp_lightning.experiments.claims import Finding, findings
from mrp_lightning.experiments.numbers import relative_loss
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.summary import summarize
from mrp_lightning.experiments.tables import as_markdown, markdown
from mrp_lightning.experiments.trials import Trial
from mrp_lightning.files import save_text


def write_document(
    path: Path,
    runs: Sequence[Run],
    *,
    title: str,
    description: str,
    command: str,
    continuations: bool = False,
) -> None:
    """Write the page, and its pictures into the directory of its name beside it.

    Args:
        path: The Markdown file.
        runs: Runs that a sweep made.
        title: The heading.
        description: What is run, and why.
        command: The command line that makes it again.
        continuations: Whether it shows what the models write.
    """
    finished = [run.finished for run in runs if run.finished]
    summary = summarize(runs)
    seeds = len({found.trial.seed for found in finished} - {None})
    spread = f"mean ± standard deviation over {seeds} calibration sets; " if seeds > 1 else ""
    parts = [
        f"# {title}",
        *([description.strip()] if description else []),
        f"```\n{command}\n```",
        f"{' / '.join(dict.fromkeys(found.machine for found in finished))}. "
        f"Perplexity @ the context in tokens; {spread}"
        "relative loss is the mean over layers of ‖δx‖² / ‖wx‖²; seconds are those of the pruning."
        + _prefixes(runs),
    ]
    if found := findings(summary):
        parts += ["## What the paper claims", *_claims(found)]
    parts += ["## Values", markdown(summary)]
    for picture in plots.write(summary, runs, path.with_suffix("")):
        parts.append(f"![{picture.stem}]({quote(picture.relative_to(path.parent).as_posix())})")
    if tuned := list(_errors(runs)):
        parts += ["## Blocks before and after tuning", _ERROR, *tuned]
    if continuations and (written := list(_continuations(runs))):
        parts += ["## What the models write", _WRITTEN, *written]
    save_text(path, "\n\n".join(parts) + "\n")


_ERROR = (
    "‖y − y_d‖² / ‖y_d‖² over the calibration windows that tuning did not see, for the outputs y "
    "of a block and y_d of the block in the dense model."
)
_WRITTEN = "Always the most likely token, after the first words of the text that is evaluated."


def _trials(runs: Iterable[Run]) -> Iterator[tuple[Trial, Run]]:
    """The first run of each trial, whatever its seed."""
    seen = set()
    for run in runs:
        assert run.finished is not None
        trial = run.finished.trial
        if replace(trial, seed=None) not in seen:
            seen.add(replace(trial, seed=None))
            yield trial, run


def _prefixes(runs: Sequence[Run]) -> str:
    """How the windows of each model begin, where that is recorded."""
    models: dict[str, list[str]] = {}
    for trial, run in _trials(runs):
        for scores in run.evaluation.perplexity.values():
            if (tokens := scores.get("prefix")) is not None:
                begin = f"begin with {tokens} of the tokenizer's own, such as BOS"
                named = models.setdefault(begin if tokens else "have no BOS before them", [])
                named += [trial.model] if trial.model not in named else []
    return "".join(f" Windows of {', '.join(named)} {how}." for how, named in models.items())


def _errors(runs: Sequence[Run]) -> Iterator[str]:
    """A table a model: its blocks, and a column a trial."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for trial, run in _trials(runs):
        for block in run.report.blocks if run.report else []:
            if block.error_before is not None:
                columns = found.setdefault(trial.model, {})
                column = columns.setdefault(_name(trial), {})
                after = relative_loss(block.error_after)
                column[block.name] = f"{relative_loss(block.error_before)} → {after}"
    for model, columns in found.items():
        blocks = dict.fromkeys(block for column in columns.values() for block in column)
        lines = [
            [block, *(column.get(block, "") for column in columns.values())] for block in blocks
        ]
        yield f"### {model}\n\n{as_markdown(['block', *columns], lines)}"


def _continuations(runs: Sequence[Run]) -> Iterator[str]:
    """What each trial writes, by model and text, in a block of code: it may hold anything."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for trial, run in _trials(runs):
        for text, said in run.evaluation.continuations.items():
            written = found.setdefault((trial.model, text, said["prompt"]), [])
            written.append(f"{_name(trial)}:\n{_indented(said['continuation'])}")
    for (model, text, prompt), written in found.items():
        content = "\n".join([f"prompt:\n{_indented(prompt)}", *written])
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", content)), default=0))
        yield f"### {model}, {text}\n\n{fence}text\n{content}\n{fence}"


def _indented(text: str) -> str:
    return textwrap.indent(text.strip("\n"), "    ")


def _name(trial: Trial) -> str:
    """A trial among those of its model."""
    changed = [str(trial.changed)] if trial.changed else []
    return ", ".join([" ".join(filter(None, [trial.setting, trial.label])), *changed])


def _claims(found: Sequence[Finding]) -> list[str]:
    parts = []
    for claim in dict.fromkeys(finding.claim for finding in found):
        cases = [finding for finding in found if finding.claim == claim]
        held = sum(finding.holds for finding in cases)
        lines = [["yes" if f.holds else "**no**", f.where, f.evidence] for f in cases]
        parts += [
            f"**{claim}**: so in {held} of {len(cases)} cases.",
            as_markdown(["holds", "where", "evidence"], lines),
        ]
    return parts
