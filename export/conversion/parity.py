"""Prove that an exported checkpoint computes what its source computes."""

import copy
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.sparse import SparseSemiStructuredTensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoTokenizer, PreTrainedModel

from export.backends import restore_torchao
from export.conversion.checkpoint import Checkpoint, Track, open_checkpoint, silently
from export.conversion.selection import LayerChoice
from export.conversion.writing import HeadChoice
from export.loading import load
from mrp_lightning.errors import DataError, ParityError, first_line
from mrp_lightning.models.checkpoint import longest_sequence
from mrp_lightning.text.sources import StandardLibrary, TextFiles
from mrp_lightning.text.windows import Cutter
from mrp_sparse.eight_bit_head import round_head
from mrp_sparse.formats.packed_format import different_bits
from mrp_sparse.formats.sparse24 import positive_zeros
from mrp_sparse.huggingface import CONFIGS
from mrp_sparse.kernels.operator import MAX_ERROR_RATIO
from mrp_sparse.packed_linear import PackedLinear

MIN_TOP1_AGREEMENT = 0.995
MAX_PERPLEXITY_CHANGE = 0.001
"""As a part of the perplexity: rounding moves a perplexity of 2000 by more than one of 7."""
MIN_TOKENS = 4096
_WINDOW = 512
_TOKENIZERS = ("tokenizer*", "vocab.*", "*.model")


@dataclass(frozen=True)
class TextParity:
    """The pruned model and the exported one on the same tokens, and the origin of these.

    `tokens` were predicted, and the likeliest one was the same at a fraction `top1_agreement` of
    them. `divergence` is the mean Kullback-Leibler divergence in nats, `max_difference` the largest
    absolute difference of a logit.
    """

    text: str
    tokens: int
    top1_agreement: float
    perplexity_before: float
    perplexity_after: float
    divergence: float
    max_difference: float
    bit_equal: bool


def text_windows(
    source: Checkpoint, model: PreTrainedModel, files: Sequence[str]
) -> tuple[Tensor, str]:
    """Windows of tokens, and their origin; random tokens for a model without a tokenizer."""
    length = min(_WINDOW, longest_sequence(model.config) or _WINDOW)
    count = math.ceil(MIN_TOKENS / (length - 1))
    if not any(file for name in _TOKENIZERS for file in source.path.glob(name)):
        if files:
            raise DataError(f"`--text` needs a tokenizer, and {source.path} has none.")
        vocabulary = model.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(0)
        windows = torch.randint(vocabulary, (count, length), generator=generator)
        return windows, "random tokens, as the checkpoint has no tokenizer"
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path)
    except (ImportError, OSError, ValueError) as error:
        raise DataError(
            f"The tokenizer in {source.path} cannot be loaded: {first_line(error)}"
        ) from error
    paths = [Path(file).expanduser() for file in files]
    text = TextFiles(evaluation=paths) if paths else StandardLibrary()
    windows = text.windows(Cutter(tokenizer, length, text.bos), "test", "test").ids[:count]
    if len(windows) < count:
        raise DataError(
            f"`--text`: the parity gate needs {count} windows of {length} tokens, but the text "
            f"gives {len(windows)}. Give more text, or none to take the embedded text."
        )
    return windows, ", ".join(files) or "Python's standard library (test split)"


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
    of_tokens, differences, equal = [], [], True
    pairs = zip(windows, reference, strict=True)
    for window, expected in track(pairs, len(windows), "logits of the export"):
        logits = _logits(after, window, device)
        equal &= not different_bits(logits, expected)
        differences.append(float((logits.float() - expected.float()).abs().max()))
        p, q = expected.float().log_softmax(-1), logits.float().log_softmax(-1)
        agree = (p.argmax(-1) == q.argmax(-1)).double()
        losses = [F.nll_loss(logs, window[1:], reduction="none").double() for logs in (p, q)]
        divergence = F.kl_div(q, p, log_target=True, reduction="none").sum(-1).double()
        of_tokens.append(torch.stack([agree, *losses, divergence]))
    means = torch.cat(of_tokens, dim=1).mean(dim=1)
    return TextParity(
        text=origin,
        tokens=sum(rows.shape[1] for rows in of_tokens),
        top1_agreement=float(means[0]),
        perplexity_before=float(means[1].exp()),
        perplexity_after=float(means[2].exp()),
        divergence=float(means[3]),
        max_difference=max(differences),
        bit_equal=equal,
    )


def _move(model: nn.Module, device: torch.device | str) -> nn.Module:
    return model.to(device)  # PreTrainedModel.to has another signature, which says less


def _logits(model: PreTrainedModel, window: Tensor, device: torch.device | str) -> Tensor:
    """Logits after all tokens but the last (length − 1, vocabulary), on the CPU."""
    with torch.inference_mode():
        output: Any = model(input_ids=window[None].to(device), use_cache=False)
        return output.logits[0, :-1].cpu()


def text_failures(text: TextParity) -> list[str]:
    """The reasons why the export does not pass; none, where all logits have the same bits.

    Logits that hold NaN are no model's, however equal.
    """
    if not math.isfinite(text.perplexity_before):
        return [
            f"the logits of the source hold NaN or Inf: its perplexity on {text.text} is "
            f"{text.perplexity_before}; prune and pack a model whose weights are finite"
        ]
    if text.bit_equal:
        return []
    failures = []
    if not text.top1_agreement >= MIN_TOP1_AGREEMENT:
        failures.append(
            f"the likeliest next token agrees at {text.top1_agreement:.2%} of {text.tokens} tokens,"
            f" less than {MIN_TOP1_AGREEMENT:.1%}"
        )
    change = text.perplexity_after / text.perplexity_before - 1
    if not abs(change) < MAX_PERPLEXITY_CHANGE:
        failures.append(
            f"perplexity goes from {text.perplexity_before:.4f} to {text.perplexity_after:.4f}, "
            f"a change of {MAX_PERPLEXITY_CHANGE:.1%} or more"
        )
    return failures


_TOKENS = (1, 16)
"""Numbers of tokens at which each layer is compared: other kernels run one token than several."""
_MANY_TOKENS = 256
"""A further number on CUDA devices, where another kernel runs that many."""


@dataclass(frozen=True)
class OperatorError:
    """Frobenius errors of a layer's output, relative to a product in higher precision.

    They are those of the operator and of the dense product in the model's dtype. On a CPU the two
    products have the same bits.
    """

    name: str
    packed: float
    dense: float
    bit_equal: bool = False

    @property
    def passes(self) -> bool:
        """Whether the operator is exact enough. Equal bits are, be they those of a NaN."""
        return self.bit_equal or self.packed <= MAX_ERROR_RATIO * self.dense


@dataclass
class Parity:
    """The results of all comparisons.

    Attributes:
        tensors: Number of tensors that were compared bit by bit.
        operators: Errors of the packed layers, one by one.
        text: Comparison of the logits; `None` where the model predicts no next token. Where the
            head has 8 bits, it is compared with the source whose head has them.
        head: What such a head does to the logits of the source, else `None`.
        failures: All that is not equal; empty where the gates are passed.
    """

    tensors: int = 0
    operators: list[OperatorError] = field(default_factory=list)
    text: TextParity | None = None
    head: TextParity | None = None
    failures: list[str] = field(default_factory=list)

    def require(self) -> None:
        """Refuse an export that failed by a `ParityError` that lists all failures."""
        if self.failures:
            listed = "\n".join(f"  {failure}" for failure in self.failures)
            raise ParityError(f"The export does not compute what its source computes:\n{listed}")


def check_parity(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    *,
    head: HeadChoice | None = None,
    text: Sequence[str] = (),
    device: torch.device | str = "cpu",
    track: Track = silently,
) -> Parity:
    """Compare an exported directory, as it is on disk, with its source.

    A failed gate ends the comparison: what follows could only fail too. The logits are compared on
    the files of `text`, or else on the embedded text. A `head` of 8 bits has to be what rounding
    the source's gives; what that costs is no failure, but is found, too.
    """
    parity = Parity()
    _compare_bits(source, directory, layers, head, parity, track)
    if parity.failures:
        return parity
    model = load(directory) if source.config else None
    if model is not None:
        packed = {n: m for n, m in model.named_modules() if isinstance(m, PackedLinear)}
    else:
        packed = _packed_in_file(directory, layers)
    parity.operators += [
        operator_error(name, layer, device)
        for name, layer in track(packed.items(), len(packed), "comparing products")
    ]
    if model is not None:
        parity.operators += _torchao_errors(source, model, layers, track)
    parity.failures += [
        f"{error.name}: the operator's relative error is {error.packed:.2e}, more than "
        f"{MAX_ERROR_RATIO} times the {error.dense:.2e} of the dense product"
        for error in parity.operators
        if not error.passes
    ]
    if not parity.failures and model is not None and _predicts_tokens(model):
        windows, origin = text_windows(source, model, text)
        compare = functools.partial(
            compare_text, windows=windows, origin=origin, device=device, track=track
        )
        before = source.load()
        if head is not None:
            round_head(before)
        parity.text = compare(before, model)
        if head is not None:
            parity.head = compare(source.load(), before)
        parity.failures += text_failures(parity.text)
    return parity


def _compare_bits(
    source: Checkpoint,
    directory: Path,
    layers: Sequence[LayerChoice],
    head: HeadChoice | None,
    parity: Parity,
    track: Track,
) -> None:
    """Every tensor of the source against that of the exported files in its place."""
    choices = {layer.tensor: layer for layer in layers if layer.reason is None}
    exported = {file.name: file for file in open_checkpoint(directory).files}
    for file in track(source.files, len(source.files), "comparing bits"):
        stored = {}
        if file.name in exported:
            stored = exported[file.name].read()
        else:
            parity.failures.append(f"{file.name}: the file is missing")
        for name, tensor in file.read().items():
            if head is not None and name in head.tensors:
                parity.failures += _compare_head(head.convert(name, tensor), stored)
            else:
                parity.failures += _compare_tensor(name, tensor, choices.get(name), stored)
            parity.tensors += 1


def _compare_tensor(
    name: str, tensor: Tensor, layer: LayerChoice | None, stored: dict[str, Tensor]
) -> list[str]:
    if name not in stored:
        return [f"{name}: missing"]
    exported = restore_torchao(stored[name])
    if layer is not None:
        tensor = positive_zeros(layer.matrix(tensor))[0]
        form, columns = layer.form, tensor.shape[1]
        names = form.companion_names(name)
        companions = [stored[key] for key in names if key in stored]
        if not companions:
            exported = layer.matrix(exported)
        elif len(companions) < len(names):
            return [f"{key}: missing" for key in names if key not in stored]
        elif damage := form.damage(exported, *companions, columns):
            return [f"{names[0]}: {damage}"]
        else:
            exported = form.unpack(exported, *companions, columns)
    if count := different_bits(exported, tensor):
        return [f"{name}: {count} of {tensor.numel()} values have other bits"]
    return []


def _compare_head(expected: dict[str, Tensor], stored: dict[str, Tensor]) -> list[str]:
    failures = []
    for name, tensor in expected.items():
        if name not in stored:
            failures.append(f"{name}: missing")
        elif count := different_bits(stored[name], tensor):
            failures.append(f"{name}: {count} of {tensor.numel()} values have other bits")
    return failures


def _packed_in_file(directory: Path, layers: Sequence[LayerChoice]) -> dict[str, PackedLinear]:
    """The packed layers of a module that only its owner can build."""
    tensors = dict(open_checkpoint(directory).tensors())
    packed = {}
    for layer in layers:
        names = [layer.tensor, *layer.form.companion_names(layer.tensor)]
        if all(name in tensors for name in names):
            kind = CONFIGS[layer.form.quant_method].layer
            stored = [tensors[name] for name in names]
            packed[layer.name] = kind.from_packed(stored, layer.shape[1])
    return packed


def operator_error(
    name: str, layer: PackedLinear, device: torch.device | str = "cpu"
) -> OperatorError:
    """The packed and the dense product of random inputs against float32, or float64, products.

    Several numbers of tokens are tried, and the one at which the operator is worst counts.
    """
    moved = copy.deepcopy(layer).to(device)
    moved.bias = None
    return _product_error(name, moved, moved.dense_weight())


def _torchao_errors(
    source: Checkpoint, model: nn.Module, layers: Sequence[LayerChoice], track: Track
) -> list[OperatorError]:
    """The products of torchao's tensors, on the device where they are, against the source's."""
    weights = {
        name: module.weight
        for name, module in model.named_modules()
        if isinstance(getattr(module, "weight", None), SparseSemiStructuredTensor)
    }
    names = {layer.tensor: layer.name for layer in layers if layer.name in weights}
    if not names:
        return []
    errors = []
    for tensor_name, dense in track(source.tensors(), source.num_tensors, "comparing products"):
        if (name := names.get(tensor_name)) is not None:
            weight = weights[name]
            multiply = functools.partial(F.linear, weight=weight)
            errors.append(_product_error(name, multiply, dense.to(weight.device)))
    return errors


def _product_error(name: str, multiply: Callable[[Tensor], Tensor], dense: Tensor) -> OperatorError:
    """The error of a product with a weight, at the number of tokens at which it is worst."""
    counts = (*_TOKENS, _MANY_TOKENS) if dense.is_cuda else _TOKENS
    errors = [_error_at(name, multiply, dense, tokens) for tokens in counts]
    return max(errors, key=lambda error: (not error.passes, error.packed / max(error.dense, 1e-30)))


@torch.no_grad()
def _error_at(
    name: str, multiply: Callable[[Tensor], Tensor], dense: Tensor, tokens: int
) -> OperatorError:
    higher = torch.float32 if dense.dtype.itemsize == 2 else torch.float64
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, dense.shape[1], generator=generator).to(dense.device, dense.dtype)
    exact = (x.to(higher) @ dense.to(higher).T).double()
    scale = exact.norm().clamp_min(torch.finfo(torch.float32).tiny)

    def relative(y: Tensor) -> float:
        return float((y.double() - exact).norm() / scale)

    product, expected = multiply(x), F.linear(x, dense)
    return OperatorError(
        name, relative(product), relative(expected), not different_bits(product, expected)
    )


def _predicts_tokens(model: PreTrainedModel) -> bool:
    """Whether transformers lists the class of a model among those that predict the next token."""
    kinds = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model.config), ())
    return type(model) in (kinds if isinstance(kinds, tuple) else (kinds,))
