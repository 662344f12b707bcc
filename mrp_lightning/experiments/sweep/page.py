"""The page of a sweep: what was run, which claims hold, and every figure."""

from collections.abc import Sequence
from pathlib import Path

from mrp_lightning.experiments.sweep.claims import Finding, findings
from mrp_lightning.experiments.sweep.results import Result, averages
from mrp_lightning.experiments.sweep.tables import as_markdown, markdown


def page(
    results: Sequence[Result],
    *,
    title: str,
    description: str,
    command: str,
    pictures: Sequence[Path] = (),
) -> str:
    """Markdown; `pictures` are shown by their paths."""
    machines = " / ".join(dict.fromkeys(result.machine for result in results))
    seeds = len({result.run.seed for result in results if result.run.seed is not None})
    spread = f"mean ± standard deviation over {seeds} calibration sets; " if seeds > 1 else ""
    parts = [
        f"# {title}",
        *([description.strip()] if description else []),
        f"```\n{command}\n```",
        f"{machines}. Perplexity @ the context in tokens; {spread}"
        "relative loss is the mean over layers of ‖δx‖² / ‖wx‖²; seconds are those of the pruning.",
    ]
    if found := findings(results):
        parts += ["## What the paper claims", *_claims(found)]
    parts += ["## Figures", markdown(averages(results))]
    parts += [f"![{path.stem}]({path.as_posix()})" for path in pictures]
    return "\n\n".join(parts) + "\n"


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
