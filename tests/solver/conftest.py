"""Problems, and independent truths about them: dense float64 solves and textbook rewrites."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from mrp_lightning.processes import ALONE
from mrp_lightning.solver.hessian import InputHessian
from mrp_lightning.solver.patterns import Dense
from mrp_lightning.solver.problem import Problem
from mrp_lightning.solver.quantisation import on_grid


def layer_problem(rows=24, columns=64, tokens=None, seed=0, dtype=torch.float32):
    """A weight and inputs with correlated features, a decaying spectrum and large channels."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rotation = torch.linalg.qr(normal(columns, columns)).Q
    channels = torch.exp(0.5 * normal(columns))
    channels[:: max(columns // 3, 1)] *= 10
    spectrum = torch.arange(1, columns + 1, dtype=torch.float64) ** -0.7
    inputs = (normal(tokens or 4 * columns, columns) * spectrum) @ rotation * channels
    weight = normal(rows, columns) / math.sqrt(columns)
    return weight.to(dtype), inputs.to(dtype)


def hessian_of(inputs):
    inputs = inputs.double()
    return 2 * inputs.T @ inputs / inputs.shape[0]


def damped(hessian, damping=0.01):
    """H + λI in float64 for live inputs only."""
    hessian = hessian.double()
    diagonal = hessian.diagonal()
    return hessian + damping * diagonal[diagonal > 0].mean() * torch.eye(len(hessian)).double()


def loss(weight, dense, matrix):
    change = weight.double() - dense.double()
    return float(((change @ matrix.double()) * change).sum()) / 2


def exact_optimum(weight, matrix, pruned):
    """One dense float64 solve a row: H_UU x_U = (H w)_U."""
    weight, matrix = weight.double(), matrix.double()
    result = torch.zeros_like(weight)
    for row, removed in enumerate(pruned):
        kept = (~removed).nonzero().flatten()
        if len(kept):
            result[row, kept] = torch.linalg.solve(
                matrix[kept][:, kept], matrix[kept] @ weight[row]
            )
    return result


def cheapest_combination(weights, inverse_block, num_removed):
    """Try every combination of one group; return its members."""
    members = torch.tensor(list(itertools.combinations(range(len(weights)), num_removed)))
    corners = inverse_block[members[:, :, None], members[:, None, :]]
    removed = weights[members]
    costs = (removed * torch.linalg.solve(corners, removed[..., None])[..., 0]).sum(1)
    return members[costs.argmin()].tolist()


def choose_block(weights, inverse, start, mask, sparsity, pattern, already_removed):
    """The mask of one block of columns from current weights: float64, one element at a time."""
    rows, width = weights.shape
    pruned = torch.zeros(rows, width, dtype=torch.bool)
    scores = weights**2 / inverse.diagonal()[start : start + width]
    if sparsity is not None:
        total = math.floor(sparsity * rows * (start + width) + 0.5)
        order = scores.flatten().argsort(stable=True)[: total - already_removed]
        pruned.view(-1)[order] = True
        return pruned
    kept, group = pattern
    for row in range(rows):
        for first in range(0, width, group):
            if mask == "S":
                members = scores[row, first : first + group].argsort(stable=True)[: group - kept]
            else:
                columns = slice(start + first, start + first + group)
                members = cheapest_combination(
                    weights[row, first : first + group], inverse[columns, columns], group - kept
                )
            pruned[row, first + torch.as_tensor(members)] = True
    return pruned


def algorithm_1(weight, matrix, block_size, mask="S", sparsity=None, pattern=None):
    """Paper Algorithm 1 with an exact float64 solve after every block."""
    weight, matrix = weight.double(), matrix.double()
    inverse = torch.linalg.inv(matrix)
    x, pruned = weight.clone(), torch.zeros_like(weight, dtype=torch.bool)
    for start in range(0, weight.shape[1], block_size):
        block = x[:, start : start + block_size]
        pruned[:, start : start + block_size] = choose_block(
            block, inverse, start, mask, sparsity, pattern, int(pruned.sum())
        )
        x = exact_optimum(weight, matrix, pruned)
    return x, pruned


def sparsegpt(weight, matrix, block_size=128, mask="S", sparsity=None, pattern=None):
    """SparseGPT as its paper writes it: after each column the trailing Hessian is inverted anew."""
    x, matrix = weight.double().clone(), matrix.double()
    rows, columns = x.shape
    pruned = torch.zeros(rows, columns, dtype=torch.bool)
    inverses = [torch.linalg.inv(matrix[j:, j:]) for j in range(columns)]
    pivots = torch.stack([inverse[0, 0] for inverse in inverses])
    for j in range(columns):
        if sparsity is not None and j % block_size == 0:
            stop = min(j + block_size, columns)
            scores = (x[:, j:stop] ** 2 / pivots[j:stop]).flatten()
            count = math.floor(sparsity * rows * stop + 0.5) - int(pruned.sum())
            chosen = torch.zeros(len(scores), dtype=torch.bool)
            chosen[scores.argsort(stable=True)[:count]] = True
            pruned[:, j:stop] = chosen.view(rows, -1)
        if pattern is not None and j % pattern[1] == 0:
            kept, group = pattern
            for row in range(rows):
                w = x[row, j : j + group]
                if mask == "S":
                    scores = w**2 / pivots[j : j + group]
                    members = scores.argsort(stable=True)[: group - kept]
                else:
                    corner = inverses[j][:group, :group]
                    members = torch.as_tensor(cheapest_combination(w, corner, group - kept))
                pruned[row, j + members] = True
        removed = torch.where(pruned[:, j], x[:, j], 0.0)
        x[:, j:] -= removed[:, None] * inverses[j][0] / pivots[j]
    return x.masked_fill(pruned, 0), pruned


def gptq(target, matrix, grid, scales, minima=None, kept=None):
    """GPTQ as its paper has it: after each column the inverse of what is left is taken anew."""
    x, found = target.clone(), torch.zeros_like(target)
    codebook = torch.tensor(grid.codebook, dtype=target.dtype)
    for j in range(target.shape[1]):
        inverse, group = torch.linalg.inv(matrix[j:, j:]), j // grid.group_size
        points = scales[:, group, None] * codebook
        if minima is not None:
            points = points - minima[:, group, None]
        nearest = (points - x[:, j : j + 1]).abs().argmin(1, keepdim=True)
        found[:, j] = points.gather(1, nearest)[:, 0] * (1 if kept is None else kept[:, j])
        x[:, j:] -= ((x[:, j] - found[:, j]) / inverse[0, 0])[:, None] * inverse[0]
    return found


def on_grid_of(weight, hessian, grid, kept=None):
    """The weight that `on_grid` gives, and its parameters; all is kept by default."""
    kept = torch.ones_like(weight, dtype=torch.bool) if kept is None else kept
    problem = Problem(
        weight=weight,
        result_dtype=weight.dtype,
        inputs=InputHessian(hessian),
        pattern=Dense(),
        block_size=weight.shape[1],
        damping=0.01,
        progress=lambda _: None,
        processes=ALONE,
        rows=len(weight),
    )
    return on_grid(problem, weight * kept, ~kept, grid)


@pytest.fixture(scope="session")
def problem():
    return layer_problem


@pytest.fixture(scope="session")
def truth():
    return SimpleNamespace(
        hessian_of=hessian_of,
        damped=damped,
        loss=loss,
        exact_optimum=exact_optimum,
        cheapest_combination=cheapest_combination,
        algorithm_1=algorithm_1,
        sparsegpt=sparsegpt,
        gptq=gptq,
        on_grid_of=on_grid_of,
    )
