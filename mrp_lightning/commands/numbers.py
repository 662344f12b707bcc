"""Format numbers for a reader, with as many digits as are significant."""

import math
from collections.abc import Callable
from functools import wraps

Write = Callable[[float | None], str]
"""A function that formats a number: `None` as `MISSING`, and NaN and infinities as "not finite"."""

MISSING = "–"


def _of_finite(write: Callable[[float], str]) -> Write:
    @wraps(write)
    def written(value: float | None) -> str:
        if value is None:
            return MISSING
        # The check is common to all formats: none of them could round NaN or infinity.
        return write(value) if math.isfinite(value) else "not finite"

    return written


@_of_finite
def perplexity(value: float) -> str:
    """Format a perplexity: three decimals below 1,000, none above, one digit from 1e5 on."""
    if value >= 1e5:
        return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")
    return f"{value:.3f}" if value < 1000 else f"{value:,.0f}"


@_of_finite
def relative_loss(value: float) -> str:
    """Format a fraction with four decimals, or with three digits if it is below 0.001."""
    return f"{value:.4f}" if value == 0 or value >= 0.001 else f"{value:.2e}".replace("e-", "e−")


@_of_finite
def percent(value: float) -> str:
    """Format a fraction in percent."""
    return f"{100 * value:.4g}%"


@_of_finite
def points(value: float) -> str:
    """Format a percentage without the percent sign."""
    return f"{value:.2f}"


@_of_finite
def count(value: float) -> str:
    """Format a whole number with thousands separators."""
    return f"{value:,.0f}"


@_of_finite
def number(value: float) -> str:
    """Format a number with four significant digits."""
    return f"{value:.4g}".replace("e-", "e−")


@_of_finite
def seconds(value: float) -> str:
    """Format seconds, without the unit."""
    return f"{value:.3f}" if value < 1 else f"{value:,.1f}"


@_of_finite
def memory(value: float) -> str:
    """Format a number of bytes in binary units."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:,.2f} {unit}"
    return f"{value:,.0f} B"
