"""The array type of the engine, padding, and the message for bad token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from typing import TypeAlias

Array: TypeAlias = npt.NDArray[Any]


def round_up(count: int, quantum: int) -> int:
    """Round a count up to a multiple of `quantum`.

    >>> round_up(13, 8), round_up(16, 8)
    (16, 16)
    """
    return -(-count // quantum) * quantum


def describe_bad_token(ids: Array, vocab_size: int) -> str:
    """Return an error message with the first token id outside of the vocabulary and its position."""
    at = np.unravel_index(int(np.argmax((ids < 0) | (ids >= vocab_size))), ids.shape)
    place = "".join(f"[{index}]" for index in at)
    return f"a token id lies outside of 0 … {vocab_size - 1}: {ids[at]} at {place}"
