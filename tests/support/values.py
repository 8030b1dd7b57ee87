"""Tables of values for the tests of types: a test over a table, containers of numbers, refusals."""

from __future__ import annotations

import decimal
import fractions
import functools
import inspect
import sys
from array import array as c_array
from collections import UserList, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tinker_sync.errors import InvalidInputError


def for_each(names: str | tuple[str, ...], values: Collection[Any]) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that runs a test for every value of a table, as one item of pytest.

    It has the arguments of `pytest.mark.parametrize`. The error lists the values that fail. All values share
    the same fixtures, so the test must not change the objects that fixtures return.

    Args:
        names: the argument of the test that takes a value, or the arguments that take a row.
        values: the table; a row is a tuple when there are several names.
    """
    arguments = (names,) if isinstance(names, str) else names

    def decorate(test: Callable[..., None]) -> Any:
        @functools.wraps(test)
        def run(*own: Any, **fixtures: Any) -> None:
            assert values
            failures: list[tuple[str, Exception]] = []
            for value in values:
                row = (value,) if isinstance(names, str) else value
                try:
                    test(*own, **fixtures, **dict(zip(arguments, row, strict=True)))
                except Exception as error:  # noqa: BLE001  # the error lists the other failures too
                    failures.append((f"{value!r:.100}: {type(error).__name__}: {error!s:.200}", error))
            if failures:
                listed = "\n".join(text for text, _ in failures)
                raise AssertionError(f"{len(failures)} of {len(values)} fail:\n{listed}") from failures[0][1]

        signature = inspect.signature(test)
        kept = [each for name, each in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
        return run

    return decorate


# ------------------------------------------------------------ The text with which a call is refused
def refusal(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Call a function that must raise InvalidInputError, and return the text of the error."""
    with pytest.raises(InvalidInputError) as caught:
        call(*arguments, **named)
    return str(caught.value)


# -------------------------- Dtypes and containers of numbers for the tests of conversions to arrays
INTS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64]
FLOATS = [np.float16, np.float32, np.float64, np.longdouble]


class ShowsAnArray:
    """An object with `__array__`, like those of jax, pandas and xarray."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self._array if dtype is None else self._array.astype(dtype)


class Indexed:
    """A sequence without a base class."""

    def __init__(self, *items: float) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> float:
        return self._items[index]


CONTAINERS: list[Any] = [
    [5, 6],
    (5, 6),
    range(5, 7),
    deque([5, 6]),
    UserList([5, 6]),
    c_array("b", [5, 6]),
    c_array("Q", [5, 6]),
    c_array("d", [5, 6]),
    memoryview(c_array("h", [5, 6])),
    memoryview(c_array("q", [6, 5]))[::-1],
    bytearray([5, 6]),
    Indexed(5, 6),
    ShowsAnArray(np.array([5, 6], dtype=np.int16)),
    np.array([5, 6], dtype=object),
    np.array(["5", "6"]),
    np.array([b"5", b"6"]),
    [np.int64(5), True + np.uint8(5)],
    [5.0, np.float32(6)],
    ["5", "6.0"],
    [decimal.Decimal(5), fractions.Fraction(6)],
    [np.array(5), np.array(6)],
    *[np.array([5, 6], dtype=dtype) for dtype in INTS + FLOATS],
]
"""Containers of the numbers 5 and 6."""


# ------------------------------------------- A check that code makes no Python list of a long array
@contextmanager
def long_lists(longer_than: int = 64) -> Iterator[list[int]]:
    """Yield a list that gets the size of each array whose `tolist` this thread calls in the block.

    Arrays of up to `longer_than` cells are ignored. The calls are counted with the profiler of the
    interpreter: numpy's method cannot be replaced, and the code under test converts subclasses to plain
    arrays.
    """
    sizes: list[int] = []

    def look(_: FrameType, event: str, called: Any) -> None:
        if event == "c_call" and called.__name__ == "tolist" and called.__self__.size > longer_than:
            sizes.append(called.__self__.size)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield sizes
    finally:
        sys.setprofile(before)
