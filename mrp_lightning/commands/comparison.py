"""One pruning and its comparison with the dense model, on the same windows of held-out text."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from mrp_lightning.callbacks import PruningCallback
from mrp_lightning.commands import comparison_texts as texts
from mrp_lightning.commands.distillation import DistilledPruning
from mrp_lightning.commands.main import command_named
from mrp_lightning.commands.quiet import quiet_lightning
from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.data.own_text import estimate_writing
from mrp_lightning.errors import ArgumentError, DataError, OptionError, counted
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import check_batch
from mrp_lightning.loop.module_plan import plan_for
from mrp_lightning.loop.pruned_module import check_save_dir
from mrp_lightning.loop.text_model import TextModel
from mrp_lightning.loop.trainer import Trainer, require_accelerator
from mrp_lightning.models.classes import is_causal
from mrp_lightning.models.gguf import find_gguf, located
from mrp_lightning.models.loading import load_config
from mrp_lightning.pruning.estimate import Estimate, estimate, products_per_second
from mrp_lightning.records.evaluation import Scores, record
from mrp_lightning.records.report import NAME, PruningReport
from mrp_lightning.storage.outputs import check_output_dir
from mrp_lightning.targets.plan import Plan
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
_TIMED_TOKENS = 10


def prune_and_compare(
    source: Mapping[str, Any],
    text: Mapping[str, Any],
    prune: PruningCallback,
    conversions: "Sequence[Conversion]",
    *,
    windows: int,
    accelerator: str,
    console: Console,
    distilled: DistilledPruning | None = None,
) -> str | None:
    """Evaluate a model, prune it, save it, evaluate it again, convert it, and print the results.

    Arguments and text are checked before the first evaluation. The scores are also recorded in
    `evaluation.json`, in the directory of the pruned model.

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
        distilled: The distillation after the pruning; `None` for none.

    Returns:
        The reason why the result is of no use, `None` if it may be useful.

    Raises:
        OptionError: The accelerator is missing, or a model that is not causal has no `train_files`.
        FileExistsError: The output of the pruning, or of a conversion, exists.
    """
    require_accelerator(accelerator)
    # Each step needs the one before: the plan needs the model, the estimate of the time needs the
    # speed of the first evaluation, and only then hours of work begin.
    with quiet_lightning():
        _data(text)  # refuses missing files before a model is loaded
        console.print(f"Loading {source['model']} …")
        model = _load(source, text)
        _check_outputs(model, prune, conversions)
        subject = _Subject(model, _data(text, model), prune, windows, accelerator)
        if not text["train_files"] and "num_samples" not in text:
            subject.take_fewer_windows()
        if distilled is not None:
            distilled.check(model, subject.data)
        console.print(texts.plan(prune.settings, subject.plan, subject.data, subject.num_samples))
        # The dense evaluation comes before the pruning, which changes the model in memory.
        dense = subject.evaluate("dense", console)
        console.print(texts.announcement(*subject.expected_work()))
        sizes = [measure(subject.trainer, model)]
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
        sizes.append(measure(subject.trainer, subject.model))
    assert prune.save_dir is not None
    report = PruningReport.load(prune.save_dir / NAME)
    table = texts.table(dense, pruned, first.settings, report, sizes, seconds)
    if distilled is not None:
        table.add_row(f"{texts.amount(prune.settings)}, distilled", *texts.quality(dense, final))
    subject.record(prune.save_dir, dense, final)
    windows_read = f"{counted(len(subject.windows), 'window')} of {dense['context']} tokens"
    try:
        for conversion in conversions:
            size = conversion.convert(prune.save_dir)
            table.add_row(str(conversion.out), "", "", "", *texts.cells(size), "")
    finally:  # also if a conversion fails: the pruned model is saved
        console.print(table)
        console.print(f"Evaluated on {windows_read} of the {subject.text}.{texts.shares(report)}")
    return texts.why_useless(dense, final, report)


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


def _check_outputs(
    model: CausalLM | TextModel, prune: PruningCallback, conversions: "Sequence[Conversion]"
) -> None:
    assert prune.save_dir is not None
    check_save_dir(prune.save_dir, model, overwrite=prune.overwrite, argument="--out")
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
        prune: PruningCallback,
        windows: int,
        accelerator: str,
    ) -> None:
        self.model, self.data, self._settings = model, data, prune.settings
        self.plan: Plan = plan_for(model, prune.settings)
        self.trainer = Trainer(
            accelerator=accelerator,
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stdout.isatty(),
        )
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

    def evaluate(self, state: str, console: Console) -> Scores:
        """Measure the perplexity or, of a `TextModel`, the cosine with the first test's outputs."""
        console.print(f"Evaluating the {state} model on the {self.text} …")
        loader = DataLoader(self.windows, batch_size=self.data.batch_size)
        start = time.perf_counter()
        self.trainer.test(self.model, dataloaders={self.text: loader}, verbose=False)
        self.seconds = time.perf_counter() - start
        (scores,) = self.model.evaluation.values()
        return scores

    def record(self, directory: Path, dense: Scores, final: Scores) -> None:
        """Record the scores before and after in `evaluation.json`."""
        scores = {"perplexity": {self.text: final}, "dense": {self.text: dense}}
        if isinstance(self.model, TextModel):
            scores = {"similarity": {self.text: final}}
        record(directory, **scores, model=str(directory))

    def expected_work(self) -> tuple[Estimate, Estimate]:
        """Estimate the work, and the writing of own text in it, by the last evaluation."""
        device, model = self.trainer.strategy.root_device, self.model.model
        length, writing = self.data.sequence_length, Estimate(0.0, 0)
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
        evaluating = Estimate(self.seconds, 0)  # of the pruned model
        return work.after(writing).after(evaluating), writing


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

    def convert(self, directory: Path) -> texts.Size:
        """Run the command; return the bytes of its files, and the speed if it runs here."""
        command_named(self.command)([str(directory), "--out", str(self.out), *self.options])
        if self.out.is_file():
            return texts.Size(self.out.stat().st_size, None)
        files = [file for kind in ("safetensors", "bin") for file in self.out.glob(f"*.{kind}")]
        num_bytes = sum(file.stat().st_size for file in files)
        try:
            return replace(measure(None, CausalLM(str(self.out))), num_bytes=num_bytes)
        except ArgumentError:  # a format that only other engines run
            return texts.Size(num_bytes, None)


@torch.inference_mode()
def measure(trainer: Trainer | None, module: CausalLM | TextModel) -> texts.Size:
    """Measure the bytes and the speed of a model, one text at a time, uncompiled.

    The model is on the device of the trainer, from which an evaluation moves it, or on its own.
    """
    model: Any = module.to(trainer.strategy.root_device if trainer else module.device).model.eval()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    if not model.can_generate():
        return texts.Size(num_bytes, None)
    ids = torch.zeros(1, 1, dtype=torch.long, device=model.device)

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        exactly = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **exactly)
        return time.perf_counter() - start

    seconds(2)  # warms up
    # The least of a few, since other work on the machine only adds to it.
    one, more = (min(seconds(tokens) for _ in range(3)) for tokens in (1, 1 + _TIMED_TOKENS))
    return texts.Size(num_bytes, 1000 * (more - one) / _TIMED_TOKENS)
