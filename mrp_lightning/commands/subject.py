"""The model and the text of a command, checked before work, and evaluated on held-out windows."""

import sys
import time
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from mrp_lightning.data.data_module import TextDataModule
from mrp_lightning.data.own_text import estimate_writing
from mrp_lightning.errors import DataError, OptionError
from mrp_lightning.loop.calibration_data import check_batch
from mrp_lightning.loop.causal_lm import CausalLM
from mrp_lightning.loop.module_parts import plan_for
from mrp_lightning.loop.text_model import TextModel
from mrp_lightning.loop.trainer import Trainer
from mrp_lightning.models.classes import is_causal
from mrp_lightning.models.gguf import located
from mrp_lightning.models.loading import load_config
from mrp_lightning.models.locations import find_gguf
from mrp_lightning.pruning.estimate import Estimate, estimate, products_per_second
from mrp_lightning.pruning.settings import Settings
from mrp_lightning.records.evaluation import Scores
from mrp_lightning.targets.plan import Plan
from mrp_lightning.terminal import Console
from mrp_lightning.text.mixture import SELF, beside_files
from mrp_lightning.text.sources import StandardLibrary
from mrp_lightning.text.windows import Cutter

_TOKENS_A_COLUMN = 32
"""Tokens of own text for each column of the widest layer: in the embedded model, twice and six
times as many lower the perplexity by 0.2 and 0.3% at 2:4, and not at 50%; see
docs/self-calibration.md."""
_LONGEST_TEXT = 512
"""The longest default window of a `TextModel`: encoders are seldom given longer texts."""


class Subject:
    """A model, the text that it is calibrated and evaluated on, and the trainer of both.

    Args:
        source: The arguments of `CausalLM` that name the model; one that is no causal language
            model is loaded as a `TextModel`.
        text: The arguments of the `TextDataModule`, and `own`, the share of text that the model
            writes itself, 0 by default. Of `train_files` a tenth is held out; if these
            are `None`, a causal language model is calibrated on text that it writes itself, and
            evaluated on the source code of Python's standard library.
        windows: The largest number of windows to evaluate on.
        accelerator: The accelerator, as Lightning names it.

    Attributes:
        data: The text to evaluate on, and to calibrate on unless it is replaced by `calibration`.
        calibration: The text to calibrate on.
        source: The name of the text given, or of the model's own.
        windows: The windows to evaluate on; `text` is the name of their text.
        num_samples: The number of windows to calibrate on.
        seconds: The duration of the last evaluation.

    Raises:
        OptionError: A model that is not causal has no `train_files`.
        DataError: The windows are longer than a `TextModel` can read.
    """

    def __init__(
        self, source: Mapping[str, Any], text: Mapping[str, Any], windows: int, accelerator: str
    ) -> None:
        given = _data({**text, "own": 0})  # refuses missing files before a model is loaded
        self.source = given.calibration_source
        self.model = _load_model(source, text)
        self.data = _data(text, self.model)
        self.data.tokenizer = self.data.tokenizer or self.model.tokenizer
        self.data.fit_to(self.model.model.config)
        self.calibration = self.data
        self.has_files = bool(text["train_files"])
        self._num_is_given = "num_samples" in text
        self._most_windows = windows
        self.trainer = Trainer(
            accelerator=accelerator,
            logger=False,
            enable_model_summary=False,
            enable_progress_bar=sys.stdout.isatty(),
        )
        self.text = f"source of {StandardLibrary().name}"
        if self.has_files:
            self.text = f"held-out part of {self.source}"
        self.seconds = 0.0

    @property
    def num_bytes(self) -> int:
        """The bytes of the parameters."""
        return sum(parameter.nbytes for parameter in self.model.model.parameters())

    def cut_windows(self) -> None:
        """Cut the windows of the evaluation by the present tokenizer."""
        self.windows = self.data.windows("test", self._most_windows)
        check_batch(self.model, self.windows.ids)

    def plan(self, settings: Settings) -> Plan:
        """Return what is pruned; check the text, and take as much own text as the layers need."""
        plan = plan_for(self.model, settings)
        self.cut_windows()
        if self.calibration is not self.data:
            self.num_samples = self.calibration.num_samples
            return plan
        if self.has_files and not self.data.own_windows:
            calibration = self.data.calibration_windows()
            check_batch(self.model, calibration)
            self.num_samples = len(calibration)  # which may be fewer than asked for
            return plan
        self.num_samples = self.data.num_samples
        if self.has_files:
            return plan
        # Writing a window costs more than pruning with it, so that a small model writes fewer. An
        # expert sees its router's share of the tokens, which no configuration bounds.
        has_experts = any(hasattr(module, "experts") for module in self.model.model.modules())
        if not self._num_is_given and not has_experts:
            layers = [*chain.from_iterable(plan.layers.values()), *plan.outside]
            layers += [plan.head] if plan.head is not None else []
            tokens = _TOKENS_A_COLUMN * max(layer.columns for layer in layers)
            self.num_samples = min(self.num_samples, -(-tokens // self.data.sequence_length))
            self.data.num_samples = self.num_samples
        return plan

    def evaluate(self, state: str, console: Console) -> Scores:
        """Measure the perplexity or, of a `TextModel`, the cosine with the first test's outputs."""
        console.print(f"Evaluating the {state} on the {self.text} …")
        loader = DataLoader(self.windows, batch_size=self.data.batch_size)
        start = time.perf_counter()
        self.trainer.test(self.model, dataloaders={self.text: loader}, verbose=False)
        self.seconds = time.perf_counter() - start
        (scores,) = self.model.evaluation.values()
        return scores

    def estimate(self, plan: Plan, settings: Settings) -> tuple[Estimate, Estimate]:
        """Return the expected work, and the part that writes own text.

        Times follow from the speed of the last evaluation, and include another one.
        """
        device, model = self.trainer.strategy.root_device, self.model.model
        length, writing = self.calibration.sequence_length, Estimate(0.0, 0)
        work = estimate(
            model,
            plan,
            settings,
            windows=self.num_samples,
            length=length,
            tokens_per_second=self.windows.ids.numel() / self.seconds,
            products_per_second=products_per_second(device),
        )
        if own := self.calibration.own_windows:
            self.model.to(device)
            cutter = Cutter(self.model.tokenizer, length)
            writing = estimate_writing(model, cutter, self.data.seed, own)
        return work.after(writing).after(Estimate(self.seconds, 0)), writing


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
    if text.get("own"):
        raise OptionError(f"the model {location} predicts no next token, so it writes none.", "own")
    return TextModel(location, dtype=source["dtype"], **hub, tokenizer=text.get("tokenizer"))


def _data(text: Mapping[str, Any], model: nn.Module | None = None) -> TextDataModule:
    """Return the text; windows for a `TextModel` leave room for the tokens that end a text."""
    text = dict(text)
    own = text.pop("own", 0)
    if not text["train_files"]:
        return TextDataModule(**text, calibration=SELF)
    if not isinstance(model, TextModel):
        shares = beside_files(own) if own else None
        return TextDataModule(**text, calibration=shares, hold_out=True)
    longest = model.longest
    length = text.get("sequence_length") or min(_LONGEST_TEXT, longest or _LONGEST_TEXT)
    if longest is not None and length > longest:
        raise DataError(
            f"the windows have {length} tokens, and the model reads {longest}. Give that or less.",
            "sequence_length",
        )
    length = max(2, length - len(model.end))
    return TextDataModule(**{**text, "sequence_length": length}, hold_out=True)
