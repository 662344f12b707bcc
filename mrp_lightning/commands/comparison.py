"""One pruning and its comparison with the dense model, on the same windows of held-out text."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from transformers.generation.streamers import BaseStreamer

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.commands.main import command_named
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.data.own_text import estimate_writing
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.errors import ArgumentError, counted
from mrp_lightning.experiments.numbers import MISSING, memory, number, percent, perplexity
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import check_batch
from mrp_lightning.loop.module_plan import plan_for
from mrp_lightning.loop.progress import roughly
from mrp_lightning.loop.pruned_module import check_save_dir
from mrp_lightning.loop.trainer import Trainer, require_accelerator
from mrp_lightning.pruning.estimate import Estimate, estimate, products_per_second
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.evaluation import Scores, record
from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.targets.plan import Plan
from mrp_lightning.text.mixture import SELF
from mrp_lightning.text.sources import StandardLibrary
from mrp_lightning.text.windows import Cutter, Windows


def prune_and_compare(
    source: Mapping[str, Any],
    text: Mapping[str, Any],
    pruning: Mapping[str, Any],
    conversions: "Sequence[Conversion]",
    *,
    windows: int,
    accelerator: str,
    console: Console,
) -> str | None:
    """Evaluate a model, prune it, save it, evaluate it again, convert it, and print the results.

    Arguments and text are checked before the first evaluation.

    Args:
        source: The arguments of the `CausalLM`.
        text: The arguments of the `TextDataModule`; a tenth of files is held out. Without files,
            the model is calibrated on text that it writes itself, and evaluated on the source code
            of Python's standard library.
        pruning: The arguments of the `PruningCallback`, with `save_dir`.
        conversions: The conversions of the pruned model to other formats.
        windows: The largest number of windows to evaluate on.
        accelerator: The accelerator, as Lightning names it.
        console: The console for progress and results.

    Returns:
        The reason why the result is of no use, `None` if it may be useful.
    """
    require_accelerator(accelerator)
    prune = PruningCallback(**pruning)
    has_files = bool(text["train_files"])
    data = TextDataModule(**text, hold_out=has_files, calibration=None if has_files else SELF)
    assert prune.save_dir is not None
    with quiet_lightning():
        console.print(f"Loading {source['model']} …")
        model = CausalLM(**source)
        check_save_dir(prune.save_dir, model, overwrite=prune.overwrite, argument="--out")
        for conversion in conversions:
            conversion.check()
        plan = plan_for(model, prune.settings)
        trainer = Trainer(
            accelerator=accelerator,
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stdout.isatty(),
        )
        data.tokenizer = data.tokenizer or model.tokenizer
        data.fit_to(model.model.config)
        held_out = _HeldOut.of(data, windows)
        check_batch(model, held_out.windows.ids)
        num_samples = data.num_samples
        if has_files:
            calibration = data.calibration_windows()
            check_batch(model, calibration)
            num_samples = len(calibration)
        console.print(_plan(prune.settings, plan, data, num_samples, has_files=has_files))
        dense = held_out.evaluate("dense", model, trainer, console)
        expected = estimate(
            model.model,
            plan,
            prune.settings,
            windows=num_samples,
            length=data.sequence_length,
            tokens_per_second=held_out.windows.ids.numel() / held_out.seconds,
            products_per_second=products_per_second(trainer.strategy.root_device),
        )
        writing = Estimate(0.0, 0)
        if not has_files:
            model.to(trainer.strategy.root_device)  # the evaluation left it on the CPU
            cutter = Cutter(model.tokenizer, data.sequence_length)
            writing = estimate_writing(model.model, cutter, data.seed, data.num_samples)
        evaluating = Estimate(held_out.seconds, 0)  # the second evaluation, of the pruned model
        console.print(_announcement(expected.after(writing).after(evaluating), writing))
        model.to(trainer.strategy.root_device)
        sizes = [Size.of(model)]
        start = time.perf_counter()
        trainer.predict(model, datamodule=data, callbacks=[prune])
        seconds = time.perf_counter() - start
        pruned = held_out.evaluate("pruned", model, trainer, console)
        model.to(trainer.strategy.root_device)
        sizes.append(Size.of(model))
    assert prune.report is not None
    if not prune.report.narrowed:
        # Zeros cost as much as other weights: both models do the same work, so that their times
        # differ only by other work on the machine.
        times = [size.ms_a_token for size in sizes if size.ms_a_token is not None]
        sizes = [replace(size, ms_a_token=min(times, default=None)) for size in sizes]
    record(
        prune.save_dir,
        perplexity={held_out.name: pruned},
        dense={held_out.name: dense},
        model=str(prune.save_dir),
    )
    table = _table(dense, pruned, prune, sizes, seconds)
    try:
        for conversion in conversions:
            size = conversion.convert(prune.save_dir)
            table.add_row(str(conversion.out), "", "", "", *size.cells(), "")
    finally:  # also if a conversion fails: the pruned model is saved
        console.print(table)
        console.print(f"Evaluated on {held_out.described(dense)}.")
    return _why_useless(_ratio(dense, pruned), prune.report)


@dataclass(frozen=True)
class Conversion:
    """A command that converts a pruned model.

    Attributes:
        command: The name of the command.
        out: The directory or file that the command writes.
        options: The options of the command after the directory of the model.
    """

    command: str
    out: Path
    options: Sequence[str]

    def check(self) -> None:
        """Raise, before any work, for an output that the command would refuse afterwards."""
        is_file = self.out.suffix == ".gguf"
        is_there = self.out.exists() and (is_file or any(self.out.iterdir()))
        if is_there and "--overwrite" not in self.options:
            raise FileExistsError(
                f"{self.out} exists, and `{self.command}` would write it. Move it away, name "
                "another, or add `--overwrite`."
            )

    def convert(self, directory: Path) -> "Size":
        """Run the command, and return the size and the speed of its result."""
        command_named(self.command)([str(directory), "--out", str(self.out), *self.options])
        if self.out.is_file():
            return Size(self.out.stat().st_size)
        files = [file for kind in ("safetensors", "bin") for file in self.out.glob(f"*.{kind}")]
        num_bytes = sum(file.stat().st_size for file in files)
        try:
            packed = CausalLM(str(self.out))
        except ArgumentError:  # a format that only other engines run
            return Size(num_bytes)
        return replace(Size.of(packed), num_bytes=num_bytes)


@dataclass(frozen=True)
class Size:
    """The cost of storing and running a model.

    Attributes:
        num_bytes: The bytes of the model's weights.
        ms_a_token: Milliseconds per generated token, for one text at a time, uncompiled: the least
            of a few, since other work on the machine only adds to it. `None` if it cannot be
            measured here.
    """

    num_bytes: int
    ms_a_token: float | None = None

    @classmethod
    def of(cls, module: CausalLM) -> "Size":
        """Measure a model on its device by generating a few tokens."""
        model: Any = module.model
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        times = _Times()
        ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)
        if not model.can_generate():
            return cls(num_bytes)
        options = {"max_new_tokens": _TIMED_TOKENS, "min_new_tokens": _TIMED_TOKENS}
        options |= {"do_sample": False, "pad_token_id": 0}
        with torch.inference_mode():
            for _ in range(2):  # the first one warms up
                times.seen.clear()
                mask = torch.ones_like(ids)
                model.eval().generate(ids, attention_mask=mask, streamer=times, **options)
        steps = [later - earlier for earlier, later in pairwise(times.seen[2:])]
        return cls(num_bytes, 1000 * min(steps))

    def cells(self) -> tuple[str, str]:
        """Return the cells of a table: bytes, and milliseconds a token."""
        speed = MISSING if self.ms_a_token is None else f"{self.ms_a_token:.3g}"
        return memory(self.num_bytes), speed


class _Times(BaseStreamer):
    """A streamer that records the time of the prompt and of each generated token."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def put(self, value: Any) -> None:  # noqa: ARG002
        self.seen.append(time.perf_counter())

    def end(self) -> None:
        pass


_TIMED_TOKENS = 10


@dataclass
class _HeldOut:
    """The held-out windows on which a model is evaluated, before and after it is pruned."""

    name: str
    windows: Windows
    batch_size: int
    seconds: float = 0.0  # duration of the last evaluation

    @classmethod
    def of(cls, data: TextDataModule, limit: int) -> "_HeldOut":
        """Read at most `limit` windows of the held-out text or the standard library."""
        files = f"held-out part of {data.calibration_source}"
        name = files if data.train_files else f"source of {StandardLibrary().name}"
        return cls(name, data.windows("test", limit), data.batch_size)

    def evaluate(self, name: str, model: CausalLM, trainer: Trainer, console: Console) -> Scores:
        """Measure the perplexity of a model."""
        console.print(f"Evaluating the {name} model on the {self.name} …")
        clock = _Clock()
        trainer.callbacks.append(clock)
        loader = DataLoader(self.windows, batch_size=self.batch_size)
        try:
            trainer.test(model, dataloaders={self.name: loader}, verbose=False)
        finally:
            trainer.callbacks.remove(clock)
        self.seconds = clock.seconds
        (scores,) = model.evaluation.values()
        return scores

    def described(self, scores: Scores) -> str:
        """Describe the text and its size."""
        windows = counted(len(self.windows), "window")
        return f"{windows} of {scores['context']} tokens of the {self.name}"


class _Clock(Callback):
    """Measures the seconds of a `test`, without reading the text."""

    def on_test_start(self, *_: Any) -> None:
        """Start the clock once the text has been read."""
        self._start = time.perf_counter()

    def on_test_end(self, *_: Any) -> None:
        """Stop the clock when the model has run on all batches."""
        self.seconds = time.perf_counter() - self._start


def _plan(
    settings: Settings, plan: Plan, data: TextDataModule, num_samples: int, *, has_files: bool
) -> str:
    verb = "quantised" if isinstance(settings.recipe.pattern, Dense) else "pruned"
    text = (
        f"{data.calibration_source}."
        if has_files
        else "text that the model writes itself. Text that is like yours is given by `--text "
        "FILE`: it is then evaluated on, too."
    )
    windows = counted(num_samples, "window")
    return (
        f"{plan.num_layers} layer{'s are' if plan.num_layers != 1 else ' is'} to be {verb} to "
        f"{_amount(settings)} by {_method(settings)}, calibrated on {windows} of {text}"
    )


def _amount(settings: Settings) -> str:
    if settings.structure is None:
        return settings.amount
    grid = settings.recipe.grid
    rest = f"{percent(1 - (settings.sparsity or 0))} of their {settings.structure}"
    return rest if grid is None else f"{rest} and {grid}"


def _method(settings: Settings) -> str:
    """Return the method with the parts that it goes with, such as `JM, dense target, tuned`."""
    parts = [
        settings.method,
        "dense target" * (settings.target == "dense"),
        "allocation by output" * (settings.allocation == "output"),
        "tuned" * (settings.block_tuning is not None),
    ]
    return ", ".join(filter(None, parts))


def _announcement(expected: Estimate, writing: Estimate) -> str:
    of_writing = (
        f" ({roughly(writing.seconds)} of it to write that text)" if writing.seconds else ""
    )
    return (
        f"Pruning may take {roughly(expected.seconds)}{of_writing} and, beside the model, "
        f"{memory(expected.num_bytes)} of memory. This is a rough estimate, with an evaluation as "
        "before; small models, few bits and busy machines take longer. If it is interrupted, the "
        "same command goes on where it was."
    )


def _table(
    dense: Scores, pruned: Scores, prune: PruningCallback, sizes: Sequence[Size], seconds: float
) -> Table:
    """Return a table of both models; `seconds` is the time of pruning and writing."""
    report = prune.report
    assert report is not None
    totals = report.totals
    table = Table()
    table.add_column("model", overflow="fold")
    columns = (f"perplexity @{dense['context']}", "× dense", "weights removed", "weights")
    for column in (*columns, "ms a token", "time"):
        table.add_column(column, justify="right")
    table.add_row("dense", perplexity(dense["perplexity"]), "", "", *sizes[0].cells(), "")
    share = percent(totals["removed"] / totals["model_weights"])
    if report.narrowed:
        share = percent(1 - report.narrowed["model_weights"] / totals["model_weights"])
    table.add_row(
        f"{_amount(prune.settings)} by {_method(prune.settings)}",
        perplexity(pruned["perplexity"]),
        number(_ratio(dense, pruned)),
        share,
        *sizes[1].cells(),
        roughly(max(seconds, totals["seconds"])),  # includes interrupted runs
    )
    return table


def _ratio(dense: Scores, pruned: Scores) -> float:
    return (pruned["perplexity"] or math.inf) / (dense["perplexity"] or math.inf)


_USELESS_RATIO = 3.0
"""The ratio of perplexities above which a pruned model is of little use."""
_LEAST_REMOVED = 0.001
"""The fraction of removed weights below which a pruning has no benefit."""


def _why_useless(ratio: float, report: PruningReport) -> str | None:
    """Return why a pruned model is of no use, `None` if it may be useful."""
    totals = report.totals
    if not ratio < _USELESS_RATIO:
        return (
            f"The perplexity is {number(ratio)} times that of the dense model, which is of little "
            "use. Remove less (a lower `--sparsity`, a `--pattern` that keeps more, or more bits), "
            "or lose less: `--recipe best` and calibration `--text` that is like yours."
        )
    config = report.config
    is_changed = report.narrowed or any(config.get(key) for key in ("bits", "grid", "head_grid"))
    if not is_changed and totals["removed"] < _LEAST_REMOVED * totals["model_weights"]:
        return (
            f"Of {totals['model_weights']:,} weights {totals['removed']:,} are removed, which "
            "makes the model neither smaller nor faster. `--sparsity 0.5` removes half of them."
        )
    return None
