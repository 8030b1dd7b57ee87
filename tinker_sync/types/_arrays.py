"""Conversions from users' values (lists, ranges, numpy, torch) to the arrays of requests, and array checks.

Conversions to integers are exact; those to float32 may round. A cell that cannot be converted raises an
`InvalidInputError` that names `where`, the place of the value, and the index of the first bad cell.
Arrays that already have the right form are not copied. Token ids are kept packed. Pure functions.
"""

from __future__ import annotations

import math
import struct
import sys
from array import array as c_array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import accumulate
from typing import Any, Literal, cast

from tinker_sync._base.numpy import AnyArray, BoolArray, Float32Array, Int32Array, Int64Array, is_array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._convert import SCALARS
from tinker_sync.types._structured import Structured, refuse, short_repr

_MOST_DIMENSIONS = 32
"""The most dimensions of an array in all supported numpy versions."""

_EXACT_IN_FLOAT64 = 2.0**53
"""From here on, neighbouring whole numbers share a float64."""


# ------------------------------------------------------------------------------------- arrays of anything


def is_torch(value: object) -> bool:
    """Return True for a torch tensor. Torch is not imported here: the creator of a tensor has imported it."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def array_of_torch(tensor: Any, where: str) -> AnyArray:
    """Return a torch tensor as a dense numpy array, over the memory of the tensor if possible.

    Values of a dtype that numpy lacks become float32.

    Raises:
        InvalidInputError: the tensor is on the meta device, which holds no values.
    """
    if tensor.device.type == "meta":
        raise InvalidInputError(f"{where}: a torch tensor on the meta device has no values")
    tensor = tensor.detach()
    if tensor.is_quantized:
        tensor = tensor.dequantize()
    tensor = tensor.to_dense().cpu().resolve_conj().resolve_neg()
    try:
        array: AnyArray = tensor.numpy()
    except TypeError:  # bfloat16 and the 8-bit floats; float32 holds all of their values
        array = tensor.float().numpy()
    return array


def plain_array(value: AnyArray, where: str) -> AnyArray:
    """Return a numpy array of any subclass as a plain array over the same memory. Refuse masked cells."""
    if type(value) is np.ndarray:
        return value
    if np.ma.isMaskedArray(value) and np.ma.getmaskarray(value).any():
        bad = np.ma.getmaskarray(value)
        raise InvalidInputError(
            f"{place(where, bad)}: is masked; call .filled(...) to choose the value to send"
        )
    return np.asarray(value)


def array_like(value: Any, where: str) -> AnyArray | None:
    """Return an array of numpy, torch, jax or pandas as a numpy array.

    A `memoryview`, `bytearray` or `array.array` is converted too. Return None for any other value, such as a
    list.

    Raises:
        InvalidInputError: the array has masked cells, or is a torch tensor on the meta device.
    """
    if is_array(value):
        return plain_array(value, where)
    if is_torch(value):
        return array_of_torch(value, where)
    if isinstance(value, (memoryview, bytearray, c_array)) or hasattr(value, "__array__"):
        return np.asarray(value)
    return None


# -------------------------------------------------------------------------------------- tensors to send


def wire_array(value: Any, where: str, dtype: Literal["int64", "float32"] | None = None) -> AnyArray:
    """Convert numbers of any kind to an int64 or float32 array.

    Without `dtype`, integers and booleans become int64, and other numbers, such as 1.0, float32.

    Raises:
        TypeError: the value cannot contain numbers; it is a mapping or a text, for example.
        InvalidInputError: a cell is not a number or does not fit the dtype, or the rows differ in length.
    """
    array = array_like(value, where)
    if array is None:
        array = _array_of_list(value, where, dtype)
    if array.dtype.kind not in "biuf":
        array = _array_of_odd_kind(array, where, dtype)
    if dtype is None:
        dtype = dtype_name(array)
    return to_int64(array, where) if dtype == "int64" else to_float32(array, where)


def dtype_name(array: AnyArray) -> Literal["int64", "float32"]:
    """Return the dtype in which the values of an array are sent."""
    return "float32" if array.dtype.kind == "f" else "int64"


def _array_of_list(value: Any, where: str, dtype: str | None) -> AnyArray:
    alone = isinstance(value, (int, float))
    if not alone and (isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__getitem__")):
        raise TypeError(
            f"{where}: expected a list, tuple, range, numpy array or torch tensor of numbers, "
            f"got {short_repr(value)} ({type(value).__name__})"
        )
    if isinstance(value, list) and dtype is not None:
        packed = pack_list(value, dtype)
        if packed is not None:
            return packed
    try:
        array = np.asarray(value)
    except Exception:  # noqa: BLE001  # as above
        return _cell_by_cell(value, where, dtype)
    if array.dtype.kind not in "biuf" or (dtype != "float32" and _may_be_rounded(array)):
        return _cell_by_cell(value, where, dtype)
    return array


_FORMATS = {"int64": "@{}q", "float32": "@{}f", "int32": "={}i"}
"""The formats with which `struct` packs numbers the fastest, by dtype; a count fills the braces."""


def pack_list(numbers: list[Any] | tuple[Any, ...], dtype: str) -> AnyArray | None:
    """Convert Python's numbers to a flat array, three times as fast as numpy.

    Return None if `struct` cannot pack an item as this dtype, or if an item is not finite.
    """
    packed = np.empty(len(numbers), dtype)
    try:
        struct.pack_into(_FORMATS[dtype].format(len(numbers)), packed.data, 0, *numbers)
    except Exception:  # noqa: BLE001  # odd cells raise many types; _cell_by_cell handles them
        return None
    return packed if is_finite(packed) else None  # a number may be too large for float32


_CHECKED_AS = {"int64": "int64", "float32": "float64"}
"""The dtype in which Python's numbers are checked, by the dtype to send: their floats exceed float32."""


def _may_be_rounded(array: AnyArray) -> bool:
    """Return True if numpy may have rounded whole numbers of a list when it made this array."""
    if array.dtype.kind != "f" or array.dtype.itemsize < 8:
        return False  # numpy converts lists with whole numbers to float64 or wider
    return bool((np.abs(array) >= _EXACT_IN_FLOAT64).any())


def _array_of_odd_kind(array: AnyArray, where: str, dtype: str | None) -> AnyArray:
    if array.dtype.kind in "OUS":
        # Without any number the dtype is float32, as for an empty list.
        return _cell_by_cell(array, where, dtype) if array.size else np.zeros(array.shape, np.float32)
    if array.dtype.kind == "V":  # bfloat16, int4 and similar types of jax
        for wider in (np.int64, np.float32):
            if np.can_cast(array.dtype, wider):
                return array.astype(wider)
    raise InvalidInputError(f"{where}: expected numbers, got an array of {array.dtype}")


def _cell_by_cell(value: Any, where: str, dtype: str | None) -> AnyArray:
    """Convert the cells one by one.

    This function accepts numbers of any library and numbers in text. None becomes NaN in float32, and is
    refused for int64. The error for a bad cell names its index.
    """
    cells: list[Any] = []
    shape = _gather(value, where, cells)
    if dtype is None:
        whole = bool(cells) and all(hasattr(cell, "__index__") for cell in cells)
        dtype = "int64" if whole else "float32"
    convert = _whole if dtype == "int64" else _real
    numbers = []
    for index, cell in enumerate(cells):
        number = convert(cell)
        if number is None:
            bad = np.zeros(shape, dtype=bool)
            bad.flat[index] = True
            expected = "a whole number within 64 bits" if dtype == "int64" else "a number"
            raise refuse(place(where, bad), expected, cell)
        numbers.append(number)
    return np.array(numbers, dtype=_CHECKED_AS[dtype]).reshape(shape)


def _gather(value: Any, where: str, cells: list[Any], depth: int = 0) -> tuple[int, ...]:
    """Append the cells of nested rows to `cells` and return the shape of the rows.

    Raises:
        InvalidInputError: a row has another shape than the first row, or the rows are nested too deep.
    """
    if is_torch(value):
        value = array_of_torch(value, where)
    if not _is_row(value):
        # A zero-dimensional array has the methods of an integer for every dtype, so unpack it.
        cells.append(value.item() if is_array(value) else value)
        return ()
    if depth == _MOST_DIMENSIONS:
        raise InvalidInputError(f"{where}: nested deeper than {_MOST_DIMENSIONS} lists")
    common: tuple[int, ...] | None = None
    for index, item in enumerate(value):
        shape = _gather(item, f"{where}[{index}]", cells, depth + 1)
        common = shape if common is None else common
        if shape != common:
            raise InvalidInputError(
                f"{where}[{index}]: is {_row_name(shape)} where {where}[0] is {_row_name(common)}; "
                "ragged lists cannot be sent, pad the rows or use a sparse tensor"
            )
    return (len(value), *(common or ()))


def _is_row(value: Any) -> bool:
    if isinstance(value, (str, bytes)) or getattr(value, "ndim", 1) == 0:
        return False
    return hasattr(value, "__len__") and hasattr(value, "__getitem__") and not isinstance(value, Mapping)


def _row_name(shape: tuple[int, ...]) -> str:
    if not shape:
        return "a single cell"
    return f"a row of {shape[0]}" if len(shape) == 1 else f"an array of shape {list(shape)}"


def _whole(cell: Any) -> int | None:
    try:
        number: int = SCALARS[int](cell)
    except InvalidInputError:
        return None
    return number if -(2**63) <= number < 2**63 else None


def _real(cell: Any) -> float | None:
    if cell is None:
        return math.nan  # the service itself sends NaN for absent values
    try:
        number: float = SCALARS[float](cell)
    except InvalidInputError:
        return None
    return number


# ------------------------------------------------------------------------------------ dtype to dtype


def to_int64(array: AnyArray, where: str) -> Int64Array:
    """Convert an array to int64; refuse fractions, NaN and numbers out of range."""
    if array.dtype == np.int64:
        return array
    if array.dtype.kind == "f":
        _refuse_fractions(array, where)
    if array.dtype.kind in "fu" and array.dtype.itemsize >= 4 and array.size:
        _refuse_out_of_range(array, -(2**63), 2**63 - 1, "int64", where)
    return array.astype(np.int64)


def to_int32(array: AnyArray, where: str) -> Int32Array:
    """Convert an array to contiguous little-endian int32, without a copy if possible.

    Refuse fractions, NaN and numbers out of range.
    """
    if array.dtype != np.int32:
        if array.dtype.kind == "f":
            _refuse_fractions(array, where)
        if array.dtype.itemsize >= 4 and array.size:
            _refuse_out_of_range(array, -(2**31), 2**31 - 1, "int32", where)
    return np.asarray(array, dtype="<i4", order="C")


def to_float32(array: AnyArray, where: str) -> Float32Array:
    """Convert an array to float32. Rounding is accepted; finite numbers too large for float32 are refused."""
    if array.dtype == np.float32:
        return array
    with np.errstate(all="ignore"):
        converted = array.astype(np.float32)
        if array.dtype.itemsize <= 4 or array.dtype.kind != "f":
            return converted  # all numbers of these types fit
        bad = np.isinf(converted) & np.isfinite(array)
    if bad.any():
        raise InvalidInputError(f"{place(where, bad)}: {first(array, bad)} is too large for float32")
    return converted


def _refuse_fractions(array: AnyArray, where: str) -> None:
    bad = ~(np.isfinite(array) & (array == np.trunc(array)))
    if bad.any():
        raise InvalidInputError(f"{place(where, bad)}: expected a whole number, got {first(array, bad)}")


def _refuse_out_of_range(array: AnyArray, low: int, high: int, kind: str, where: str) -> None:
    if array.dtype.kind == "f":
        # `high + 1` is a power of two and so exact as a float; `high` may not be.
        bad = (array < float(low)) | (array >= float(high + 1))
    else:
        if int(array.min()) >= low and int(array.max()) <= high:
            return
        bad = array > np.array(high, dtype=array.dtype)
        if array.dtype.kind == "i":
            bad |= array < np.array(low, dtype=array.dtype)
    if bad.any():
        raise InvalidInputError(f"{place(where, bad)}: {first(array, bad)} does not fit {kind}")


def place(where: str, bad: BoolArray) -> str:
    """Append the index of the first bad cell to `where`, as in `weights[17]` or `weights[2][0]`."""
    index = np.unravel_index(int(np.argmax(bad)), bad.shape) if bad.ndim else ()
    return where + "".join(f"[{int(i)}]" for i in index)


def first(array: AnyArray, bad: BoolArray) -> object:
    value: object = array.flat[int(np.argmax(bad))].item()
    return value


# --------------------------------------------------------------------------------- values of arrays


def least_of(numbers: Any) -> int:
    """Return the smallest number of a non-empty array or sequence."""
    # argmin takes two thirds of the time of min.
    return cast("int", numbers.item(numbers.argmin())) if is_array(numbers) else min(numbers)


def are_natural(arrays: Sequence[AnyArray]) -> bool:
    """Return True if all numbers in these arrays are 0 or more. None of the arrays may be empty."""
    return all(joined.item(joined.argmin()) >= 0 for joined in join_small(arrays))


def are_finite(arrays: Sequence[AnyArray]) -> bool:
    return all(is_finite(joined) for joined in join_small(arrays))


def count_nonzero(arrays: Sequence[AnyArray]) -> int:
    # The comparison with 0 makes the count twice as fast.
    return sum([int(np.count_nonzero(joined != 0)) for joined in join_small(arrays)])


def is_finite(numbers: AnyArray) -> bool:
    """Return True if an array contains neither NaN nor infinities."""
    if numbers.dtype.kind != "f" or not numbers.size:
        return True
    finite = np.isfinite(numbers)
    found: bool = finite.item(finite.argmin())  # argmin is faster than all and count_nonzero
    return found


_BLOCK_BYTES = 256 * 1024  # the processor's cache holds a block from its copy to its check


def join_small(arrays: Sequence[AnyArray]) -> Iterator[AnyArray]:
    """Yield one-dimensional arrays in order, with small neighbours joined into one array.

    One numpy operation on the joined array is far faster than one on each small array.

    >>> [joined.tolist() for joined in join_small([np.array([1, 2]), np.array([3])])]
    [[1, 2, 3]]
    """
    ends = list(accumulate([array.nbytes for array in arrays]))
    first = before = 0
    while first < len(ends):
        last = max(first + 1, bisect_right(ends, before + _BLOCK_BYTES))
        yield arrays[first] if last == first + 1 else np.concatenate(arrays[first:last])
        first, before = last, ends[last - 1]


# ------------------------------------------------------------------------------------- arrays as values


def same_values(left: AnyArray | None, right: AnyArray | None) -> bool:
    """Return True if shapes, values and kinds (whole or float) are equal.

    NaN equals NaN, and None equals None.
    """
    if left is right:
        return True
    if left is None or right is None or left.shape != right.shape:
        return False
    floats = left.dtype.kind == "f"
    if floats != (right.dtype.kind == "f"):
        return False
    return bool(np.array_equal(left, right, equal_nan=floats))


def quick_hash(array: AnyArray) -> int:
    """Return a hash of the size and the first cells of an array, in constant time."""
    head = array.flat[:16].tolist()
    return hash((array.size, tuple(None if cell != cell else cell for cell in head)))


class ByValue:
    """A wrapper that compares and hashes an array by its values. Models use it for fields with arrays."""

    __slots__ = ("_array",)

    def __init__(self, numbers: Any) -> None:
        self._array: AnyArray | None = np.asarray(numbers) if type(numbers) is c_array else numbers

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByValue) and same_values(self._array, other._array)

    def __hash__(self) -> int:
        return hash(None) if self._array is None else quick_hash(self._array)


class ArrayHead:
    """A stand-in for an array in the repr of a model. Its own repr lists the first values of the array."""

    def __init__(self, array: AnyArray) -> None:
        self._array = array

    def __repr__(self) -> str:
        size = self._array.size
        # `reshape(-1)` would copy all of a transposed array.
        head = self._array.flat[: 8 if size <= 8 else 3].tolist()
        return short_repr(head) if size <= 8 else f"{short_repr(head)[:-1]}, … {size} items]"


# ------------------------------------------------------------------------------------------- token ids


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
