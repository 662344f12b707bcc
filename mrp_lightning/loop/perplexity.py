"""Exact perplexity: each token's likelihood counts once, in float32, whatever the batch size."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from mrp_lightning.records.evaluation import UNNAMED
from mrp_lightning.text.windows import Windows

_LOGITS = 2**25
"""Logits with a float32 copy in memory at a time, 128 MiB: a Qwen has 152,000 for each token."""


def token_losses(
    logits: Tensor, ids: Tensor, mask: Tensor | None, wanted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return −log p(id_t | id_<t) for every token but the first of each window.

    Args:
        logits: (batch, length, vocabulary), of any floating precision; the softmax is in float32.
        ids: (batch, length).
        mask: (batch, length), 0 for padding, on either side; `None` if there is none.
        wanted: bool (batch, length), False for further tokens that are not to be predicted.

    Returns:
        The losses (batch, length − 1) in nats, float32, 0 for tokens that are not predicted; and
        bool (batch, length − 1), True for predicted tokens: those that are wanted, are no padding,
        and follow a token that is no padding.
    """
    predicted = torch.ones_like(ids[:, 1:], dtype=torch.bool)
    if mask is not None:
        predicted = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    if wanted is not None:
        predicted = predicted & wanted[:, 1:]
    # Logits at t − 1 predict the token at t. A token after padding has no context, so the one
    # before it must be a token, too; this holds for padding on either side.
    targets = ids[:, 1:].long().masked_fill(~predicted, -100)
    # Window by window, in parts of at most 2²⁵ logits: a float32 copy of all could take more memory
    # than the model. Each loss depends on its own row alone.
    positions = max(1, _LOGITS // logits.shape[-1])
    parts = [
        F.cross_entropy(some.float(), of_some, ignore_index=-100, reduction="none")
        for window, of_window in zip(logits[:, :-1], targets, strict=True)
        for some, of_some in zip(window.split(positions), of_window.split(positions), strict=True)
    ]
    return torch.cat(parts).view(targets.shape), predicted


class MeanLoss(Metric):
    """The mean negative log-likelihood of all predicted tokens, independent of batches.

    Sums within a window are in float32, sums over windows in float64.
    """

    full_state_update = False
    sums: list[Tensor]
    counts: list[Tensor]
    context: Tensor

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        # One sum for each window: a running float32 sum would depend on the batches, and lose
        # digits. Lists of processes are joined, and summed in float64 at the end.
        self.add_state("sums", [], dist_reduce_fx="cat")
        self.add_state("counts", [], dist_reduce_fx="cat")
        self.add_state("context", torch.tensor(0), dist_reduce_fx="max")

    def update(self, losses: Tensor, predicted: Tensor) -> None:
        """Add the windows of a batch: the result of `token_losses`, (batch, length − 1) each."""
        self.sums.append(losses.detach().sum(1))
        self.counts.append(predicted.sum(1))
        self.context = self.context.clamp(min=losses.shape[1] + 1)

    def compute(self) -> Tensor:
        """Return the mean in nats a token, float64 on the CPU; NaN if no token was predicted."""
        # Σ losses / Σ tokens, not a mean of means: padded windows have fewer tokens. float64 on the
        # CPU, since some devices have none.
        return dim_zero_cat(self.sums).cpu().double().sum() / dim_zero_cat(self.counts).cpu().sum()


class Perplexity(MeanLoss):
    """The exponential of `MeanLoss`."""

    def compute(self) -> Tensor:
        """Return the perplexity; infinite beyond the range of floats, NaN without predictions."""
        return super().compute().exp()

    def figures(self) -> dict[str, float | int]:
        """Return an entry of `Evaluation.perplexity` over all processes, which all call this."""
        with self.sync_context():
            # Inside the context the states are those of all processes, so that windows and tokens
            # are counted over the same data as the loss.
            loss, counts = super().compute(), dim_zero_cat(self.counts)
            return {
                "perplexity": loss.exp().item(),
                "loss": loss.item(),
                "context": int(self.context),
                "windows": len(counts),
                "tokens": int(counts.sum()),
            }


class Perplexities:
    """Metrics of the texts of a `test` or `validate` run, from its dataloader or dataloaders.

    A single text without a name is called "text"; several without names are numbered from 0.
    """

    def __init__(self, loaders: Any = None, device: torch.device | None = None) -> None:
        if isinstance(loaders, list | tuple):
            loaders = dict(enumerate(loaders)) if len(loaders) != 1 else loaders[0]
        named = loaders if isinstance(loaders, Mapping) else {UNNAMED: loaders}
        self.names = [str(name) for name in named]
        self._data = [getattr(loader, "dataset", None) for loader in named.values()]
        self._metrics = [(MeanLoss().to(device), Perplexity().to(device)) for _ in named]

    def logged(self, index: int) -> dict[str, MeanLoss]:
        """Return `loss` and `perplexity` of one text by logged name; of several, `loss/c4` etc."""
        suffix = f"/{self.names[index]}" if len(self.names) > 1 else ""
        loss, perplexity = self._metrics[index]
        return {f"loss{suffix}": loss, f"perplexity{suffix}": perplexity}

    def figures(self) -> dict[str, dict[str, float | int]]:
        """Return the `figures` of each text that had a batch, by name.

        A text of `Windows` also has the `prefix`, the number of tokens before each window, which
        are not counted, and the `checksum` (CRC-32) of the windows' tokens, which distinguishes
        texts of one name.
        """
        figures = {}
        for name, (_, metric), data in zip(self.names, self._metrics, self._data, strict=True):
            if metric.update_called:
                figures[name] = metric.figures()
                if isinstance(data, Windows):
                    ids = data.ids[: figures[name]["windows"]].contiguous()
                    figures[name] |= {"prefix": data.prefix, "checksum": crc32(ids.numpy().data)}
        return figures
