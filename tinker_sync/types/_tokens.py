"""Token ids: the containers that keep them, and exact conversions to int32. Pure functions.

A bad id raises an `InvalidInputError` that names `where`, the place of the ids, and the index of the id.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

from tinker_sync._base.numpy import AnyArray, Int32Array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import array_like, pack_list, to_int32
from tinker_sync.types._convert import SCALARS
from tinker_sync.types._structured import Structured, refuse, short_repr


def check_tokens(given: Any, where: str) -> Sequence[int] | AnyArray:
    """Check every id, and return the container that a chunk keeps.

    Arrays and tuples of integers are kept as they are. A list is copied, because the program may change it
    later. A range becomes a list. Ids of another type, such as text, are converted in a copy.
    """
    tokens = _contain(given, where)
    if isinstance(tokens, (list, tuple)):
        if pack_int32(tokens) is not None and [*map(type, tokens)].count(int) == len(tokens):
            return tokens
        # Keep the converted values of text such as "4", whole floats and numpy's integers.
        plain: list[int] = tokens_as_int32(tokens, where).tolist()
        return tuple(plain) if isinstance(tokens, tuple) else plain
    if isinstance(tokens, range):
        _refuse_range_beyond_int32(tokens, where)
        return list(tokens)
    array = cast("AnyArray", tokens)
    if array.ndim == 1 and array.dtype == np.int32:
        return array
    exact = tokens_as_int32(array, where)
    return array if array.dtype.kind in "iu" else exact


def _contain(tokens: Any, where: str) -> Sequence[int] | AnyArray:
    if isinstance(tokens, (tuple, range)):
        return tokens
    if isinstance(tokens, list):
        return list(tokens)
    if isinstance(tokens, str):
        raise refuse(where, "token ids; ModelInput.from_text(text, tokenizer) encodes a text", tokens)
    if isinstance(tokens, Mapping) and "input_ids" in tokens:
        raise refuse(where, "a sequence of token ids; give its ['input_ids']", tokens)
    if isinstance(tokens, (bytes, bytearray, Mapping, Set, Structured)):
        raise refuse(where, "a sequence of token ids", tokens)
    array = array_like(tokens, where)
    if array is not None:
        return array
    try:
        return list(tokens)
    except TypeError:
        raise refuse(where, "a sequence of token ids", tokens) from None


def tokens_as_int32(tokens: Any, where: str) -> Int32Array:
    """Convert token ids to a flat int32 array. An int32 array is returned without a copy if possible."""
    if isinstance(tokens, (list, tuple)):
        packed = pack_list(tokens, "int32")
        return _convert_one_by_one(tokens, where) if packed is None else packed
    if isinstance(tokens, range):
        _refuse_range_beyond_int32(tokens, where)
        return np.arange(tokens.start, tokens.stop, tokens.step, dtype=np.int64).astype("<i4")
    array = array_like(tokens, where)
    if array is None:
        return _convert_one_by_one(list(tokens), where)
    if array.ndim != 1:
        raise InvalidInputError(
            f"{where}: expected a flat sequence of token ids, got shape {list(array.shape)}"
        )
    if array.dtype.kind not in "biuf":
        return _convert_one_by_one(array.tolist(), where)
    return to_int32(array, where)


def pack_int32(tokens: Sequence[Any]) -> bytes | None:
    """Return token ids as little-endian int32, packed without numpy; None if an item is no int32 number."""
    try:
        return struct.pack(f"<{len(tokens)}i", *tokens)  # also the quickest check of the range
    except (struct.error, TypeError, OverflowError, ValueError):
        return None


def unpack_int32(packed: bytes) -> list[int]:
    """Return the list of the ids that `pack_int32` has packed."""
    return [*struct.unpack(f"<{len(packed) // 4}i", packed)]


def _refuse_range_beyond_int32(tokens: range, where: str) -> None:
    low, high = -(2**31), 2**31 - 1
    if tokens and not (low <= min(tokens[0], tokens[-1]) and max(tokens[0], tokens[-1]) <= high):
        beyond = high + 1 if tokens.step > 0 else low - 1
        # The number of steps, rounded up, from the start to the first number outside.
        index = -((tokens.start - beyond) // tokens.step) if low <= tokens[0] <= high else 0
        raise InvalidInputError(f"{where}[{index}]: {short_repr(tokens[index])} does not fit int32")


def _convert_one_by_one(tokens: Sequence[Any], where: str) -> Int32Array:
    """Convert ids one by one. Accept whole floats and digits in text; name the index of any other value."""
    converted = np.empty(len(tokens), dtype=np.int32)
    for index, token in enumerate(tokens):
        try:
            number = SCALARS[int](token)
        except InvalidInputError:
            raise refuse(f"{where}[{index}]", "a token id", token) from None
        if not -(2**31) <= number < 2**31:
            raise InvalidInputError(f"{where}[{index}]: {short_repr(number)} does not fit int32")
        converted[index] = number
    return converted
