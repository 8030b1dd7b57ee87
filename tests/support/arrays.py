"""Dtypes and containers of numbers for the tests of conversions to arrays."""

from __future__ import annotations

import decimal
import fractions
from array import array as c_array
from collections import UserList, deque
from typing import Any

import numpy as np

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
