"""Whether the numbers of a field are finite. A record holds JSON, which knows no others, and a loss of others is none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

MAX_BITS = 1024  # an integer of more is no finite float, nor is a fraction of such


def is_finite(value: Any) -> bool:
    """Whether all numbers in a value, NumPy's and those within containers included, are finite. Other objects are not looked into."""
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if isinstance(item, Mapping | list | tuple | set | frozenset):
            if id(item) in seen:
                continue
            seen.add(id(item))
            waiting += (*item, *item.values()) if isinstance(item, Mapping) else item
        elif isinstance(item, np.ndarray | np.inexact):
            if item.dtype.kind in "fc" and not np.isfinite(item).all():
                return False
            if item.dtype.kind == "O":
                waiting += item.flat
        elif isinstance(item, float | complex) and not (math.isfinite(item.real) and math.isfinite(item.imag)):
            return False
        elif isinstance(item, int | Fraction) and max(item.numerator.bit_length(), item.denominator.bit_length()) > MAX_BITS:
            return False
    return True


def is_finite_number(value: Any) -> bool:
    """Whether a value is one finite number, of Python, NumPy or JAX; truth values are 0 and 1."""
    try:
        return math.isfinite(value)
    except (TypeError, ValueError, OverflowError):
        return False


def shown(value: Any) -> str:
    """The beginning of a value's `repr` for a message; its type where it has none, as an integer of many digits."""
    try:
        return f"{value!r:.200}"
    except Exception as error:
        return f"{type(value).__name__} ({type(error).__name__})"
