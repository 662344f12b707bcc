"""Pruning by the multiple removal method."""

from typing import Any

from mrp_lightning.callbacks.pruning import PruningCallback


class MRPCallback(PruningCallback):
    """`PruningCallback` with the multiple removal method: mask S, exact compensation M.

    Args:
        method: As in `PruningCallback`.
        **kwargs: The other arguments of `PruningCallback`.
    """

    def __init__(self, *, method: str = "SM", **kwargs: Any) -> None:
        super().__init__(method=method, **kwargs)
