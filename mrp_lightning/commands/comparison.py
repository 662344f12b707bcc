"""One pruning and its comparison with the dense model, on the same windows of held-out text."""

import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.commands.distillation import DistilledPruning
from mrp_lightning.commands.main import command_named
from mrp_lightning.commands.numbers import memory, number, percent, perplexity
from mrp_lightning.commands.quiet import quiet_lightning
from mrp_lightning.commands.vocabulary import VocabularyStep
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.data.own_text import estimate_writing
from mrp_lightning.errors import DataError, OptionError, counted
from mrp_lightning.loop.calibration_data import check_batch
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import plan_for
from mrp_lightning.loop.progress import roughly
from mrp_lightning.loop.pruned_module import check_save_dir
from mrp_lightning.loop.text_model import TextModel
from mrp_lightning.loop.trainer import Trainer, require_accelerator
from mrp_lightning.loop.vocabulary import save_cut
from mrp_lightning.models.classes import is_causal
from mrp_lightning.models.gguf import located
from mrp_lightning.models.loading import load_config
from mrp_lightning.models.locations import find_gguf
from mrp_lightning.narrowing.structure import BLOCKS
from mrp_lightning.pruning.estimate import Estimate, estimate, products_per_second
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.evaluation import Scores, record
from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.terminal import Console
from mrp_lightning.text.mixture import SELF
from mrp_lightning.text.sources import StandardLibrary
from mrp_lightning.text.windows import Cutter

_TOKENS_A_COLUMN = 32
"""Tokens of own text for each column of the widest layer: in the embedded model, twice and six
times as many lower the perplexity by 0.2 and 0.3% at 2:4, and not at 50%; see
docs/self-calibration.md."""
_LONGEST_TEXT = 512
"""The longest default window of a `TextModel`: encoders are seldom given longer texts."""
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

    def check(self) -> None:
        """Raise a `FileExistsError` if the command would refuse its output, hours later."""
        overwrite = "--overwrite" in self.options
        if self.command == "export":
            check_output_dir(self.out, overwrite=overwrite, argument="--pack")
        elif self.out.exists() and not overwrite:
            raise FileExistsError(f"{self.out} exists. Name another, or add `--overwrite`.")

    def words(self, directory: Path) -> list[str]:
        """Return the words of the command line after the program's."""
        return [self.command, str(directory), "--out", str(self.out), *self.options]

    def convert(self, directory: Path) -> int:
        """Run the command; return the bytes of the weights that it wrote."""
        command_named(self.command)(self.words(directory)[1:])
        files = [file for kind in ("safetensors", "bin") for file in self.out.glob(f"*.{kind}")]
        return sum(file.stat().st_size for file in files or [self.out])


def prune_and_compare(
    source: Mapping[str, Any],
    text: Mapping[str, Any],
    prune: PruningCallback,
    conversions: Sequence[Conversion],
    *,
    windows: int,
    accelerator: str,
    console: Console,
    words: int | None = None,
    distilled: DistilledPruning | None = None,
) -> str | None:
    """Evaluate a model, prune it, save it, evaluate it again, convert it, and print the results.

    Arguments and text are checked before the first evaluation. `evaluation.json`, in the directory
    of the pruned model, has the scores, too.

    Args:
        source: The arguments of `CausalLM` that name the model.
        text: The arguments of the `TextDataModule`. Of `train_files` a tenth is held out; if these
            are `None`, a causal language model is calibrated on text that it writes itself, and
            evaluated on the source code of Python's standard library.
        prune: The callback, with `save_dir`.
        conversions: The conversions of the pruned model to other formats.
        windows: The largest number of windows to evaluate on.
        accelerator: The accelerator, as Lightning names it.
        console: The console for progress and results.
        words: The number of words to which the vocabulary is cut first, `None` for no cut. Pruned
            and dense model are then those of these words.
        distilled: The distillation after the pruning; `None` for none.

    Returns:
        The reason why the result is of no use, `None` if it may be useful.

    Raises:
        OptionError: The accelerator is missing, or a model that is not causal has no `train_files`.
        FileExistsError: The output of the pruning, or of a conversion, exists.
    """
    assert prune.save_dir is not None
    require_accelerator(accelerator)
    # Each step needs the one before: the plan a model, the estimate the speed of an evaluation.
    with quiet_lightning():
        console.print(f"Loading {source['model']} …")
        model, data = _load(source, text)
        check_save_dir(prune.save_dir, model, overwrite=prune.overwrite, argument="--out")
        _check_conversions(conversions, model)
        if words is not None:
            plan_for(model, prune.settings)  # refuses what cannot be pruned before the cut
            VocabularyStep(model, data, words, windows).run(_trainer(accelerator), console)
        subject = _Subject(model, data, prune.settings, windows, accelerator)
        if not text["train_files"] and "num_samples" not in text:
            subject.take_fewer_windows()
        if distilled is not None:
            distilled.check(model, subject.data)
        console.print(subject.announcement())
        # The dense evaluation comes before the pruning, which changes the model in memory.
        dense, sizes = subject.evaluate("dense", console), [_num_bytes(model)]
        console.print(subject.expectation())
        start = time.perf_counter()
        first = prune if distilled is None else distilled.pruning()
        if first.report is None:
            subject.trainer.predict(model, datamodule=subject.data, callbacks=[first])
        else:
            subject.model = CausalLM(str(first.save_dir))
        pruned = final = subject.evaluate("pruned", console)
        if distilled is not None:
            subject.model = distilled.finish(first, subject.trainer, subject.data)
            final = subject.evaluate("distilled", console)
        seconds = time.perf_counter() - start
        sizes.append(_num_bytes(subject.model))
    report = PruningReport.load(prune.save_dir / NAME)
    table = _table(dense, pruned, first.settings, report, sizes, seconds)
    if distilled is not None:
        table.add_row(f"{amount(prune.settings)}, distilled", *_quality(dense, final))
    subject.record(prune.save_dir, dense, final)
    try:
        _convert(conversions, prune.save_dir, table, console)
    finally:  # also if a conversion fails: the pruned model is saved
        console.print(table, subject.evaluated)
    return why_useless(dense, final)


def cut_and_compare(
    source: Mapping[str, Any],
    text: Mapping[str, Any],
    words: int,
    out: Path,
    conversions: Sequence[Conversion],
    *,
    windows: int,
    accelerator: str,
    console: Console,
    overwrite: bool,
) -> None:
    """Cut the vocabulary of a model, and nothing else; save, evaluate and convert it.

    Args:
        source: The arguments of `CausalLM` that name the model.
        text: The arguments of the `TextDataModule`, of whose `train_files` a tenth is held out.
        words: The number of words to keep.
        out: The directory of the result.
        conversions: The conversions of the result to other formats.
        windows: The largest number of windows to evaluate on.
        accelerator: The accelerator, as Lightning names it.
        console: The console for progress and results.
        overwrite: Whether `out` may be replaced.

    Raises:
        OptionError: The accelerator or the text is missing, or the number of words out of range.
        TargetError: The vocabulary cannot be cut.
        FileExistsError: The output, or that of a conversion, exists.
    """
    require_accelerator(accelerator)
    with quiet_lightning():
        console.print(f"Loading {source['model']} …")
        model, data = _load(source, text)
        check_save_dir(out, model, overwrite=overwrite, argument="--out")
        _check_conversions(conversions, model)
        step = VocabularyStep(model, data, words, windows)
        scores = step.run(_trainer(accelerator), console)
        save_cut(step.model, out, overwrite=overwrite)
    record(out, perplexity={step.text: scores}, model=str(out))
    for conversion in conversions:
        console.print(f"{conversion.out}: {memory(conversion.convert(out))}")


def _convert(
    conversions: Sequence[Conversion], directory: Path, table: Table, console: Console
) -> None:
    """Convert a pruned model, and add a row for each result; name the command that fails."""
    for conversion in conversions:
        try:
            size = conversion.convert(directory)
        except (Exception, SystemExit):  # a command exits after a mistake
            again = shlex.join(conversion.words(directory))
            line = f"The pruned model is saved. What failed is: mrp-lightning {again}"
            console.print(line, soft_wrap=True)
            raise
        table.add_row(str(conversion.out), "", "", "", memory(size))


def _trainer(accelerator: str) -> Trainer:
    return Trainer(
        accelerator=accelerator,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )


def _num_bytes(model: CausalLM | TextModel) -> int:
    """Return the bytes of the parameters."""
    return sum(parameter.nbytes for parameter in model.model.parameters())


def _load(
    source: Mapping[str, Any], text: Mapping[str, Any]
) -> tuple[CausalLM | TextModel, TextDataModule]:
    """Load a causal language model as a `CausalLM`, any other as a `TextModel`, and its text."""
    _data(text)  # refuses missing files before a model is loaded
    model = _load_model(source, text)
    return model, _data(text, model)


def _load_model(source: Mapping[str, Any], text: Mapping[str, Any]) -> CausalLM | TextModel:
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


def _data(text: Mapping[str, Any], model: nn.Module | None = None) -> TextDataModule:
    """Return the text of files with a held-out part, or the text that the model will write.

    Windows for a `TextModel` leave room for the tokens that end a text.

    Raises:
        DataError: The windows that the user asks for are longer than a `TextModel` can read.
    """
    if not text["train_files"]:
        return TextDataModule(**text, calibration=SELF)
    if not isinstance(model, TextModel):
        return TextDataModule(**text, hold_out=True)
    longest = model.longest
    length = text.get("sequence_length") or min(_LONGEST_TEXT, longest or _LONGEST_TEXT)
    if longest is not None and length > longest:
        raise DataError(
            f"the windows have {length} tokens, and the model reads {longest}. Give that or less.",
            "sequence_length",
        )
    length = max(2, length - len(model.end))
    return TextDataModule(**{**text, "sequence_length": length}, hold_out=True)


def _check_conversions(conversions: Sequence[Conversion], model: CausalLM | TextModel) -> None:
    for conversion in conversions:
        conversion.check()
        if conversion.command == "gguf" and isinstance(model, TextModel):
            raise OptionError(
                f"a {type(model.model).__name__} predicts no next token, and files for llama.cpp "
                "are made of models that do. Leave it out.",
                "gguf",
            )


class _Subject:
    """A model that is pruned, with its text and its trainer; its layers and text are checked.

    Attributes:
        num_samples: The number of windows to calibrate on.
        windows: The windows to evaluate on; `text` is the name of their text.
        seconds: The duration of the last evaluation.
    """

    def __init__(
        self,
        model: CausalLM | TextModel,
        data: TextDataModule,
        settings: Settings,
        windows: int,
        accelerator: str,
    ) -> None:
        self.model, self.data, self._settings = model, data, settings
        self.plan = plan_for(model, settings)
        self.trainer = _trainer(accelerator)
        data.tokenizer = data.tokenizer or model.tokenizer
        data.fit_to(model.model.config)
        self.windows = data.windows("test", windows)
        check_batch(model, self.windows.ids)
        self.num_samples, self.text = data.num_samples, f"source of {StandardLibrary().name}"
        if data.train_files:  # which may hold fewer windows
            calibration = data.calibration_windows()
            check_batch(model, calibration)
            self.num_samples = len(calibration)
            self.text = f"held-out part of {data.calibration_source}"
        self.seconds = 0.0

    def take_fewer_windows(self) -> None:
        """Take as many windows of own text as the widest layer needs.

        Writing a window costs more than pruning with it, so that a small model writes fewer than
        the default of the `TextDataModule`, which is also the most, and the number for a model with
        experts.
        """
        # An expert sees its router's share of the tokens, which no configuration bounds.
        if any(hasattr(module, "experts") for module in self.model.model.modules()):
            return
        layers = [*chain.from_iterable(self.plan.layers.values()), *self.plan.outside]
        layers += [self.plan.head] if self.plan.head is not None else []
        tokens = _TOKENS_A_COLUMN * max(layer.columns for layer in layers)
        self.num_samples = min(self.num_samples, -(-tokens // self.data.sequence_length))
        self.data.num_samples = self.num_samples

    def announcement(self) -> str:
        """Return a sentence on the layers, the settings and the text of the pruning."""
        verb = "quantised" if isinstance(self._settings.recipe.pattern, Dense) else "pruned"
        text = f"{self.data.calibration_source}."
        if not self.data.train_files:
            text = "text that the model writes itself. Text that is like yours is given by `--text "
            text += "FILE`: it is then evaluated on, too."
        of_blocks = self._settings.structure == BLOCKS
        num = len(self.plan.blocks) if of_blocks else self.plan.num_layers
        return (
            f"{counted(num, 'block' if of_blocks else 'layer')} {'is' if num == 1 else 'are'} to "
            f"be {verb} to {amount(self._settings)} by {method(self._settings)}, calibrated on "
            f"{counted(self.num_samples, 'window')} of {text}"
        )

    def evaluate(self, state: str, console: Console) -> Scores:
        """Measure the perplexity or, of a `TextModel`, the cosine with the first test's outputs."""
        console.print(f"Evaluating the {state} model on the {self.text} …")
        loader = DataLoader(self.windows, batch_size=self.data.batch_size)
        start = time.perf_counter()
        self.trainer.test(self.model, dataloaders={self.text: loader}, verbose=False)
        self.seconds = time.perf_counter() - start
        (scores,) = self.model.evaluation.values()
        return scores

    @property
    def evaluated(self) -> str:
        """A sentence on the text of the evaluation."""
        context = self.windows.ids.shape[1]
        read = f"{counted(len(self.windows), 'window')} of {context} tokens"
        return f"Evaluated on {read} of the {self.text}."

    def expectation(self) -> str:
        """Return a sentence on the expected time and memory, by the speed of the last evaluation.

        The time includes an evaluation of the pruned model, and the writing of own text.
        """
        device, model = self.trainer.strategy.root_device, self.model.model
        length, writing, part = self.data.sequence_length, Estimate(0.0, 0), ""
        work = estimate(
            model,
            self.plan,
            self._settings,
            windows=self.num_samples,
            length=length,
            tokens_per_second=self.windows.ids.numel() / self.seconds,
            products_per_second=products_per_second(device),
        )
        if not self.data.train_files:
            self.model.to(device)
            cutter = Cutter(self.model.tokenizer, length)
            writing = estimate_writing(model, cutter, self.data.seed, self.data.num_samples)
            part = f" ({roughly(writing.seconds)} of it to write that text)"
        work = work.after(writing).after(Estimate(self.seconds, 0))
        return (
            f"Pruning may take {roughly(work.seconds)}{part} and, beside the model, "
            f"{memory(work.num_bytes)} of memory. This is a rough estimate, with an evaluation as "
            "before; small models, few bits and busy machines take longer. If it is interrupted, "
            "the same command goes on where it was."
        )

    def record(self, directory: Path, dense: Scores, final: Scores) -> None:
        """Record the scores before and after in `evaluation.json`."""
        scores = {"perplexity": {self.text: final}, "dense": {self.text: dense}}
        if isinstance(self.model, TextModel):
            scores = {"similarity": {self.text: final}}
        record(directory, **scores, model=str(directory))


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
