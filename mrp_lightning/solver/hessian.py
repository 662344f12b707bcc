"""The Hessian of a layer's output error, summed up over calibration batches."""

from contextlib import nullcontext

import torch
from torch import Tensor

from mrp_lightning.errors import HessianError, OptionError
from mrp_lightning.processes import Processes
from mrp_lightning.solver.options import is_count
from mrp_lightning.solver.precision import bfloat16_factors, full_float32
from mrp_lightning.solver.ranges import split_range
from mrp_sparse.arguments import checked

_PANEL = 512
"""Columns whose products are summed up together, with themselves and those before them."""


class TokenSum:
    """A matrix (columns, columns), float32, that is summed up over the tokens of a layer's inputs.

    It is on the device of the first batch.
    """

    def __init__(self, columns: int, name: str | None) -> None:
        self.columns, self.name = columns, name
        self.num_tokens = 0
        self._sum: Tensor | None = None

    def _sum_on(self, device: torch.device) -> Tensor:
        if self._sum is None:
            size = (self.columns, self.columns)
            self._sum = torch.zeros(size, dtype=torch.float32, device=device)
        return self._sum

    def sum_over(self, processes: Processes, num_tokens: int) -> None:
        """Add what other processes have seen of the same input; all call it.

        Args:
            processes: The processes, each with a sum of the same number of columns.
            num_tokens: The number of tokens that all of them have seen.
        """
        processes.sum_(self._sum_on(processes.device))
        self.num_tokens = num_tokens


class HessianAccumulator(TokenSum):
    """Sum up H = 2·XᵀX / tokens over batches of a layer's inputs.

    H is the Hessian of the mean over tokens of ‖(w + δ)x − wx‖² with respect to a row of δ. It
    lives in float32 on the device of the first batch.

    Args:
        columns: Number of input features of the layer.
        name: The layer's name, for messages.

    Attributes:
        num_tokens: Number of tokens seen so far.

    Raises:
        OptionError: `columns` is not a positive integer.
    """

    @checked
    def __init__(self, columns: int, name: str | None = None) -> None:
        if not is_count(columns):
            raise OptionError(f"`columns` must be a positive integer; got {columns!r}.")
        super().__init__(columns, name)  # the sum is without the panels above the diagonal

    @checked
    def update(self, x: Tensor) -> None:
        """Add a batch of inputs.

        Args:
            x: The inputs, (..., columns), floating point; every vector along the last axis is one
                token.

        Raises:
            HessianError: The shape or dtype is wrong, there are no values, or some are NaN, Inf or
                so large that their squares overflow float32. The accumulator is unchanged then.
        """
        if x.ndim == 0 or x.shape[-1] != self.columns or not x.is_floating_point():
            raise HessianError(
                f"{self._label}: expected floating-point inputs of shape (..., {self.columns}); "
                f"got {tuple(x.shape)} of {x.dtype}."
            )
        if x.is_meta:
            raise HessianError(
                f"{self._label}: the inputs are on the meta device, without values. Load the "
                "weights of the model, with `from_pretrained` as a rule, before it is run."
            )
        # The sum must stay a plain tensor whatever mode the model runs in.
        with torch.inference_mode(False), torch.no_grad(), full_float32(x.device):
            tokens = x.detach().reshape(-1, self.columns)
            narrow = tokens.is_cuda and tokens.dtype in (torch.bfloat16, torch.float16)
            if not narrow:
                tokens = tokens.float()
            self._check_finite(tokens)
            total = self._sum_on(x.device)
            # Products of 16-bit numbers are exact in float32, in which they are summed.
            with bfloat16_factors() if x.dtype == torch.bfloat16 else nullcontext():
                for start, stop in split_range(0, self.columns, _PANEL):
                    left, right = tokens[:, start:stop].T, tokens[:, :stop]
                    part = total[start:stop, :stop]
                    if narrow:
                        part.add_(torch.mm(left, right, out_dtype=torch.float32), alpha=2)
                    else:
                        part.addmm_(left, right, alpha=2)
            self.num_tokens += tokens.shape[0]

    @checked
    def merge(self, other: "HessianAccumulator") -> None:
        """Add what another accumulator has seen, such as that of another process.

        Raises:
            HessianError: It belongs to a layer with another number of input features.
        """
        if other.columns != self.columns:
            raise HessianError(
                f"{self._label}: cannot merge an accumulator of {other.columns} columns into one "
                f"of {self.columns}."
            )
        with torch.inference_mode(False), torch.no_grad():
            if other._sum is not None:
                if self._sum is None:
                    self._sum = other._sum.clone()
                else:
                    self._sum.add_(other._sum.to(self._sum.device))
            self.num_tokens += other.num_tokens

    def hessian(self) -> Tensor:
        """Return 2·XᵀX / tokens, undamped: float32 (columns, columns), a new tensor.

        Raises:
            HessianError: No tokens were seen.
        """
        if self._sum is None or self.num_tokens == 0:
            raise HessianError(
                f"{self._label}: no calibration tokens were seen. Either the data loader is empty "
                "(or all padding), or the layer does not take part in the forward pass."
            )
        with torch.inference_mode(False), torch.no_grad():
            hessian = self._sum / self.num_tokens
            for start, stop in split_range(0, self.columns, _PANEL):
                hessian[start:stop, stop:] = hessian[stop:, start:stop].T
            return hessian

    @property
    def _label(self) -> str:
        return f"layer `{self.name}`" if self.name else "layer"

    def _check_finite(self, tokens: Tensor) -> None:
        # Sums of squares show every NaN and Inf at the cost of reading the batch once.
        if bool(torch.linalg.vector_norm(tokens, dtype=torch.float32).square().isfinite()):
            return
        energy = torch.linalg.vector_norm(tokens, dim=0, dtype=torch.float32).square()
        bad = int((~energy.isfinite()).sum())
        if bad:
            raise HessianError(
                f"{self._label}: {bad} of {self.columns} input features have NaN or Inf (or values "
                "too large to square) in the calibration activations. Likely causes: float16 "
                "overflow in the model (try bfloat16 or float32), a broken checkpoint, or blocks "
                "that were pruned badly before this one."
            )
