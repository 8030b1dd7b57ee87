"""The array type of the engine, and the arithmetic of padding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
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


def first_outside(ids: Array, vocab_size: int) -> str:
    """The words for token ids that the model does not have, with the first of them and its place."""
    at = np.unravel_index(int(np.argmax((ids < 0) | (ids >= vocab_size))), ids.shape)
    place = "".join(f"[{index}]" for index in at)
    return f"a token id lies outside of 0 … {vocab_size - 1}: {ids[at]} at {place}"
