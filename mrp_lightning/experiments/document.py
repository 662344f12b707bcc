"""The Markdown page of a sweep: what was run, which claims hold, and every value."""

from collections.abc import Sequence
from pathlib import Path

from mrp_lightning.experiments import plots
from mrp_lightning.experiments.claims import Finding, findings
from mrp_lightning.experiments.runs import Run
from mrp_lightning.experiments.summary import summarize
from mrp_lightning.experiments.tables import as_markdown, markdown
from mrp_lightning.files import save_text


def write_document(
    path: Path, runs: Sequence[Run], *, title: str, description: str, command: str
) -> None:
    """Write the page, and its pictures into the directory of its name beside it.

    Args:
        path: The Markdown file.
        runs: Runs that a sweep made.
        title: The heading.
        description: What is run, and why.
        command: The command line that makes it again.
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
        "relative loss is the mean over layers of ‖δx‖² / ‖wx‖²; seconds are those of the pruning.",
    ]
    if found := findings(summary):
        parts += ["## What the paper claims", *_claims(found)]
    parts += ["## Values", markdown(summary)]
    for picture in plots.write(summary, path.with_suffix("")):
        parts.append(f"![{picture.stem}]({picture.relative_to(path.parent).as_posix()})")
    save_text(path, "\n\n".join(parts) + "\n")


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
