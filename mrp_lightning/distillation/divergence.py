"""KL(dense ‖ pruned) of the next token, without the logits of all tokens in memory.

Over a vocabulary of 152,000 the logits of 2,048 tokens take 1.2 GB in float32, and a loss needs
several tensors of that size. Here the head runs on some tokens at a time, and the gradient with
respect to its inputs is computed in the same pass: nothing of the size of the vocabulary outlives
its chunk.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from mrp_lightning.errors import TargetError

_LOGITS = 2**23
"""Logits of a chunk."""
LOGITS_MEMORY = 10 * 4 * _LOGITS
"""Bytes of a chunk: its loss and the gradient hold about ten float32 tensors."""
_PROBE_TOKENS = 8


class Predictor:
    """A causal language model as its hidden states and a map from them to logits.

    `hidden` runs the model's own forward with its output head left out, and `logits` applies the
    head, together with the scale or the soft cap that some families have behind it. A family whose
    logits come about in another way is run as a whole: its hidden states are the logits, `logits`
    is the identity, and the memory for them is needed. The first batch decides.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._head: nn.Module | None = model.get_output_embeddings()
        self._is_tested = False

    def parameters(self) -> list[nn.Parameter]:
        """Return the head's trained parameters."""
        head = [] if self._head is None else self._head.parameters()
        return [parameter for parameter in head if parameter.requires_grad]

    def hidden(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Return the inputs of the head (batch, length, features), or the logits."""
        if not self._is_tested:
            self._test(ids, mask)
        return self._run(ids, mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (…, vocabulary) of hidden states (…, features), in float32."""
        if self._head is None:
            return hidden.float()
        return self._finish(self._head(hidden).float())

    def _run(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        if self._head is None:
            return self._own_logits(ids, mask)
        inputs: list[Tensor] = []

        def leave_out(_: nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor]:
            inputs.append(arguments[0])
            return (arguments[0][..., :0, :],)  # the head of no token

        with self._head.register_forward_pre_hook(leave_out):
            self._own_logits(ids, mask)
        (hidden,) = inputs
        return hidden

    def _own_logits(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        output = self.model(input_ids=ids, attention_mask=mask, use_cache=False)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor):
            raise TargetError(
                f"a {type(self.model).__name__} gives no logits, so that there is no prediction to "
                "compare. Load the class with a language-modelling head."
            )
        return logits

    def _finish(self, logits: Tensor) -> Tensor:
        """Apply what the configuration puts behind the head: a scale, a quotient, a soft cap."""
        config = self.model.config.get_text_config()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if scaling := getattr(config, "logits_scaling", None):
            logits = logits / scaling
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = cap * torch.tanh(logits / cap)
        return logits

    @torch.no_grad()
    def _test(self, ids: Tensor, mask: Tensor | None) -> None:
        """Run the model as a whole from now on if `logits` differs from the model's own logits."""
        # Without padding, at which a family may give NaN.
        window = ids[0] if mask is None else ids[mask != 0]
        if not len(window):
            return  # all is padding: the next batch decides
        self._is_tested = True
        few = window[None, :_PROBE_TOKENS], None
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()  # dropout would differ between the two runs
        try:
            own, agrees = self._own_logits(*few).float(), False
            with suppress(RuntimeError, ValueError, IndexError):  # a head of another form
                mapped = self.logits(self._run(*few))
                # Both round in the model's dtype, in products of other shapes.
                rounding = 16 * torch.finfo(self.model.dtype).eps * float(own.abs().max())
                near = (own - mapped).abs() <= rounding
                agrees = own.shape == mapped.shape and bool(near.all())
            self._head = self._head if agrees else None
        finally:
            for module, is_training in modes.items():  # a user may keep some in `eval`
                module.training = is_training


@dataclass(frozen=True)
class Divergence:
    """Sums over the tokens of a batch.

    Attributes:
        kl: Σ KL(p_teacher(·|x) ‖ p_student(·|x)) in nats, float32; its gradient reaches the
            student's hidden states and, where they are trained, the weights of its head.
        tokens: The number of tokens of the sum: all but padding.
    """

    kl: Tensor
    tokens: int


def divergence(
    student: Predictor, teacher: Predictor, ids: Tensor, mask: Tensor | None
) -> Divergence:
    """Sum KL(teacher ‖ student) over all tokens of a batch that are no padding.

    The models have one vocabulary. `ids` and `mask`, 0 for padding, are (batch, length).
    """
    with torch.no_grad():
        wanted = teacher.hidden(ids, mask)
    got = student.hidden(ids, mask)
    rows = slice(None) if mask is None else mask.flatten() != 0
    got, wanted = got.flatten(0, 1)[rows], wanted.flatten(0, 1)[rows]
    kl = _ChunkedKL.apply(got, wanted, student, teacher, *student.parameters())
    return Divergence(kl, len(got))


class _ChunkedKL(torch.autograd.Function):
    """Σ KL(p ‖ q) over tokens, with p from `wanted` by `teacher` and q from `got` by `student`."""

    @staticmethod
    def forward(
        ctx: Any,
        got: Tensor,
        wanted: Tensor,
        student: Predictor,
        teacher: Predictor,
        *parameters: nn.Parameter,
    ) -> Tensor:
        needs = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[4:])
        total = torch.zeros((), dtype=torch.float32, device=got.device)
        of_got = torch.empty_like(got) if needs else None
        of_parameters = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
        for rows in chunks(got, student):
            target = teacher.logits(wanted[rows]).log_softmax(-1)
            with torch.set_grad_enabled(needs):
                part = got[rows].detach().requires_grad_(needs)
                log_q = student.logits(part).log_softmax(-1)
                loss = F.kl_div(log_q, target, reduction="sum", log_target=True)
            total += loss.detach()
            if of_got is not None:
                of_part, *others = torch.autograd.grad(loss, [part, *parameters])
                of_got[rows] = of_part
                for gradient, other in zip(of_parameters, others, strict=True):
                    gradient += other
        if of_got is not None:
            ctx.save_for_backward(of_got, *of_parameters)
            ctx.dtypes = [parameter.dtype for parameter in parameters]
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (scale,) = outer
        of_got, *of_parameters = ctx.saved_tensors
        scaled = (
            (gradient * scale).to(dtype)
            for gradient, dtype in zip(of_parameters, ctx.dtypes, strict=True)
        )
        return of_got * scale, None, None, None, *scaled


def chunks(hidden: Tensor, predictor: Predictor) -> Iterator[slice]:
    """Yield ranges of the rows of hidden states (tokens, features), of about 2²³ logits each."""
    vocabulary = predictor.model.config.get_text_config().vocab_size
    rows = max(1, _LOGITS // vocabulary)
    for start in range(0, len(hidden), rows):
        yield slice(start, start + rows)


@dataclass(frozen=True)
class TokenFigures:
    """Figures of each token of a batch, without gradients.

    Attributes:
        kl: KL(p_teacher ‖ p_student) in nats, float32 (batch, length); 0 at padding.
        student: −log p_student of the token that follows, float32 (batch, length − 1).
        teacher: −log p_teacher of it.
    """

    kl: Tensor
    student: Tensor
    teacher: Tensor


@torch.no_grad()
def token_figures(
    student: Predictor, teacher: Predictor, ids: Tensor, mask: Tensor | None
) -> TokenFigures:
    """Compute the divergence at each token of a batch, and both models' losses of the next one.

    The models have one vocabulary. `ids` and `mask`, 0 for padding, are (batch, length).
    """
    inputs = student.hidden(ids, mask).flatten(0, 1), teacher.hidden(ids, mask).flatten(0, 1)
    targets = ids.roll(-1, 1).long().flatten()[:, None]
    columns: list[tuple[Tensor, ...]] = []
    for rows in chunks(inputs[0], student):
        q, p = (
            model.logits(hidden[rows]).log_softmax(-1)
            for model, hidden in zip((student, teacher), inputs, strict=True)
        )
        kl = F.kl_div(q, p, reduction="none", log_target=True).sum(-1)
        columns.append((kl, *(-x.gather(1, targets[rows])[:, 0] for x in (q, p))))
    kl, of_student, of_teacher = (
        torch.cat(parts).view(ids.shape) for parts in zip(*columns, strict=True)
    )
    if mask is not None:
        kl = kl.masked_fill(mask == 0, 0)
    return TokenFigures(kl, of_student[:, :-1], of_teacher[:, :-1])
