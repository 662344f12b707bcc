"""What to do next: the commands that a reader of a page about one result needs."""

import shlex
from collections.abc import Iterator

from mrp_lightning.experiments.models import Model, Result
from mrp_lightning.experiments.page.parts import Part, Step
from mrp_lightning.experiments.scores import measured

_FEW_TOKENS = 4
"""Below so many tokens for each input feature, more of them are advised."""


def next_part(model: Model) -> Part | None:
    """The next steps after one result; nothing where several are compared."""
    if len(model.originals) != 1:
        return None
    steps = list(_steps(model, model.originals[0]))
    return Part("What to do next", steps=steps) if steps else None


def _steps(model: Model, result: Result) -> Iterator[Step]:
    run = result.runs[0]
    directory = shlex.quote(str(run.directory))
    if not run.complete:
        yield Step("Run the same command again: it goes on at the block where this run ended.")
        return
    if not any(score.metric == "perplexity" for score in measured(result.runs)):
        test = f"python -m mrp_lightning test --model.model {directory}"
        yield Step("Measure its perplexity on your text, which is kept beside it.", test)
    elif not model.before:
        source = shlex.quote(str(run.config.get("base_model") or "MODEL"))
        beside = shlex.quote(str(run.directory.parent / "dense"))
        keep = f"--trainer.callbacks=callbacks.SaveEvaluation --trainer.callbacks.save_dir={beside}"
        test = f"python -m mrp_lightning test --model.model {source} {keep}"
        yield Step("Measure the dense model, too, which this page then compares with.", test)
    tokens = {x: (x.tokens or 0) / x.shape[1] for x in run.pruned if not x.shared_hessian}
    if tokens and 0 < (least := min(tokens.values())) < _FEW_TOKENS:
        layer = min(tokens, key=lambda layer: tokens[layer])
        yield Step(
            f"Calibrate on more text, by `data.num_samples`: {layer.name} saw {least:.1f} tokens "
            "for each of its input features."
        )
    if run.config.get("target") != "dense" and not run.config.get("tuning"):
        yield Step(
            "Where it lost too much: aim at the dense model's outputs and tune each block. It "
            "takes several times as long, and calibration text like yours matters the more.",
            "python -m mrp_lightning predict --config configs/recipes/best.yaml …",
        )
    if not any(copy.exported for other in model.results for copy in other.runs):
        pack = f"python -m export.to_sparse {directory}"
        yield Step("Pack it: its files become smaller, and its layers faster to decode.", pack)
