"""Prove that an exported checkpoint computes what its source computes.

Three gates, in this order: the bits of the files, the operator against a more precise product, and
the logits of the whole model on text.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer, PreTrainedModel

from export.checkpoint import Checkpoint, open_checkpoint
from export.format import invalid_nibbles, positive_zeros, unpack
from export.huggingface import load
from export.layer import Sparse24Linear
from export.progress import Track, silently
from export.selection import LayerChoice
from mrp_lightning.errors import DataError, ParityError
from mrp_lightning.text_data import TextDataModule

MAX_ERROR_RATIO = 1.5
"""Error of the operator over that of the dense product in the same dtype."""
MIN_TOP1_AGREEMENT = 0.995
MAX_PERPLEXITY_CHANGE = 0.01
MIN_TOKENS = 4096
_TOKENS_PER_LAYER = 16
_WINDOW = 512


@dataclass(frozen=True)
class OperatorError:
    """Frobenius error of a layer's output, relative to a product in higher precision."""

    name: str
    packed: float
    dense: float


@dataclass(frozen=True)
class TextParity:
    """The whole model on the same tokens, before and after.

    Attributes:
        text: Where the tokens come from.
        tokens: How many were predicted.
        top1_agreement: Fraction of positions at which the likeliest token is the same.
        perplexity_before: Of the pruned model.
        perplexity_after: Of the exported one.
        divergence: Mean Kullback-Leibler divergence in nats.
        max_difference: Of a logit.
        bit_equal: Whether all logits have the same value.
    """

    text: str
    tokens: int
    top1_agreement: float
    perplexity_before: float
    perplexity_after: float
    divergence: float
    max_difference: float
    bit_equal: bool


@dataclass
class Parity:
    """What was compared, and what failed.

    Attributes:
        tensors: How many tensors were compared bit by bit.
        operators: The packed layers, one by one.
        text: `None` where the model predicts no next token.
        failures: Empty where the gate is passed.
    """

    tensors: int = 0
    operators: list[OperatorError] = field(default_factory=list)
    text: TextParity | None = None
    failures: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For the report."""
        return asdict(self)

    def require(self) -> None:
        """Refuse an export that failed.

        Raises:
            ParityError: It lists all failures.
        """
        if self.failures:
            listed = "\n".join(f"  {failure}" for failure in self.failures)
            raise ParityError(f"The export does not compute what its source computes:\n{listed}")


def check_parity(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    *,
    text: Sequence[str] = (),
    device: torch.device | str = "cpu",
    track: Track = silently,
) -> Parity:
    """Compare an exported directory, as it is on disk, with its source.

    A failed gate ends the comparison: what follows could only fail too.

    Args:
        source: The pruned checkpoint.
        directory: The exported one.
        layers: The source's layers.
        text: Files to compare the logits on; none is the embedded text.
        device: Where the models run.
        track: Shows the progress of each comparison.
    """
    parity = Parity()
    parity.failures += _compare_bits(source, directory, layers, parity, track)
    if parity.failures:
        return parity
    model = load(directory)
    packed = {n: m for n, m in model.named_modules() if isinstance(m, Sparse24Linear)}
    for name, layer in track(packed.items(), len(packed), "comparing products"):
        error = operator_error(name, layer, device)
        parity.operators.append(error)
        if not error.packed <= MAX_ERROR_RATIO * error.dense:
            parity.failures.append(
                f"{name}: the operator's relative error is {error.packed:.2e}, more than "
                f"{MAX_ERROR_RATIO} times the {error.dense:.2e} of the dense product"
            )
    if not parity.failures and type(model) in set(MODEL_FOR_CAUSAL_LM_MAPPING.values()):
        windows, origin = text_windows(source, model, text)
        parity.text = compare_text(
            source.load(), model, windows, origin=origin, device=device, track=track
        )
        parity.failures += _text_failures(parity.text)
    return parity


def _compare_bits(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    parity: Parity,
    track: Track,
) -> list[str]:
    """Every tensor of the source against what the exported files hold in its place."""
    choices = {layer.tensor: layer for layer in layers if layer.reason is None}
    exported = {shard.name: shard for shard in open_checkpoint(directory).shards}
    failures = [f"{s.name}: the file is missing" for s in source.shards if s.name not in exported]
    for shard in track(source.shards, len(source.shards), "comparing bits"):
        stored = exported[shard.name].read() if shard.name in exported else {}
        for name, tensor in shard.read().items():
            failures += _compare_tensor(name, tensor, choices.get(name), stored)
            parity.tensors += 1
    return failures


def _compare_tensor(
    name: str, tensor: Tensor, layer: LayerChoice | None, stored: dict[str, Tensor]
) -> list[str]:
    if name not in stored:
        return [f"{name}: missing"]
    found = stored[name]
    if layer is not None:
        tensor = positive_zeros(layer.packed_name.matrix(tensor))[0]
        meta = stored.get(f"{name}_meta")
        if meta is None:
            found = layer.packed_name.matrix(found)
        elif count := invalid_nibbles(meta):
            return [f"{name}_meta: {count} nibbles that no 2:4 weight has"]
        else:
            found = unpack(found, meta)
    if count := different_bits(found, tensor):
        return [f"{name}: {count} of {tensor.numel()} values have other bits"]
    return []


def different_bits(first: Tensor, second: Tensor) -> int:
    """How many values differ in a bit; all, where shapes or dtypes differ."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return second.numel()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    view = integer[first.element_size()]
    a, b = first.contiguous(), second.contiguous()
    return int((a.view(view) != b.view(view)).sum()) if a.numel() else 0


def operator_error(
    name: str, layer: Sparse24Linear, device: torch.device | str = "cpu"
) -> OperatorError:
    """The packed and the dense product of random inputs against float32, or float64, products."""
    dtype = layer.weight.dtype
    higher = torch.float32 if dtype.itemsize == 2 else torch.float64
    values = layer.weight.detach().to(device)
    meta = layer.weight_meta.to(device)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_TOKENS_PER_LAYER, layer.in_features, generator=generator).to(device, dtype)
    dense = unpack(values, meta)
    exact = (x.to(higher) @ dense.to(higher).T).double()
    scale = exact.norm().clamp_min(torch.finfo(torch.float32).tiny)

    def relative(y: Tensor) -> float:
        return float((y.double() - exact).norm() / scale)

    found = torch.ops.mrp_lightning.linear24(x, values, meta, None)
    return OperatorError(name, packed=relative(found), dense=relative(F.linear(x, dense)))


def text_windows(
    source: Checkpoint, model: PreTrainedModel, files: Sequence[str]
) -> tuple[Tensor, str]:
    """Windows of tokens, and their origin; random tokens for a model without a tokenizer."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = min(_WINDOW, positions) if isinstance(positions, int) and positions > 1 else _WINDOW
    count = math.ceil(MIN_TOKENS / (length - 1))
    if source.path.is_dir() and any(source.path.glob("tokenizer*")):
        data = TextDataModule(eval_files=list(files) or None, sequence_length=length)
        data.tokenizer = AutoTokenizer.from_pretrained(source.path)
        windows = data.evaluation_windows("test")[:count]
        if len(windows) < count:
            raise DataError(
                f"`--text`: the parity gate needs {count} windows of {length} tokens, but the text "
                f"gives {len(windows)}. Give more text, or none to take the embedded text."
            )
        return windows, ", ".join(files) or "Python's standard library (test split)"
    vocabulary = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    windows = torch.randint(vocabulary, (count, length), generator=generator)
    return windows, "random tokens, as the checkpoint has no tokenizer"


def compare_text(
    before: PreTrainedModel,
    after: PreTrainedModel,
    windows: Tensor,
    *,
    origin: str,
    device: torch.device | str = "cpu",
    track: Track = silently,
) -> TextParity:
    """Logits of both models on windows (windows, length), one model on the device at a time."""
    reference = []
    _move(before, device).eval()
    for window in track(windows, len(windows), "logits of the source"):
        reference.append(_logits(before, window, device))
    _move(before, "cpu")
    _move(after, device).eval()
    agreements = []
    losses_before, losses_after, divergences, differences = [], [], [], []
    equal = True
    pairs = zip(windows, reference, strict=True)
    for window, expected in track(pairs, len(windows), "logits of the export"):
        found = _logits(after, window, device)
        equal &= torch.equal(found, expected)
        p, q = expected.float().log_softmax(-1), found.float().log_softmax(-1)
        targets = window[1:]
        agreements.append((p.argmax(-1) == q.argmax(-1)).double())
        losses_before.append(F.nll_loss(p, targets, reduction="none").double())
        losses_after.append(F.nll_loss(q, targets, reduction="none").double())
        divergences.append(F.kl_div(q, p, log_target=True, reduction="none").sum(-1).double())
        differences.append(float((found.float() - expected.float()).abs().max()))
    _move(after, "cpu")
    losses = torch.cat(losses_before)
    return TextParity(
        text=origin,
        tokens=losses.numel(),
        top1_agreement=float(torch.cat(agreements).mean()),
        perplexity_before=float(losses.mean().exp()),
        perplexity_after=float(torch.cat(losses_after).mean().exp()),
        divergence=float(torch.cat(divergences).mean()),
        max_difference=max(differences),
        bit_equal=equal,
    )


def _move(model: nn.Module, device: torch.device | str) -> nn.Module:
    return model.to(device)


def _logits(model: PreTrainedModel, window: Tensor, device: torch.device | str) -> Tensor:
    """Of all tokens but the last (length − 1, vocabulary), in the model's dtype on the CPU."""
    with torch.inference_mode():
        output: Any = model(input_ids=window[None].to(device), use_cache=False)
        return output.logits[0, :-1].cpu()


def _text_failures(text: TextParity) -> list[str]:
    failures = []
    if not text.top1_agreement >= MIN_TOP1_AGREEMENT:
        failures.append(
            f"the likeliest next token agrees at {text.top1_agreement:.2%} of {text.tokens} tokens,"
            f" less than {MIN_TOP1_AGREEMENT:.1%}"
        )
    change = text.perplexity_after - text.perplexity_before
    if not abs(change) < MAX_PERPLEXITY_CHANGE:
        failures.append(
            f"perplexity goes from {text.perplexity_before:.4f} to {text.perplexity_after:.4f}, "
            f"a change of {MAX_PERPLEXITY_CHANGE} or more"
        )
    return failures
