"""The bits a weight of the packed formats."""

from mrp_lightning.solver.patterns import Dense
from mrp_lightning.solver.recipe import Recipe


def bits_of(recipe: Recipe) -> float:
    """Return the packed bits a weight: position, value if it is kept, and share of the scale."""
    grid = recipe.grid
    value, scale = (16, 0.0) if grid is None else (grid.bits, 16 / grid.group_size)
    if isinstance(recipe.pattern, Dense):
        return value + scale
    return 1 + (1 - recipe.pattern.sparsity) * value + scale
