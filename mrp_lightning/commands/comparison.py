"""One pruning and its comparison with the dense model, on the same windows of held-out text."""

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.data.own_text import estimate_writing
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.experiments.numbers import memory, number, percent, perplexity
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.progress import roughly
from mrp_lightning.loop.saving import check_save_dir
from mrp_lightning.loop.trainer import Trainer, require_accelerator
from mrp_lightning.pruning.estimate import Estimate, estimate, products_per_second
from mrp_lightning.records.evaluation import Scores, record
from mrp_lightning.records.report import PruningReport
from mrp_lightning.targets.plan import make_plan
from mrp_lightning.text.mixture import SELF
from mrp_lightning.text.windows import Cutter


def prune_and_compare(
    source: Mapping[str, Any],
    text: Mapping[str, Any],
    pruning: Mapping[str, Any],
    *,
    windows: int,
    accelerator: str,
    console: Console,
) -> None:
    """Evaluate a model, prune it, save it, evaluate it again, and print both results.

    Args:
        source: The arguments of the `CausalLM`.
        text: The arguments of the `TextDataModule`: a tenth of files is held out. Without files the
            model calibrates on text that it writes itself, and is evaluated on the source of
            Python's standard library.
        pruning: The arguments of the `PruningCallback`, with `save_dir`.
        windows: The largest number of windows to evaluate on.
        accelerator: The accelerator, as Lightning names it.
        console: The console for progress and results.
    """
    require_accelerator(accelerator)
    prune = PruningCallback(**pruning)
    has_files = bool(text["train_files"])
    data = TextDataModule(**text, hold_out=has_files, calibration=None if has_files else SELF)
    assert prune.save_dir is not None
    with quiet_lightning():
        model = CausalLM(**source)
        check_save_dir(prune.save_dir, model, overwrite=prune.overwrite)
        plan = make_plan(model.model, prune.settings.recipe.pattern)
        clock = _Clock()
        trainer = Trainer(
            accelerator=accelerator,
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stdout.isatty(),
            limit_test_batches=math.ceil(windows / data.batch_size),
            callbacks=[clock],
        )

        def evaluate(name: str) -> dict[str, Scores]:
            text_name = (
                "text that is held out" if has_files else "the source of Python's standard library"
            )
            console.print(f"Evaluating the {name} model on {text_name} …")
            trainer.test(model, datamodule=data, verbose=False)
            return dict(model.evaluation)

        console.print(
            f"{plan.num_layers} layers are to be pruned to {prune.settings.recipe.pattern} by "
            f"{prune.settings.recipe.method}, calibrated on {data.num_samples} windows "
            + (
                f"of {data.calibration_source}."
                if has_files
                else "that the model writes itself. Text that is like yours is given by `--text "
                "FILE`: it is then evaluated on, too."
            )
        )
        dense_scores = evaluate("dense")
        (dense,) = dense_scores.values()
        expected = estimate(
            model.model,
            plan,
            prune.settings,
            windows=data.num_samples,
            length=data.sequence_length,
            tokens_per_second=clock.tokens_per_second(dense),
            products_per_second=products_per_second(trainer.strategy.root_device),
        )
        writing = Estimate(0.0, 0)
        if not has_files:
            model.to(trainer.strategy.root_device)  # from where the evaluation has taken it
            cutter = Cutter(model.tokenizer, data.sequence_length)
            writing = estimate_writing(model.model, cutter, data.seed, data.num_samples)
        console.print(_announcement(expected.after(writing), writing))
        trainer.predict(model, datamodule=data, callbacks=[prune])
        pruned_scores = evaluate("pruned")
        (pruned,) = pruned_scores.values()
    assert prune.report is not None
    record(prune.save_dir, perplexity=pruned_scores, dense=dense_scores, model=str(prune.save_dir))
    console.print(_table(dense, pruned, prune.report))


class _Clock(Callback):
    """Measures how long the batches of the last `test` took."""

    def on_test_start(self, *_: Any) -> None:
        """Start after the text was read."""
        self._start = time.perf_counter()

    def on_test_end(self, *_: Any) -> None:
        """Stop when the model has run on all batches."""
        self._seconds = time.perf_counter() - self._start

    def tokens_per_second(self, scores: Scores) -> float:
        """The speed of the model in an evaluation with these scores."""
        return (scores["windows"] or 0) * (scores["context"] or 0) / self._seconds


def _announcement(expected: Estimate, writing: Estimate) -> str:
    of_writing = (
        f" ({roughly(writing.seconds)} of it to write that text)" if writing.seconds else ""
    )
    return (
        f"Pruning may take {roughly(expected.seconds)}{of_writing} and, beside the model, "
        f"{memory(expected.num_bytes)} of memory. This is a rough estimate from the speed of that "
        "evaluation; small models, few bits and busy machines take longer. If it is interrupted, "
        "the same command goes on where it was."
    )


def _table(dense: Scores, pruned: Scores, report: PruningReport) -> Table:
    totals, config = report.totals, report.config
    how = f"{config.get('pattern') or percent(config['sparsity'])} by {config['method']}"
    share = percent(totals["removed"] / totals["model_weights"])
    table = Table()
    table.add_column("model")
    for column in (f"perplexity @{dense['context']}", "× dense", "weights removed", "time"):
        table.add_column(column, justify="right")
    table.add_row("dense", perplexity(dense["perplexity"]), "", "", "")
    ratio = (pruned["perplexity"] or math.inf) / (dense["perplexity"] or math.inf)
    time_taken = roughly(totals["seconds"])
    table.add_row(how, perplexity(pruned["perplexity"]), number(ratio), share, time_taken)
    return table
