"""How numbers are written."""

from collections.abc import Callable, Sequence
from statistics import fmean, stdev

MISSING = "–"


def perplexity(value: float | None) -> str:
    """Three decimals while they mean something."""
    if value is None:
        return "not finite"
    return f"{value:,.3f}" if value < 1000 else f"{value:,.0f}"


def relative_loss(value: float | None) -> str:
    """A fraction."""
    if value is None:
        return MISSING
    return f"{value:.4f}" if value == 0 or value >= 0.001 else scientific(value, 2)


def percent(value: float | None) -> str:
    """Of a fraction."""
    return MISSING if value is None else f"{100 * value:.4g}%"


def change(before: float, after: float) -> str:
    """Relative, with its sign."""
    return f"{'+' if after >= before else '−'}{abs(100 * (after / before - 1)):.1f}%"


def count(value: float | None) -> str:
    """With separators."""
    return MISSING if value is None else f"{value:,.0f}"


def scientific(value: float, decimals: int = 1) -> str:
    """With a minus sign, at which no line is broken."""
    return f"{value:.{decimals}e}".replace("e-", "e−")


def number(value: float | None) -> str:
    """Four significant digits."""
    return MISSING if value is None else f"{value:.4g}".replace("e-", "e−")


def seconds(value: float | None) -> str:
    """The unit is said beside it."""
    if value is None:
        return MISSING
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}"


def duration(value: float) -> str:
    """With its unit."""
    if value < 120:
        return f"{seconds(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def memory(value: float | None) -> str:
    """Bytes, in binary units."""
    if value is None:
        return MISSING
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"


def spread(values: Sequence[float | None], write: Callable[[float | None], str]) -> str:
    """The mean, and the standard deviation (n − 1) where there are several; `None` is not finite.

    Args:
        values: What was measured, a value for each run.
        write: How one number is written.
    """
    found = [value for value in values if value is not None]
    if not values:
        return MISSING
    if not found:
        return write(None)
    text = write(fmean(found))
    if len(found) > 1:
        text += f" ± {_as_precise_as(text, stdev(found), write)}"
    lost = len(values) - len(found)
    return f"{text} ({lost} of {len(values)} not finite)" if lost else text


def _as_precise_as(mean: str, deviation: float, write: Callable[[float | None], str]) -> str:
    """A deviation with the decimals of its mean."""
    if "e" in mean:
        return write(deviation)
    decimals = len(mean.partition(".")[2].rstrip("%"))
    smallest = 10.0**-decimals
    if 0 < deviation < smallest / 2:
        return f"<{smallest:.{decimals}f}"
    return f"{deviation:,.{decimals}f}"
