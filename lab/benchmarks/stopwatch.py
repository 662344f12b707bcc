"""The time of a pruning by its parts: functions of the package, timed one by one."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mrp_lightning.pruning import prune_layers, sequential
from mrp_lightning.solver import compensations, hessian, problem
from mrp_lightning.solver.recipe import MASKS

WALK = "walk finding"
PARTS: dict[str, list[tuple[Any, str]]] = {
    "forwards": [],
    WALK: [(sequential, "choose_walk")],
    "Hessians": [
        (hessian.HessianAccumulator, "update"),
        (hessian.HessianAccumulator, "hessian"),
        (hessian.InputHessian, "__init__"),
    ],
    "factorisation": [
        (hessian.DampedHessian, "__init__"),
        (hessian.DampedHessian.__dict__["inverse"], "func"),
    ],
    "mask": [(type(mask), "bind") for mask in MASKS.values()],
    "sweep": [(compensations.ColumnSweep, "apply")],
    "between blocks": [(compensations, "_approach")],
    "final solve": [(compensations, "_solve")],
    "losses": [(problem, "output_energy"), (prune_layers, "output_energy")],
}
"""The parts of a run: functions, each timed without the other parts that it calls."""


class Stopwatch:
    """Shares out the time among parts. What runs within a part is not counted in it again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: Counter[str] = Counter()
        self._clock, self._since = clock, clock()
        self._parts = ["rest"]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what runs in this context. The forwards by which a walk is found are part of it."""
        self._parts.append(WALK if WALK in self._parts else name)
        self._turn(-2)
        try:
            yield
        finally:
            self._turn(-1)
            self._parts.pop()

    def counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, counted as a part of this name; a function that it returns, too."""

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                result = function(*args, **kwargs)
            return self.counted(name, result) if name == "mask" and callable(result) else result

        return wrapper

    def count_parts(self) -> None:
        """Count all of `PARTS`, from now on in this process."""
        for name, places in PARTS.items():
            for owner, attribute in places:
                setattr(owner, attribute, self.counted(name, getattr(owner, attribute)))

    def _turn(self, part: int) -> None:
        now = self._clock()
        self.seconds[self._parts[part]] += now - self._since
        self._since = now
