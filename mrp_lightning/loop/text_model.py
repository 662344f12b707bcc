"""A Hugging Face model that reads text and predicts no next token, as a LightningModule."""

import inspect
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from mrp_lightning.loop.causal_lm import ExactValues
from mrp_lightning.models.batch import split_batch
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.models.loading import (
    as_dtype,
    find_tokenizer,
    load_text_model,
    load_tokenizer,
    warn_of_rounding,
)
from mrp_lightning.text.windows import Cutter

_NUMBERS = 2**20
"""The most outputs of a window that are compared: some models have 30,000 for each token."""


class TextModel(ExactValues):
    """An encoder or a classifier of texts or tokens, of the class that its configuration names.

    `predict` prunes it. `test` measures the mean cosine of its outputs with those of the first
    `test`, on the same windows. The outputs are the hidden states or logits that the model gives
    first. A window is read as a text of its own: the tokens that the tokenizer puts after a text,
    such as [SEP], are appended to it.

    Args:
        model: The directory or hub id of the model.
        dtype: The precision to load the weights in; `None` keeps the checkpoint's.
        revision: The branch, tag or commit on the hub.
        trust_remote_code: Whether code that comes with the checkpoint may run here.
        tokenizer: A tokenizer, or the directory or hub id of one; by default the model's own.

    Attributes:
        model: The Hugging Face model.
        tokenizer: Its tokenizer, or `None` where there is none.
        end: The tokens that are appended to each window, (tokens,), int64.
        evaluation: The result of the last `test`: for "text" the `cosine`, from −1 to 1, the
            `context` (tokens a window, `end` included) and the number of `windows`.

    Raises:
        TargetError: The model reads more than one text, or is quantized; or the weights are not
            those of its class. `load_text_model` and `load_tokenizer` raise more.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        tokenizer: str | os.PathLike[str] | PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__()
        source = os.fspath(model)
        hub = {"revision": revision, "trust_remote_code": trust_remote_code}
        self.model = load_text_model(source, as_dtype(dtype), **hub)
        if dtype is None:
            warn_of_rounding(self.model)
        self.tokenizer: Any = (
            load_tokenizer(tokenizer, **hub) if tokenizer else find_tokenizer(source, **hub)
        )
        self.end = torch.tensor([]).long()
        if self.tokenizer is not None:
            self.end = Cutter(self.tokenizer, _ANY_LENGTH).suffix
        self.evaluation: dict[str, dict[str, float | int]] = {}
        self._reference: list[Tensor] = []
        self._outputs: list[Tensor] = []
        self._context = 0
        parameters = inspect.signature(self.model.forward).parameters
        self._options = {"use_cache": False} if "use_cache" in parameters else {}
        self.save_hyperparameters({"model": source, "revision": revision})

    @property
    def longest(self) -> int | None:
        """The most tokens of a window, `end` included; `None` if nothing limits them.

        A tokenizer may know a lower limit than the configuration, which counts two positions of
        RoBERTa that no token has.
        """
        limits = [
            longest_sequence(self.model.config),
            getattr(self.tokenizer, "model_max_length", None),
        ]
        return min((n for n in limits if n is not None and n < _ANY_LENGTH), default=None)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Compute hidden states (batch, length, features) or logits; add `end` without a mask."""
        if attention_mask is None:  # else the caller has put the tokens after each text
            end = self.end.to(input_ids).expand(len(input_ids), -1)
            input_ids = torch.cat([input_ids, end], 1)
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **self._options)[0]

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Compute the outputs of a batch."""
        return self(*split_batch(batch))

    def on_test_epoch_start(self) -> None:
        """Forget the outputs of the last test."""
        self._outputs = []

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Store outputs in float32 on the CPU, of every n-th token if they exceed `_NUMBERS`."""
        ids, mask = split_batch(batch)
        output = self(ids, mask)
        # Every n-th token, the same in both tests, since n depends on the shape alone.
        if output.ndim > 2:
            output = output[:, :: -(-output[0].numel() // _NUMBERS)]
        self._outputs.append(output.detach().float().cpu())
        self._context = ids.shape[1] + (len(self.end) if mask is None else 0)

    def on_test_epoch_end(self) -> None:
        """Set `evaluation`; the outputs of the first test become the reference."""
        # The first outputs stay the reference, also when the model has changed since.
        self._reference = self._reference or self._outputs
        self.evaluation = {
            "text": {
                "cosine": mean_cosine(torch.cat(self._outputs), torch.cat(self._reference)),
                "context": self._context,
                "windows": sum(map(len, self._outputs)),
            }
        }


_ANY_LENGTH = 10**6
"""A number of tokens that no model is limited to; tokenizers without a limit have a larger one."""


def mean_cosine(outputs: Tensor, others: Tensor) -> float:
    """Return the mean cosine of the angles between the vectors of two tensors (…, features).

    Single numbers, as a ranking model gives, have no angle: all of them make one vector.
    """
    if outputs.shape[-1] == 1:
        outputs, others = outputs.reshape(1, -1), others.reshape(1, -1)
    return float(F.cosine_similarity(outputs.double(), others.double(), dim=-1).mean())
