"""Which groups of columns to remove: greedily, then by exchanges.

Rows do not appear: all losses follow from A = (H + λI)⁻¹ and C = WᵀW, both (columns, columns), in
float64. A *group* is `width` neighbouring columns, one for a neuron and several for a head.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_PANEL = 64
"""Columns whose removal is written into all others at once."""
_PAIRS = 2**22
"""Numbers in a table of pairs that is made at a time."""
_LEAST_GAIN = 1e-9
"""Exchanges that lower the loss by a smaller fraction are rounding."""


def greedy_set(inverse: Tensor, covariance: Tensor, count: int, width: int) -> list[int]:
    """Remove one group after another, each the one that costs least when all others adapt.

    Once P is removed, (H_KK)⁻¹ = A_KK − A_KP A_PP⁻¹ A_PK for what is kept, and the kept weights are
    at their optimum; removing the group J next costs ½·tr(A_JJ⁻¹ C_JJ) with A and C as they then
    are.

    Args:
        inverse: A, (columns, columns).
        covariance: C, (columns, columns).
        count: Number of groups to remove.
        width: Columns of a group.

    Returns:
        The groups, in the order in which they go.
    """
    inverse, covariance = inverse.clone(), covariance.clone()
    own, energy = diagonal_blocks(inverse, width), diagonal_blocks(covariance, width)
    lost = torch.zeros(len(own), dtype=inverse.dtype, device=inverse.device)
    order: list[int] = []
    # A − Σ aᵀl and C − Σ (hᵀl + lᵀh) are what holds; a, l and h are (width, columns) each.
    pending: list[tuple[Tensor, Tensor, Tensor]] = []
    for _ in range(count):
        j = int((costs(own, energy) + lost).argmin())
        order.append(j)
        lost[j] = torch.inf
        here = slice(j * width, (j + 1) * width)
        a, c = inverse[here].clone(), covariance[here].clone()
        if pending:
            before_a, before_l, before_h = (torch.cat(x) for x in zip(*pending, strict=True))
            a -= before_a[:, here].T @ before_l
            c -= before_h[:, here].T @ before_l + before_l[:, here].T @ before_h
        step = torch.linalg.solve(a[:, here], a)
        half = c - c[:, here] @ step / 2
        pending.append((a, step, half))
        steps, halves = blocks_of(step, width), blocks_of(half, width)
        own = own - blocks_of(a, width).mT @ steps
        change = halves.mT @ steps
        energy = energy - change - change.mT
        # What is removed has no cost any more, and must not divide by its zeros.
        own[j], energy[j] = torch.eye(width, dtype=own.dtype, device=own.device), 0
        if len(pending) * width >= _PANEL:
            a, step, half = (torch.cat(x) for x in zip(*pending, strict=True))
            inverse.addmm_(a.T, step, alpha=-1)
            covariance.addmm_(half.T, step, alpha=-1).addmm_(step.T, half, alpha=-1)
            pending.clear()
    return order


class ColumnSet:
    """A set P of removed groups, its exact loss, and what exchanging two groups would change.

    It holds two matrices (columns, columns). In S are (H_KK)⁻¹, T = (H_KK)⁻¹H_KP and the Schur
    complement B = H_PP − H_PK T, which is the inverse of A_PP. With Y_K, the weights at their
    optimum, and Y_P, the gradients of the removed ones, Q = YᵀY. Putting a group back or removing
    one is a sweep of S (Beaton, 1964) and a change of rank 2·`width` in Q.

    Args:
        inverse: A, (columns, columns).
        covariance: C, (columns, columns).
        removed: bool (groups,), True = removed. It is kept up to date.
        width: Columns of a group.

    Attributes:
        loss: ½·tr(W_P B W_Pᵀ), the damped loss of the optimum.
    """

    def __init__(self, inverse: Tensor, covariance: Tensor, removed: Tensor, width: int) -> None:
        self.removed, self._width = removed, width
        gone = removed.repeat_interleave(width)
        p, k = gone.nonzero()[:, 0], (~gone).nonzero()[:, 0]
        schur = torch.linalg.inv(inverse[p][:, p])
        schur = (schur + schur.T) / 2
        reach = -inverse[k][:, p] @ schur
        swept = torch.empty_like(inverse)
        swept[p[:, None], p] = schur
        swept[k[:, None], p], swept[p[:, None], k] = reach, reach.T
        swept[k[:, None], k] = inverse[k][:, k] + reach @ inverse[p][:, k]
        # Y = W M, with the columns of M as they follow from W.
        maps = torch.zeros_like(inverse)
        maps[k, k] = 1
        maps[p[:, None], k], maps[p[:, None], p] = reach.T, schur
        self._swept, self._energy = swept, maps.T @ covariance @ maps
        self.loss = float((covariance[p][:, p] * schur).sum()) / 2

    @property
    def _columns(self) -> tuple[Tensor, Tensor]:
        """The removed columns, and those that are kept."""
        gone = self.removed.repeat_interleave(self._width)
        return gone.nonzero()[:, 0], (~gone).nonzero()[:, 0]

    def optimum(self, weight: Tensor, live: Tensor) -> Tensor:
        """The weight (rows, columns) with P removed; `live` is it without dead inputs' columns."""
        p, k = self._columns
        found = torch.zeros_like(weight)
        found[:, k] = torch.addmm(weight[:, k], live[:, p], self._swept[p][:, k])
        return found

    def gap(self, weight: Tensor, found: Tensor, matrix: Tensor) -> float:
        """How far the loss of what was found is from the optimum's, relative to it.

        It is ½·tr(r (H_KK)⁻¹ rᵀ) for the residual r = (W − Ŵ)H on K, with `matrix` the damped H.
        """
        k = self._columns[1]
        residual = (weight - found) @ matrix[:, k]
        distance = float(((residual @ self._swept[k][:, k]) * residual).sum()) / 2
        return max(distance, 0.0) / self.loss if self.loss > 0 else 0.0

    def swap(self) -> int:
        """Exchange groups while that lowers the loss, each time the best pair: how often."""
        done = 0
        while done < len(self.removed):
            gain, back, out = self._best_exchange()
            if not gain > _LEAST_GAIN * self.loss:
                break
            self._move(back)
            self._move(out)
            self.loss -= gain
            done += 1
        return done

    def _best_exchange(self) -> tuple[float, int, int]:
        """The pair that lowers the loss most: by how much, what comes back, and what goes."""
        width = self._width
        back, out = self.removed.nonzero()[:, 0], (~self.removed).nonzero()[:, 0]
        own, energy = diagonal_blocks(self._swept, width), diagonal_blocks(self._energy, width)
        times: Callable[[Tensor, Tensor], Tensor] = torch.mul if width == 1 else torch.matmul
        best = (-torch.inf, -1, -1)
        for some in back.split(max(1, _PAIRS // (len(out) * width**2))):
            schur = own[some][:, None]  # (p, 1, width, width)
            t = _tiles(self._swept, some, out, width).mT  # T_qp, (p, q, width, width)
            # With p back, A_qq gains T B⁻¹ Tᵀ, and Y_q loses Y_p B⁻¹ Tᵀ.
            step = times(t, torch.linalg.inv(schur))
            a = own[out] + times(step, t.mT)
            through = times(step, _tiles(self._energy, some, out, width))
            c = energy[out] - through - through.mT
            c += times(times(step, energy[some][:, None]), step.mT)
            change = costs(schur, energy[some][:, None]) - costs(a, c)
            value, place = change.flatten().max(0)
            if float(value) > best[0]:
                i, j = divmod(int(place), len(out))
                best = float(value), int(some[i]), int(out[j])
        return best

    def _move(self, j: int) -> None:
        """Put a removed group back, or remove a kept one."""
        swept, energy, width = self._swept, self._energy, self._width
        here = slice(j * width, (j + 1) * width)
        gone = self.removed.repeat_interleave(width)
        other = gone != gone[here.start]  # the columns on the other side
        side = swept[:, here].clone()
        pivot = torch.linalg.inv(side[here])
        pivot = (pivot + pivot.T) / 2
        step = side @ pivot
        across = torch.where(other[:, None], step, 0)
        swept.addmm_(step, side.T, alpha=-1)
        # Between two columns of the other side the change has the other sign.
        swept.addmm_(across, side.T * other, alpha=2)
        leaves = not bool(self.removed[j])
        turned = torch.where(other[:, None] == leaves, step, -step)
        swept[:, here], swept[here] = turned, turned.T
        swept[here, here] = pivot
        # Y − Y_j lᵀ for all others, and Y_j times the pivot for the group itself.
        change = torch.where(other[:, None], -step, step) if leaves else step.clone()
        change[here] = torch.eye(width, dtype=step.dtype, device=step.device) - pivot
        column = energy[:, here].clone()
        half = column - change @ column[here] / 2
        energy.addmm_(half, change.T, alpha=-1).addmm_(change, half.T, alpha=-1)
        self.removed[j] = leaves


def costs(inverse: Tensor, energy: Tensor) -> Tensor:
    """½·tr(A⁻¹C) of blocks (..., width, width).

    It is what removing a group costs, and with B and Y_pᵀY_p what putting one back gains.
    """
    if inverse.shape[-1] == 1:
        return (energy / inverse)[..., 0, 0] / 2
    return torch.linalg.solve(inverse, energy).diagonal(dim1=-2, dim2=-1).sum(-1) / 2


def blocks_of(rows: Tensor, width: int) -> Tensor:
    """A matrix (width, columns) as (groups, width, width)."""
    return rows.unflatten(1, (-1, width)).transpose(0, 1)


def diagonal_blocks(matrix: Tensor, width: int) -> Tensor:
    """The blocks (groups, width, width) on the diagonal of a matrix (columns, columns)."""
    groups = len(matrix) // width
    tiles = matrix.view(groups, width, groups, width)
    return tiles.diagonal(dim1=0, dim2=2).permute(2, 0, 1).contiguous()


def _tiles(matrix: Tensor, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """The blocks of a matrix (columns, columns) in some groups: (rows, columns, width, width)."""
    groups = len(matrix) // width
    return matrix.view(groups, width, groups, width)[rows][:, :, columns].transpose(1, 2)
