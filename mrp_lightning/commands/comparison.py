"""One pruning and its comparison with the dense model, on the same windows of held-out text."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from rich.table import Table
from torch.utils.data import DataLoader
from transformers.generation.streamers import BaseStreamer

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.commands.main import command_named
from mrp_lightning.commands.numbers import MISSING, memory, number, percent, perplexity
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.data.own_text import estimate_writing
from mrp_lightning.environment import quiet_lightning
from mrp_lightning.errors import ArgumentError, DataError, OptionError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import check_batch
from mrp_lightning.loop.module_plan import plan_for
from mrp_lightning.loop.progress import roughly
from mrp_lightning.loop.pruned_module import check_save_dir
from mrp_lightning.loop.text_model import TextModel
from mrp_lightning.loop.trainer import Trainer, require_accelerator
from mrp_lightning.models.classes import is_causal
from mrp_lightning.models.gguf import find_gguf, located
from mrp_lightning.models.loading import load_config
from mrp_lightning.pruning.estimate import Estimate, estimate, products_per_second
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.evaluation import Scores, record
from mrp_lightning.records.report import PruningReport
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.targets.plan import Plan
from mrp_lightning.terminal import Console
from mrp_lightning.text.mixture import SELF
from mrp_lightning.text.sources import StandardLibrary
from mrp_lightning.text.windows import Cutter, Windows


def prune_and_compare(
    source: Mapping[str, Any],
    text: Mapping[str, Any],
    prune: PruningCallback,
    conversions: "Sequence[Conversion]",
    *,
    windows: int,
    accelerator: str,
    console: Console,
) -> str | None:
    """Evaluate a model, prune it, save it, evaluate it again, convert it, and print the results.

    Arguments and text are checked before the first evaluation. The scores are also recorded in
    `evaluation.json`, in the directory of the pruned model.

    Args:
        source: `model`, `dtype`, `gguf_file`, `revision` and `trust_remote_code`, as of `CausalLM`.
        text: The arguments of the `TextDataModule`; `train_files` is required, and a tenth of these
            files is held out. If it is `None`, a causal language model is calibrated on text that
            it writes itself, and evaluated on the source code of Python's standard library.
        prune: The callback, with `save_dir`.
        conversions: The conversions of the pruned model to other formats.
        windows: The largest number of windows to evaluate on.
        accelerator: The accelerator, as Lightning names it.
        console: The console for progress and results.

    Returns:
        The reason why the result is of no use, `None` if it may be useful.

    Raises:
        OptionError: The accelerator is missing, or a model that is not causal has no `train_files`.
        FileExistsError: The output of the pruning, or of a conversion, exists.
    """
    require_accelerator(accelerator)
    data = _data(text)
    # Each step needs the one before: the plan needs the model, the estimate of the time needs the
    # speed of the first evaluation, and only then hours of work begin.
    with quiet_lightning():
        console.print(f"Loading {source['model']} …")
        model = _load(source, text)
        if isinstance(model, TextModel):
            data = _fitted(text, model)
        subject = _Subject.of(model, data, prune, conversions, windows, accelerator)
        if not text["train_files"] and "num_samples" not in text:
            subject = subject.with_enough_windows()
        console.print(subject.plan_text())
        # The dense evaluation comes before the pruning, which changes the model in memory, and its
        # speed is the basis of the announced time.
        dense = subject.evaluate("dense", console)
        console.print(subject.announcement())
        sizes = [subject.size()]
        start = time.perf_counter()
        subject.trainer.predict(model, datamodule=data, callbacks=[prune])
        seconds = time.perf_counter() - start
        pruned = subject.evaluate("pruned", console)
        sizes.append(subject.size())
    report, directory, held_out = prune.report, prune.save_dir, subject.held_out
    assert report is not None
    assert directory is not None
    name = held_out.name
    scores = {"perplexity": {name: pruned}, "dense": {name: dense}}
    if isinstance(model, TextModel):
        scores = {"similarity": {name: pruned}}
    record(directory, **scores, model=str(directory))
    # Zeros are multiplied like other weights, so that only a narrower model has a time of its own.
    if not report.narrowed:
        sizes = _equally_fast(sizes)
    table = _table(dense, pruned, prune, sizes, seconds)
    try:
        for conversion in conversions:
            size = conversion.convert(directory)
            table.add_row(str(conversion.out), "", "", "", *size.cells(), "")
    finally:  # also if a conversion fails: the pruned model is saved
        console.print(table)
        console.print(f"Evaluated on {held_out.described(dense)}.{_shares(report)}")
    return _why_useless(dense, pruned, report)


def _load(source: Mapping[str, Any], text: Mapping[str, Any]) -> CausalLM | TextModel:
    """Load a causal language model as a `CausalLM`, any other model as a `TextModel`."""
    hub = {key: source[key] for key in ("revision", "trust_remote_code")}
    location = located(source["model"], source["gguf_file"], source["revision"])
    if find_gguf(location) is not None or is_causal(load_config(location, **hub)):
        return CausalLM(**source)
    if not text["train_files"]:
        raise OptionError(
            f"the model {location} predicts no next token, so it cannot write the text that it is "
            "calibrated on. Give files of texts like those that it reads.",
            "train_files",
        )
    return TextModel(location, dtype=source["dtype"], **hub, tokenizer=text.get("tokenizer"))


def _fitted(text: Mapping[str, Any], model: TextModel) -> TextDataModule:
    """Return the text of files in windows that leave room for the tokens after each text.

    Raises:
        DataError: The windows that the user asks for are longer than the model can read.
    """
    longest, end = model.longest, len(model.end)
    length = text.get("sequence_length") or min(_LONGEST_TEXT, longest or _LONGEST_TEXT)
    if longest is not None and length > longest:
        raise DataError(
            f"the windows have {length} tokens, and the model reads {longest}. Give that or less.",
            "sequence_length",
        )
    return TextDataModule(**{**text, "sequence_length": max(2, length - end)}, hold_out=True)


_TOKENS_A_COLUMN = 32
"""Tokens of own text for each column of the widest layer: in the embedded model, twice and six
times as many lower the perplexity by 0.2 and 0.3% at 2:4, and not at 50%; see
docs/self-calibration.md."""
_LONGEST_TEXT = 512
"""The longest default window of a `TextModel`: encoders are seldom given longer texts."""


def _data(text: Mapping[str, Any]) -> TextDataModule:
    """Return the text of files with a held-out part, or the text that the model will write."""
    if text["train_files"]:
        return TextDataModule(**text, hold_out=True)
    return TextDataModule(**text, calibration=SELF)


@dataclass(frozen=True)
class _Subject:
    """A dense model that is to be pruned, with its text and all that is checked before the work.

    Attributes:
        model: The model.
        data: Its text, cut into windows of a length that the model reads.
        settings: The settings of the pruning.
        plan: The layers that will be pruned.
        num_samples: The number of windows to calibrate on.
        held_out: The windows to evaluate on.
        trainer: The trainer of all runs of the model.
    """

    model: CausalLM | TextModel
    data: TextDataModule
    settings: Settings
    plan: Plan
    num_samples: int
    held_out: "_HeldOut"
    trainer: Trainer

    @classmethod
    def of(
        cls,
        model: CausalLM | TextModel,
        data: TextDataModule,
        prune: PruningCallback,
        conversions: "Sequence[Conversion]",
        windows: int,
        accelerator: str,
    ) -> "_Subject":
        """Check outputs, layers and text, the cheapest first, and return them as a subject."""
        assert prune.save_dir is not None
        # 1. Outputs, which cost a look at the disk.
        # 2. Layers, which cost a walk through the model.
        # 3. Text, which is read and tokenized; a batch of it has to fit the model.
        check_save_dir(prune.save_dir, model, overwrite=prune.overwrite, argument="--out")
        for conversion in conversions:
            conversion.check()
            if conversion.command == "gguf" and isinstance(model, TextModel):
                raise OptionError(
                    f"a {type(model.model).__name__} predicts no next token, and files for "
                    "llama.cpp are made of models that do. Leave it out.",
                    "gguf",
                )
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
        if data.train_files:  # which may hold fewer windows
            calibration = data.calibration_windows()
            check_batch(model, calibration)
            num_samples = len(calibration)
        return cls(model, data, prune.settings, plan, num_samples, held_out, trainer)

    def with_enough_windows(self) -> "_Subject":
        """Return the subject with the windows of its own text that its widest layer needs.

        Writing a window costs more than pruning with it, so that a small model writes fewer than
        the default of the `TextDataModule`, which is also the most, and the number for a model with
        experts. The `num_samples` of `data` is set, too.
        """
        # An expert sees its router's share of the tokens, which no configuration bounds.
        if any(hasattr(module, "experts") for module in self.model.model.modules()):
            return self
        plan = self.plan
        layers = [*chain.from_iterable(plan.layers.values()), *plan.outside]
        layers += [plan.head] if plan.head is not None else []
        tokens = _TOKENS_A_COLUMN * max(layer.columns for layer in layers)
        windows = min(self.num_samples, -(-tokens // self.data.sequence_length))
        self.data.num_samples = windows
        return replace(self, num_samples=windows)

    def plan_text(self) -> str:
        """Return a sentence on the layers, the settings and the text of the pruning."""
        verb = "quantised" if isinstance(self.settings.recipe.pattern, Dense) else "pruned"
        text = (
            f"{self.data.calibration_source}."
            if self.data.train_files
            else "text that the model writes itself. Text that is like yours is given by `--text "
            "FILE`: it is then evaluated on, too."
        )
        number = self.plan.num_layers
        return (
            f"{number} layer{'s are' if number != 1 else ' is'} to be {verb} to "
            f"{_amount(self.settings)} by {_method(self.settings)}, calibrated on "
            f"{counted(self.num_samples, 'window')} of {text}"
        )

    def evaluate(self, name: str, console: Console) -> Scores:
        """Measure the model on the held-out windows, by its perplexity or its outputs."""
        return self.held_out.evaluate(name, self.model, self.trainer, console)

    def size(self) -> "Size":
        """Measure the model on the trainer's device, which an evaluation moves it away from."""
        self.model.to(self.trainer.strategy.root_device)
        return Size.of(self.model)

    def announcement(self) -> str:
        """Return the expected time and memory, from the speed of the last evaluation."""
        device = self.trainer.strategy.root_device
        pruning = estimate(
            self.model.model,
            self.plan,
            self.settings,
            windows=self.num_samples,
            length=self.data.sequence_length,
            tokens_per_second=self.held_out.windows.ids.numel() / self.held_out.seconds,
            products_per_second=products_per_second(device),
        )
        writing = Estimate(0.0, 0)
        if not self.data.train_files:
            self.model.to(device)
            cutter = Cutter(self.model.tokenizer, self.data.sequence_length)
            writing = estimate_writing(
                self.model.model, cutter, self.data.seed, self.data.num_samples
            )
        evaluating = Estimate(self.held_out.seconds, 0)  # of the pruned model
        return _announcement(pruning.after(writing).after(evaluating), writing)


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
        """Raise a `FileExistsError` if the output is there and not empty, without `--overwrite`.

        Also with it, if it is a directory of which a file is not from this package.
        """
        is_there = self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))
        # The command would refuse it, too, but only after hours of pruning.
        if "--overwrite" in self.options and self.out.suffix != ".gguf":
            check_output_dir(self.out, overwrite=True, argument="--out")
        elif is_there and "--overwrite" not in self.options:
            raise FileExistsError(
                f"{self.out} exists, and `{self.command}` would write it. Move it away, name "
                "another, or add `--overwrite`."
            )

    def convert(self, directory: Path) -> "Size":
        """Run the command; return the bytes of its files, and the speed on the CPU, if it runs."""
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
        num_bytes: The bytes of the model's parameters or, of a converted model, of its files.
        ms_a_token: Milliseconds per generated token, for one text at a time, uncompiled: the least
            of a few, since other work on the machine only adds to it. `None` if the model generates
            no text, or does not run here.
    """

    num_bytes: int
    ms_a_token: float | None = None

    @classmethod
    def of(cls, module: CausalLM | TextModel) -> "Size":
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
        # The streamer gets the prompt first, and the first token after the forward of the prompt:
        # both are no steps of decoding.
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

    def evaluate(
        self, name: str, model: CausalLM | TextModel, trainer: Trainer, console: Console
    ) -> Scores:
        """Measure the perplexity or, of a `TextModel`, the cosine with the first test's outputs."""
        console.print(f"Evaluating the {name} model on the {self.name} …")
        clock = _Clock()
        # The clock is a callback, so that setting up the trainer does not count as evaluation: the
        # speed is the basis of an estimate.
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
    measures = [f"perplexity @{dense['context']}", "× dense"]
    if "cosine" in dense:
        measures = ["mean cosine of outputs", ""]
        values = [["1", ""], [f"{pruned['cosine']:.4f}", ""]]
    else:
        ratio = number(_ratio(dense, pruned))
        values = [[perplexity(dense["perplexity"]), ""], [perplexity(pruned["perplexity"]), ratio]]
    for column in (*measures, "weights removed", "weights", "ms a token", "time"):
        table.add_column(column, justify="right")
    table.add_row("dense", *values[0], "", *sizes[0].cells(), "")
    share = percent(totals["removed"] / totals["model_weights"])
    if report.narrowed:
        share = percent(1 - report.narrowed["model_weights"] / totals["model_weights"])
    table.add_row(
        f"{_amount(prune.settings)} by {_method(prune.settings)}",
        *values[1],
        share,
        *sizes[1].cells(),
        roughly(max(seconds, totals["seconds"])),  # includes interrupted runs
    )
    return table


def _shares(report: PruningReport) -> str:
    """Return a sentence that relates the sparsity of the pruned layers to that of the model."""
    totals = report.totals
    if report.narrowed or not totals["removed"]:
        return ""
    of_all = percent(totals["removed"] / totals["model_weights"])
    return f" {percent(totals['sparsity'])} of the pruned layers' weights are {of_all} of all."


def _equally_fast(sizes: Sequence[Size]) -> list[Size]:
    """Return sizes with the time of the fastest.

    Zeros cost as much as other weights: a dense model and its pruned copy do the same work, so that
    their times differ only by other work on the machine.
    """
    times = [size.ms_a_token for size in sizes if size.ms_a_token is not None]
    return [replace(size, ms_a_token=min(times, default=None)) for size in sizes]


def _ratio(dense: Scores, pruned: Scores) -> float:
    return (pruned["perplexity"] or math.inf) / (dense["perplexity"] or math.inf)


_USELESS_RATIO = 3.0
"""The ratio of perplexities above which a pruned model is of little use."""
_USELESS_COSINE = 0.5
"""The mean cosine below which outputs point elsewhere: the angle is above 60°."""
_LEAST_REMOVED = 0.001
"""The fraction of removed weights below which a pruning has no benefit."""


def _why_useless(dense: Scores, pruned: Scores, report: PruningReport) -> str | None:
    """Return why a pruned model is of no use, `None` if it may be useful."""
    totals, loss = report.totals, None
    if "cosine" in pruned:
        if not (cosine := pruned["cosine"] or 0.0) >= _USELESS_COSINE:
            loss = f"The mean cosine of the outputs with those before is {number(cosine)}"
    # The negations also catch NaN, which compares as false: a model that computes NaN is of no use.
    elif not (ratio := _ratio(dense, pruned)) < _USELESS_RATIO:
        loss = f"The perplexity is {number(ratio)} times that of the dense model"
    if loss is not None:
        return (
            f"{loss}, which is of little use. Remove less (a lower `--sparsity`, a `--pattern` "
            "that keeps more, or more bits), or lose less: `--recipe best` and calibration "
            "`--text` that is like yours."
        )
    config = report.config
    # Few bits or a smaller width are a benefit without any zeros.
    is_changed = report.narrowed or any(config.get(key) for key in ("bits", "grid", "head_grid"))
    if not is_changed and totals["removed"] < _LEAST_REMOVED * totals["model_weights"]:
        return (
            f"Of {totals['model_weights']:,} weights {totals['removed']:,} are removed, which "
            "makes the model neither smaller nor faster. `--sparsity 0.5` removes half of them."
        )
    return None
