"""Numbers that users give as options."""

import math
from numbers import Real
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """Whether this is a finite number, of any real type; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_count(value: object) -> TypeGuard[int]:
    """Whether this is a whole number from 1 on; True is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
