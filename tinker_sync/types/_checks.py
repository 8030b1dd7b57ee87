"""Validators of fields for `attrs.field(validator=...)`: ranges, lengths, time zones.

They refuse the values that the reference client, the vendor's own, refuses. The error names class and field.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

from tinker_sync.errors import InvalidInputError

Check = Callable[[Any, Any, Any], None]
"""A function that takes a model, a field and its value, and raises an error for a wrong value."""


def as_whole(value: Any) -> int | None:
    """Return a whole number of any library as an int; None for any other value, such as True or 3.0.

    >>> as_whole(3), as_whole(True), as_whole("3")
    (3, None, None)
    """
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def in_range(*, ge: float, le: float = math.inf, lt: float = math.inf) -> Check:
    """Return a check that a number is finite, at least `ge`, at most `le` and less than `lt`."""
    bounds = [f"{ge} or more"]
    bounds += [f"at most {le}"] if le < math.inf else []
    bounds += [f"less than {lt}"] if lt < math.inf else []

    def check(instance: Any, field: Any, value: float) -> None:
        if not (ge <= value <= le and value < lt):
            raise _refuse(instance, field, " and ".join(bounds), value)

    return check


def finite(instance: Any, field: Any, value: float) -> None:
    if not math.isfinite(value):
        raise _refuse(instance, field, "a finite number", value)


def holds(least: int, most: float = math.inf) -> Check:
    """Return a check that a text or a list has a length from `least` to `most`. The check accepts None."""
    expected = f"{least} or more" if most == math.inf else f"{least} to {most}"

    def check(instance: Any, field: Any, value: Any) -> None:
        if value is not None and not least <= len(value) <= most:
            unit = "characters" if isinstance(value, str) else "items"
            raise _refuse(instance, field, f"{expected} {unit}", len(value))

    return check


def with_time_zone(instance: Any, field: Any, value: Any) -> None:
    if value.utcoffset() is None:
        raise _refuse(instance, field, "a datetime with a time zone", value)


def _refuse(instance: Any, field: Any, expected: str, got: object) -> InvalidInputError:
    return InvalidInputError(f"{type(instance).__name__}.{field.name}: expected {expected}, got {got}")
