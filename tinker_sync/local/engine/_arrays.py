"""The array type of the engine, and the arithmetic of padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy.typing as npt

if TYPE_CHECKING:
    from typing import TypeAlias

Array: TypeAlias = npt.NDArray[Any]


def padded_count(count: int, quantum: int) -> int:
    """The next multiple of `quantum`.

    >>> padded_count(13, 8), padded_count(16, 8)
    (16, 16)
    """
    return -(-count // quantum) * quantum
