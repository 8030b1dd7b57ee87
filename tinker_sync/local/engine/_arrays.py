"""The array type of the engine, and how many rows a product must have to be the same for each of them.

Pure functions; any thread may enter.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing import TypeAlias

Array: TypeAlias = npt.NDArray[Any]


@cache
def row_quantum() -> int:
    """The number to whose multiple the rows of a product are padded, so that no row depends on the others.

    BLAS handles the last rows of a matrix with other code than the rest, which rounds differently. Which
    number of rows makes one tile depends on library and processor, so it is found out by trying. Where no
    number does (a library that splits the inner sum by shape), rows agree up to rounding only.

    >>> row_quantum() >= 1
    True
    """
    rng = np.random.default_rng(0)
    probes = [
        (
            rng.standard_normal((96, inner), dtype=np.float32),
            rng.standard_normal((outer, inner), dtype=np.float32),
        )
        for inner, outer in ((192, 320), (64, 48), (40, 1024))
    ]
    for quantum in (1, 4, 6, 8, 12, 16, 24, 32, 48):
        if all(_rows_agree(x, w, quantum) for x, w in probes):
            return quantum
    return 16


def _rows_agree(x: Array, w: Array, quantum: int) -> bool:
    first = x[:1].repeat(quantum, axis=0) @ w.T
    whole = x[:1].repeat(96, axis=0) @ w.T
    if not (first == first[0]).all() or not (whole == first[0]).all():
        return False
    counts = range(quantum, 96 + 1, quantum)
    full = x[: counts[-1]] @ w.T
    return all(np.array_equal(x[:count] @ w.T, full[:count]) for count in counts)


def padded_count(count: int, quantum: int) -> int:
    """The next multiple of `quantum`.

    >>> padded_count(13, 8), padded_count(16, 8)
    (16, 16)
    """
    return -(-count // quantum) * quantum
