"""The Hessian of a layer's output error: summed over calibration batches, checked and damped."""

import math
import warnings
from contextlib import nullcontext
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from mrp_ground.arguments import checked, is_count
from mrp_lightning.devices import return_freed_memory
from mrp_lightning.errors import HessianError, NumericalWarning, OptionError
from mrp_lightning.processes import Processes
from mrp_lightning.solver.arithmetic import (
    bfloat16_factors,
    full_float32,
    split_range,
    warn_of_slow_float64,
)
from mrp_lightning.solver.conjugate_gradients import LowRankModel

_PANEL = 512
"""Columns of a panel, whose products with themselves and all columns before are summed at once."""


class TokenSum:
    """A float32 sum (columns, columns) over the tokens of a layer's inputs.

    The sum is on the device of the first batch, on which all further batches must be.
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
        """Sum over all processes, a collective call, and set the total number of tokens."""
        # A process without tokens adds zeros: the call is collective, so that none may skip it.
        processes.sum_(self._sum_on(processes.device))
        self.num_tokens = num_tokens


class HessianAccumulator(TokenSum):
    """Sum up H = 2·XᵀX / tokens over batches of a layer's inputs.

    H is the Hessian of the mean over tokens of ‖(w + δ)x − wx‖² with respect to a row of δ.

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
        # H is symmetric: only the panels up to the diagonal are summed, half of the work.
        super().__init__(columns, name)

    @checked
    def update(self, x: Tensor) -> None:
        """Add a batch of inputs.

        Args:
            x: The inputs, (..., columns), floating point; every vector along the last axis is one
                token.

        Raises:
            HessianError: The shape or dtype is wrong, the tensor is sparse or on the meta device,
                or values are NaN, Inf or so large that their squares overflow float32. The
                accumulator is unchanged then.
        """
        if x.ndim == 0 or x.shape[-1] != self.columns or not x.is_floating_point():
            raise HessianError(
                f"{self._label}: expected floating-point inputs of shape (..., {self.columns}); "
                f"got {tuple(x.shape)} of {x.dtype}."
            )
        if x.layout != torch.strided:
            raise HessianError(
                f"{self._label}: the inputs are {x.layout}. Make them dense, by `to_dense()`."
            )
        if x.is_meta:
            raise HessianError(
                f"{self._label}: the inputs are on the meta device, without values. Load the "
                "weights of the model, with `from_pretrained` as a rule, before it is run."
            )
        # The sum must stay a plain tensor whatever mode the model runs in.
        with torch.inference_mode(False), torch.no_grad(), full_float32(x.device):
            tokens = x.detach().reshape(-1, self.columns)
            # A GPU sums 16-bit factors up in float32, without a copy of twice the batch's size.
            narrow = tokens.is_cuda and tokens.dtype in (torch.bfloat16, torch.float16)
            if not narrow:
                tokens = tokens.float()
            # Before the sum, so that a batch that is refused leaves the accumulator unchanged.
            self._check_finite(tokens)
            total = self._sum_on(x.device)
            # Products of 16-bit numbers are exact in float32, so 16-bit units lose nothing.
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
        """Add the sum of another accumulator, such as that of another process.

        Raises:
            HessianError: The other accumulator has another number of columns.
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
            # Diagonal blocks are summed in full; all to the right of them follows by symmetry.
            for start, stop in split_range(0, self.columns, _PANEL):
                hessian[start:stop, stop:] = hessian[stop:, start:stop].T
            return hessian

    @property
    def _label(self) -> str:
        return f"layer `{self.name}`" if self.name else "layer"

    def _check_finite(self, tokens: Tensor) -> None:
        # A sum of squares is finite only if all values are, and takes one pass over the batch.
        if bool(torch.linalg.vector_norm(tokens, dtype=torch.float32).square().isfinite()):
            return
        # The sum over all features may overflow where no feature's does; only the latter enter H.
        energy = torch.linalg.vector_norm(tokens, dim=0, dtype=torch.float32).square()
        num_bad = int((~energy.isfinite()).sum())
        if num_bad:
            raise HessianError(
                f"{self._label}: {num_bad} of {self.columns} input features have NaN or Inf "
                "(or values too large to square) in the calibration activations. Likely causes: "
                "float16 overflow in the model (try bfloat16 or float32), a broken checkpoint, or "
                "blocks that were pruned badly before this one."
            )


_FACTORISED = 256
"""Columns that are factorised at a time on a CPU."""
_STRIP = 1024
"""Rows or columns of one product, which begins at the diagonal: what is zero beyond is left out."""
_MIRRORED = 512
"""Rows of a symmetric matrix that are computed at a time, from the diagonal on."""


def factor_of_inverse(matrix: Tensor) -> Tensor | None:
    """Return the upper triangular U with UᵀU = A⁻¹, or `None` if A is not positive definite.

    A = RRᵀ with R upper triangular, and U = R⁻¹. Of A, (n, n), only the upper triangle is read. On
    a CPU, for n > 768, U takes its memory.
    """
    columns = len(matrix)
    if matrix.device.type != "cpu" or columns <= 3 * _FACTORISED:
        # R is the lower Cholesky factor of A turned around, turned back.
        lower, info = torch.linalg.cholesky_ex(matrix.flip(0, 1))
        if int(info) != 0:
            return None
        identity = torch.eye(columns, dtype=matrix.dtype, device=matrix.device)
        return torch.linalg.solve_triangular(lower.flip(0, 1), identity, upper=True)
    # From the last panel to the first. The part above and left of the panel holds the remaining
    # Schur complement of A, the columns above later panels hold R, and all to the right of and
    # below the panel is a part of U. A Schur complement of A is positive definite if A is, so that
    # a corner that fails refuses A.
    for start, stop in reversed(list(split_range(0, columns, _FACTORISED))):
        panel = slice(start, stop)
        corner = factor_of_inverse(matrix[panel, panel])  # U_pp = R_pp⁻¹
        if corner is None:
            return None
        # R_<p = A_<p R_pp⁻ᵀ, and A_<< − R_<p R_<pᵀ is what remains.
        above = matrix[:start, panel] @ corner.T
        matrix[:start, panel] = above
        for first, last in split_range(0, start, _STRIP):
            rest = matrix[first:last, first:start]
            rest.addmm_(above[first:last], above[first:].T, alpha=-1)
        # U_p> = −U_pp R_p> U_>>, with U_>> upper triangular.
        right = corner @ matrix[panel, stop:]
        for first, last in split_range(stop, columns, _STRIP):
            product = right[:, : last - stop] @ matrix[stop:last, first:last]
            matrix[panel, first:last] = product.neg_()
        matrix[panel, panel], matrix[panel, :start] = corner, 0
    return matrix


def inverse_from(factor: Tensor) -> Tensor:
    """Return UᵀU for an upper triangular U (n, n), in the memory of U."""
    # [UᵀU]_ij sums over k ≤ min(i, j): row panels from the diagonal on take a sixth of the
    # multiplications of the whole product. No panel reads rows of U below its own, and so the last
    # one is the first to be replaced.
    for start, stop in reversed(list(split_range(0, len(factor), _MIRRORED))):
        panel = factor[:stop, start:stop].T @ factor[:stop, start:]
        factor[start:stop, start:] = panel
        factor[start:, start:stop] = panel.T
    return factor


def make_symmetric(matrix: Tensor) -> None:
    """Set A (n, n) to (A + Aᵀ) / 2, in place."""
    for start, stop in split_range(0, len(matrix), _MIRRORED):
        mean = (matrix[start:stop, start:] + matrix[start:, start:stop].T).mul_(0.5)
        matrix[start:stop, start:] = mean
        matrix[start:, start:stop] = mean.T


# The first two bound the inflation of `_factorise`: 1e4 turns ε = 2⁻²³ into about 1e-3.
_FLOAT32_SUFFICES = 1e4
_BFLOAT16_HELPS = 1024
_DELICATE, _FEW = 64, 64
"""The least inflation of a delicate column, and the columns of which one may be delicate."""
_MANY_COLUMNS = 512


class _NotPositiveDefiniteError(HessianError):
    """H + λI is not positive definite to its own precision."""


class DampedHessian:
    """H + λI, positive definite, with the triangular factor of its inverse.

    λ is `ratio` times the mean diagonal of H over the inputs that are not dead. H must not change:
    `matrix_in` reads it again. Dead inputs, whose diagonal is zero, are decoupled from all others,
    so their weights never move. Below, H and H⁻¹ with an index are those of the sum.

    Attributes:
        damping_used: λ.
        factor: Upper triangular U with UᵀU = (H + λI)⁻¹, (columns, columns).
        inflation: The factor H_jj [H⁻¹]_jj by which each column inflates rounding errors,
            (columns,), at least 1. It is 1 / (1 − R²_j), R²_j being the share of input j that the
            others explain. It does not change with the scale of inputs, unlike the condition
            number, which one large channel makes huge and harmless.
        float32_suffices: Whether iterations in float32 can be trusted to the last digits.
        delicate: The indices of the few columns whose products bfloat16 spoils most, ascending, at
            most columns / 64: massive activations make them nearly multiples of one another.
        bfloat16_helps: Whether iterations with products rounded to bfloat16 in all other columns
            still converge, and columns are so many that products dominate the time.
    """

    def __init__(
        self, hessian: Tensor, dead: Tensor, mean_diagonal: float, ratio: float, dtype: torch.dtype
    ) -> None:
        self._hessian, self._dead, self._mean_diagonal = hessian, dead, mean_diagonal
        self.dtype = dtype
        self.columns = hessian.shape[0]
        self.ratio = ratio
        self.damping_used = ratio * mean_diagonal
        # At once, since its failure is the signal by which `InputHessian` raises λ.
        self.factor, self.inflation = self._factorise()
        # One transfer from the device: the columns of largest inflation, and that of the rest.
        few = self.columns // _FEW
        worst = self.inflation.topk(few + 1)
        inflations = worst.values.tolist()
        number = sum(value > _DELICATE for value in inflations[:few])
        self.float32_suffices = inflations[0] <= _FLOAT32_SUFFICES
        self.delicate = worst.indices[:number].sort().values
        helps = inflations[number] <= _BFLOAT16_HELPS
        self.bfloat16_helps = helps and self.columns >= _MANY_COLUMNS

    @cached_property
    def matrix(self) -> Tensor:
        """H + λI, exactly symmetric, (columns, columns)."""
        return self.matrix_in(self.dtype)

    @cached_property
    def inverse(self) -> Tensor:
        """(H + λI)⁻¹, (columns, columns)."""
        return inverse_from(self.factor.clone())

    @cached_property
    def residual_rounding(self) -> float:
        """The expected error of r H⁻¹ rᵀ by the rounding of r = vH, relative to ‖v‖².

        v is a row of changes (columns,). Each r_j has an independent error of about ε·‖v‖·‖H_:j‖,
        with ε the precision of products.
        """
        # Errors are independent, so that Σ_j e_j²·[H⁻¹]_jj is the expectation: the rest cancels.
        inverse_diagonal = self.inflation / self.matrix.diagonal()
        norms = torch.linalg.vector_norm(self.matrix, dim=0)
        return torch.finfo(self.dtype).eps ** 2 * float((norms.square() * inverse_diagonal).sum())

    @cached_property
    def low_rank_model(self) -> LowRankModel:
        """The leading directions of H + λI, of rank ⌈√columns⌉, for preconditioning."""
        model = LowRankModel.of(self.matrix, math.isqrt(self.columns - 1) + 1)
        # By rounding, the leading directions have components at dead inputs, which must not move.
        model.factor[self._dead] = 0
        return model

    @cached_property
    def double(self) -> "DampedHessian":
        """The same matrix in float64, for refinement and for float64 weights.

        Its first use drops the cached `matrix` and `inverse` in float32.
        """
        if self.dtype == torch.float64:
            return self
        # The float32 matrices are rarely needed again (and then computed anew): together they are
        # as large as one in float64.
        for name in ("matrix", "inverse"):
            self.__dict__.pop(name, None)
        return_freed_memory()
        return DampedHessian(
            self._hessian, self._dead, self._mean_diagonal, self.ratio, torch.float64
        )

    def float32_suffices_with(self, shift: float) -> bool:
        """Return whether float32 suffices for H + λI + σ·diag(H + λI), σ = `shift` > 0."""
        # At a unit diagonal no diagonal element of its inverse exceeds 1/σ, whatever H is: its
        # inflation is at most (1 + σ) / σ.
        return self.float32_suffices or 1 + 1 / shift <= _FLOAT32_SUFFICES

    def inverse_blocks(self, width: int) -> Tensor:
        """Return the diagonal blocks of (H + λI)⁻¹: (⌊columns / width⌋, width, width)."""
        # [H⁻¹]_BB = (U_:B)ᵀU_:B needs the columns B of U and not the whole inverse.
        columns = self.columns // width * width
        panels = self.factor[:, :columns].unflatten(1, (-1, width)).transpose(0, 1)
        return panels.mT @ panels

    def trailing_inverse_blocks(self, width: int) -> Tensor:
        """Return leading blocks of inverses of trailing parts: (⌊columns / width⌋, width, width).

        Block g is the leading block of ((H + λI)[j:, j:])⁻¹ with j = g·width: the inverse when all
        columns before j are frozen, as they are in a column sweep.
        """
        # U is upper triangular, so that (H[j:, j:])⁻¹ = (U[j:, j:])ᵀU[j:, j:], and the leading
        # block of this product needs no more than the diagonal block of U.
        count = self.columns // width
        corners = self.factor[: count * width, : count * width].view(count, width, count, width)
        corners = corners.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()
        return corners.mT @ corners

    def matrix_in(self, dtype: torch.dtype) -> Tensor:
        """Return a new H + λI, exactly symmetric, (columns, columns), in float32 or float64."""
        matrix = self._hessian.to(dtype, copy=True)
        # `InputHessian` accepts an asymmetry of 1e-3 of the largest diagonal element.
        make_symmetric(matrix)
        matrix.diagonal().add_(self.damping_used)
        if bool(self._dead.any()):
            matrix[self._dead] = 0
            matrix[:, self._dead] = 0
            # Dead inputs are coupled to no other, so that any positive number would do. A large one
            # would count the removal of their weights as loss, to which the gap is relative.
            matrix.diagonal()[self._dead] = self.damping_used or _FIRST_RAISE * self._mean_diagonal
        return matrix

    def _factorise(self) -> tuple[Tensor, Tensor]:
        """Compute the factor and the inflation; if float32 fails, float64 may still give them."""
        precision = torch.finfo(self.dtype).eps
        # 1. A float32 factor is refused where float32 does not suffice, even if it exists: float64
        #    gives a better one, which is then rounded.
        # 2. Past inflation · ε = 0.1, rounding leaves hardly a digit: only more damping helps.
        # 3. An inflation of NaN compares as false, so that such a factor is refused, too.
        for dtype in dict.fromkeys((self.dtype, torch.float64)):
            matrix = self.matrix_in(dtype)
            if dtype != self.dtype:
                warn_of_slow_float64(matrix.device)
            diagonal = matrix.diagonal().clone()
            factor = factor_of_inverse(matrix)
            del matrix
            if factor is not None:
                inflation = diagonal * torch.linalg.vector_norm(factor, dim=0).square()
                largest = _FLOAT32_SUFFICES if dtype == torch.float32 else 0.1 / precision
                if float(inflation.max()) <= largest:
                    return factor.to(self.dtype), inflation.to(self.dtype)
        raise _NotPositiveDefiniteError(
            f"H + {self.damping_used:g}·I is not positive definite in {self.dtype}."
        )


_FIRST_RAISE, _LARGEST = 1e-6, 10.0
_CAUSES = (
    "Likely causes: too few calibration tokens, NaN or Inf in the activations, or a matrix that is "
    "not 2·XᵀX / tokens."
)


class InputHessian:
    """H = 2·XᵀX / tokens of the inputs X, checked, and H + λI for the methods that need it.

    Layers that read the same activations (q, k and v; gate and up) share one. Methods that only
    need H itself, such as magnitude and Wanda, factorise nothing: for them H may be singular.

    Raises:
        HessianError: H is not a square floating-point matrix, not symmetric, has NaN or Inf or a
            negative diagonal, or is zero.
    """

    def __init__(self, hessian: Tensor, *, name: str | None = None) -> None:
        self.label = f"layer `{name}`" if name else "layer"  # in messages
        shape = tuple(hessian.shape)
        if hessian.ndim != 2 or shape[0] != shape[1] or shape[0] == 0:
            self._fail(f"the Hessian must be square, (columns, columns); got {shape}")
        if not hessian.is_floating_point():
            self._fail(f"the Hessian must be floating point; got {hessian.dtype}")
        self.hessian = hessian.detach()
        # The dtype to compute in.
        self.dtype = torch.float64 if hessian.dtype == torch.float64 else torch.float32
        self.columns = hessian.shape[0]
        diagonal = self.hessian.diagonal().to(self.dtype)
        # Finiteness comes first: NaN would pass the comparisons below.
        if not bool(self.hessian.isfinite().all()):
            self._fail("the Hessian holds NaN or Inf")
        if self._asymmetry() > 1e-3 * float(diagonal.abs().max()):
            self._fail("the Hessian is not symmetric")
        if bool((diagonal < 0).any()):
            self._fail("the Hessian has a negative diagonal, which no 2·XᵀX / tokens has")
        self.diagonal = diagonal.clone()
        self.dead = self.diagonal == 0  # bool (columns,): the inputs that were always zero
        self.dead_inputs = int(self.dead.sum())
        if self.dead_inputs == self.columns:
            self._fail("the Hessian is zero: the layer saw only zeros")
        # Dead inputs would lower the mean, and with it λ, for all inputs that need damping.
        self.mean_diagonal = float(self.diagonal[~self.dead].double().mean())
        self._damped: dict[float, DampedHessian] = {}

    def damped(self, damping: float) -> DampedHessian:
        """Return H + λI with λ = damping · mean(diag H), factorised once for each `damping`.

        If the matrix is not positive definite to its own precision, damping rises tenfold from
        max(damping, 1e-6), to at most 10, with a `NumericalWarning` for each step; then a
        `HessianError` is raised. The mean is over the inputs that are not dead.
        """
        if damping not in self._damped:
            self._damped[damping] = self._factorised(damping)
        return self._damped[damping]

    def _factorised(self, damping: float) -> DampedHessian:
        ratio = damping
        while True:
            try:
                return DampedHessian(self.hessian, self.dead, self.mean_diagonal, ratio, self.dtype)
            except _NotPositiveDefiniteError:
                failed = ratio
            ratio = 10 * ratio if ratio >= _FIRST_RAISE else _FIRST_RAISE
            # The slack admits 10 itself, which repeated products may miss by rounding.
            if ratio > _LARGEST * (1 + 1e-9):
                self._fail(f"the Hessian is not positive definite even with damping {failed:g}")
            warnings.warn(
                f"{self.label}: the Hessian is not positive definite with damping {failed:g}; "
                f"trying {ratio:g}. More calibration tokens would help.",
                NumericalWarning,
                stacklevel=3,
            )

    def _asymmetry(self) -> float:
        """Return the largest |H_ij − H_ji|, without a copy of H."""
        largest = 0.0
        for start, stop in split_range(0, self.columns, 1024):
            difference = self.hessian[start:stop] - self.hessian[:, start:stop].T
            largest = max(largest, float(difference.abs_().max()))
        return largest

    def _fail(self, problem: str) -> NoReturn:
        raise HessianError(f"{self.label}: {problem}. {_CAUSES}")
