"""Exact conversions between what users hold (lists, ranges, numpy, torch) and the arrays that travel.

Every function either converts without loss or raises an `InvalidInputError` that names the place and the
first bad index. Nothing is copied that already has the right form.
"""

from __future__ import annotations

from array import array as c_array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._model import short_repr

if TYPE_CHECKING:
    from typing import TypeAlias

AnyArray: TypeAlias = npt.NDArray[Any]
Int32Array: TypeAlias = npt.NDArray[np.int32]
Int64Array: TypeAlias = npt.NDArray[np.int64]
Float32Array: TypeAlias = npt.NDArray[np.float32]

WIRE_INT32 = np.dtype("<i4")
WIRE_INT64 = np.dtype("<i8")
WIRE_FLOAT32 = np.dtype("<f4")
_NUMBER_KINDS = "fiu"


def is_torch(value: object) -> bool:
    """Whether this is a torch tensor, without importing torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach")


def array_of_torch(tensor: Any) -> AnyArray:
    """The tensor's values as numpy, sharing memory where it can. bfloat16 is widened to float32."""
    tensor = tensor.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        tensor = tensor.float()
    array: AnyArray = tensor.resolve_conj().resolve_neg().numpy()
    return array


def array_of(value: Any, where: str) -> AnyArray:
    """Numbers of any kind as an array whose dtype says what they are: a rectangular one, or an error."""
    if isinstance(value, np.ndarray):
        array = value
    elif is_torch(value):
        array = array_of_torch(value)
    else:
        array = _array_of_sequence(value, where)
    if array.dtype.kind == "b":
        return array.astype(np.int64)
    if array.dtype.kind not in _NUMBER_KINDS:
        raise InvalidInputError(f"{where}: expected numbers, got an array of {array.dtype}")
    return array


def _array_of_sequence(value: Any, where: str) -> AnyArray:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(
            f"{where}: expected a list, tuple, range, numpy array or torch tensor of numbers, "
            f"got {short_repr(value)} ({type(value).__name__})"
        )
    if len(value) == 0:
        return np.empty(0, dtype=np.float32)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError):
        raise _first_odd_one(value, where) from None
    if array.dtype.kind not in "biuf":
        raise _first_odd_one(value, where)
    return array


def _first_odd_one(value: Sequence[Any], where: str) -> InvalidInputError:
    """The error for a sequence that is no rectangular array of numbers: which item spoils it."""
    rows = [isinstance(item, (Sequence, np.ndarray)) and not isinstance(item, str) for item in value]
    if any(rows):
        if not all(rows):
            return InvalidInputError(
                f"{where}[{rows.index(False)}]: expected a row like the others, got a number"
            )
        width = len(value[0])
        for index, row in enumerate(value):
            if len(row) != width:
                return InvalidInputError(
                    f"{where}[{index}]: has {len(row)} items where row 0 has {width}; "
                    "ragged lists cannot be sent, pad the rows or use a sparse tensor"
                )
        for index, row in enumerate(value):
            try:
                np.asarray(row, dtype=np.float64)
            except (ValueError, TypeError, OverflowError):
                return _first_odd_one(row, f"{where}[{index}]")
    for index, item in enumerate(value):
        if isinstance(item, str) or not hasattr(item, "__float__"):
            return InvalidInputError(f"{where}[{index}]: expected a number, got {short_repr(item)}")
    return InvalidInputError(
        f"{where}: the numbers fit no common type; whole numbers must lie within 64 bits"
    )


def to_int64(array: AnyArray, where: str) -> Int64Array:
    """The array as int64; a fraction, NaN or a number out of range is an error."""
    if array.dtype == np.int64:
        return array
    if array.dtype.kind == "f":
        _refuse_fractions(array, where)
    if array.dtype.kind in "fu" and array.dtype.itemsize >= 4 and array.size:
        _refuse_out_of_range(array, -(2**63), 2**63 - 1, "int64", where)
    return array.astype(np.int64)


def to_int32(array: AnyArray, where: str) -> Int32Array:
    """The array as contiguous little-endian int32, itself if it already is that."""
    if array.dtype != np.int32:
        if array.dtype.kind == "f":
            _refuse_fractions(array, where)
        if array.dtype.itemsize >= 4 and array.size:
            _refuse_out_of_range(array, -(2**31), 2**31 - 1, "int32", where)
    return np.ascontiguousarray(array, dtype=WIRE_INT32)


def to_float32(array: AnyArray, where: str) -> Float32Array:
    """The array as float32. Rounding is fine; a finite number that would become infinite is an error."""
    if array.dtype == np.float32:
        return array
    try:
        with np.errstate(over="raise"):
            return array.astype(np.float32)
    except FloatingPointError:
        with np.errstate(over="ignore"):
            bad = np.isinf(array.astype(np.float32)) & np.isfinite(array)
        raise InvalidInputError(
            f"{place(where, bad)}: {first(array, bad)} is too large for float32"
        ) from None


def _refuse_fractions(array: AnyArray, where: str) -> None:
    bad = ~(np.isfinite(array) & (array == np.trunc(array)))
    if bad.any():
        raise InvalidInputError(f"{place(where, bad)}: expected a whole number, got {first(array, bad)}")


def _refuse_out_of_range(array: AnyArray, low: int, high: int, kind: str, where: str) -> None:
    if array.dtype.kind == "f":
        # `high + 1` is a power of two, so it is exact as a float where `high` may not be.
        bad = (array < float(low)) | (array >= float(high + 1))
    else:
        if int(array.min()) >= low and int(array.max()) <= high:
            return
        bad = array > np.array(high, dtype=array.dtype)
        if array.dtype.kind == "i":
            bad |= array < np.array(low, dtype=array.dtype)
    if bad.any():
        raise InvalidInputError(f"{place(where, bad)}: {first(array, bad)} does not fit {kind}")


def place(where: str, bad: npt.NDArray[np.bool_]) -> str:
    """`where` with the index of the first bad cell, such as `weights[17]` or `weights[2][0]`."""
    index = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return where + "".join(f"[{int(i)}]" for i in index)


def first(array: AnyArray, bad: npt.NDArray[np.bool_]) -> object:
    """The first bad value, as Python shows it."""
    value: object = array[np.unravel_index(int(np.argmax(bad)), bad.shape)].item()
    return value


def tokens_as_int32(tokens: Any, where: str) -> Int32Array:
    """Token ids of any container as a flat int32 array. Lists cost one pass; arrays of int32 nothing."""
    if isinstance(tokens, (list, tuple, range)):
        try:
            return np.frombuffer(c_array("i", tokens), dtype=np.int32)
        except (TypeError, OverflowError, ValueError):
            return _tokens_one_by_one(tokens, where)
    array = array_of(tokens, where)
    if array.ndim != 1:
        raise InvalidInputError(
            f"{where}: expected a flat sequence of token ids, got shape {list(array.shape)}"
        )
    return to_int32(array, where)


def _tokens_one_by_one(tokens: Sequence[Any], where: str) -> Int32Array:
    """The slow path: numbers in text and whole floats are exact, all else is an error with its index."""
    converted = np.empty(len(tokens), dtype=np.int32)
    for index, token in enumerate(tokens):
        number = _whole(token)
        if number is None:
            raise InvalidInputError(f"{where}[{index}]: expected a token id, got {short_repr(token)}")
        if not -(2**31) <= number < 2**31:
            raise InvalidInputError(f"{where}[{index}]: {number} does not fit int32")
        converted[index] = number
    return converted


def _whole(token: Any) -> int | None:
    try:
        if isinstance(token, str):
            return int(token)
        number = float(token)
    except (TypeError, ValueError, OverflowError):
        return None
    if not number.is_integer():
        return None
    return int(token)


def same_values(left: AnyArray | None, right: AnyArray | None) -> bool:
    """Equal shapes and values; NaN equals NaN."""
    if left is None or right is None:
        return left is right
    if left is right:
        return True
    if left.shape != right.shape:
        return False
    both_float = left.dtype.kind == "f" and right.dtype.kind == "f"
    return bool(np.array_equal(left, right, equal_nan=both_float))


def values_key(array: AnyArray | None) -> object:
    """A hashable stand-in for an array's value in comparisons of models."""
    if array is None:
        return None
    # Adding zero makes -0.0 the 0.0 it equals; the bytes then compare NaN equal to NaN.
    return array.dtype.kind, array.shape, (array + array.dtype.type(0)).tobytes()


def quick_hash(array: AnyArray) -> int:
    """A hash that equal arrays share and that costs the same for every length: size and the first cells."""
    head = array.reshape(-1)[:16].tolist()
    return hash((array.size, tuple(None if cell != cell else cell for cell in head)))


def dtype_name(array: AnyArray) -> Literal["int64", "float32"]:
    """The wire's name for what an array holds."""
    return "float32" if array.dtype.kind == "f" else "int64"
