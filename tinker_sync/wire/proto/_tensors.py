"""Numpy arrays and the `bytes` fields that carry them.

Outgoing arrays are sent from the memory they lie in: a payload is a view, copied only when the array is not
contiguous or not of the wire's dtype. Incoming arrays are copied out, large ones each on its own: what a user
keeps is writable, aligned, in this machine's byte order, overlaps with nothing, and never holds a whole
response alive. Any thread may use this.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np

from tinker_sync.types._csr import csr_problem
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._fault import Fault

if TYPE_CHECKING:
    from tinker_sync.types._arrays import AnyArray, Int64Array
    from tinker_sync.wire.proto._reader import Plain

INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
FLOAT32 = np.dtype("<f4")

# How users get them. Dtype objects rather than classes: that halves the price of a small copy.
OWN_INT32 = np.dtype(np.int32)
OWN_INT64 = np.dtype(np.int64)
OWN_FLOAT32 = np.dtype(np.float32)

WIRE_DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "float32": (tables.DTYPE_FLOAT32, FLOAT32),
    "int64": (tables.DTYPE_INT64, INT64),
}
"""What we send: the DType and how its values lie in memory."""

BLOCK_CELLS = 16_384
"""What a small array of an answer may keep alive besides itself: 64 KiB of float32 or 128 of int64."""

MAX_DIMENSIONS = 32
"""What every numpy in use can hold."""
MAX_CELLS = 2**59
"""Dimensions of empty arrays are bounded too; numpy counts bytes in 63 bits."""


# ------------------------------------------------------------------------------------------ arrays out


def payload(array: AnyArray, dtype: np.dtype[Any]) -> memoryview:
    """The array's values as little-endian bytes, in row-major order; a view wherever possible.

    >>> payload(np.arange(2), INT32).tobytes().hex()
    '0000000001000000'
    """
    if (
        array.dtype == dtype
        and array.ndim == 1
        and array.size
        and array.flags.c_contiguous
        and dtype.isnative
    ):
        return array.data.cast("B")  # the usual case, at a fifth of the price
    contiguous = np.ascontiguousarray(array, dtype=dtype)
    return contiguous.reshape(-1).view(np.uint8).data


def wire_dtype(tensor: TensorData) -> tuple[int, np.dtype[Any]]:
    """The DType of a tensor and the layout of its values."""
    known = WIRE_DTYPES.get(tensor.dtype)
    if known is None:
        raise Fault(f"expected 'float32' or 'int64', got {tensor.dtype!r}", "dtype")
    return known


def plain_tensor(tensor: TensorData) -> Plain:
    """A `Tensor` message. A shape that is not known is left out; a sparse tensor stays sparse."""
    dtype, layout = wire_dtype(tensor)
    values = payload(tensor._numpy, layout)
    plain: Plain = {"dtype": dtype, "shape": tensor.shape}
    if not tensor.is_sparse:
        return {**plain, "dense": values}
    if tensor._crow is None or tensor._col is None:
        raise Fault("row pointers and column indices go together; one is missing", "sparse_csr")
    crow, col = payload(tensor._crow, INT64), payload(tensor._col, INT64)
    return {**plain, "sparse_csr": {"values": values, "crow_indices": crow, "col_indices": col}}


# ------------------------------------------------------------------------------------------ arrays in


@attrs.frozen
class Source:
    """A DType as received: the layout of its values, and the array that users get for them."""

    layout: np.dtype[Any]
    dtype: Literal["float32", "int64"]
    own: Callable[[AnyArray], AnyArray]
    """A writable copy, widened to `dtype`."""


def _from_bfloat16(halves: AnyArray) -> AnyArray:
    """A bfloat16 is the upper half of a float32."""
    widened = halves.astype(np.uint32)
    widened <<= 16
    return widened.view(np.float32)


_SOURCES = {
    tables.DTYPE_FLOAT32: Source(FLOAT32, "float32", lambda values: values.astype(OWN_FLOAT32)),
    tables.DTYPE_INT64: Source(INT64, "int64", lambda values: values.astype(OWN_INT64)),
    tables.DTYPE_INT32: Source(INT32, "int64", lambda values: values.astype(OWN_INT64)),
    tables.DTYPE_BFLOAT16: Source(np.dtype("<u2"), "float32", _from_bfloat16),
}


def source_of(plain: Plain) -> Source:
    """How to read the values of a `Tensor` or `BatchedTensor`."""
    number = plain.get("dtype", tables.DTYPE_UNSPECIFIED)
    source = _SOURCES.get(number)
    if source is None:
        raise Fault(f"{number} is no known DType", "dtype")
    return source


def raw_array(plain: Plain, name: str, layout: np.dtype[Any]) -> AnyArray:
    """A read-only view of a `bytes` field as numbers; empty where the field is absent."""
    octets = plain.get(name, b"")
    if len(octets) % layout.itemsize:
        raise Fault(f"{len(octets)} bytes are no whole number of {layout.itemsize}-byte values", name)
    return np.frombuffer(octets, layout)


def checked_shape(sizes: Sequence[int], name: str, most: int = MAX_DIMENSIONS) -> list[int]:
    """A shape as numpy can hold it, also when it has no cells."""
    if len(sizes) > most:
        raise Fault(f"{len(sizes)} dimensions, at most {most} can be held", name)
    if any(size < 0 for size in sizes):
        raise Fault(f"{list(sizes)} has a negative size", name)
    if math.prod(size for size in sizes if size) > MAX_CELLS:
        raise Fault(f"{list(sizes)} is too large", name)
    return list(sizes)


def tensor_of(plain: Plain) -> TensorData:
    """The tensor in a `Tensor` message; one without a shape has one dimension."""
    source = source_of(plain)
    shape = checked_shape(plain["shape"], "shape") if "shape" in plain else None
    if "sparse_csr" in plain:
        try:
            return _sparse_tensor(plain["sparse_csr"], source, shape)
        except Fault as fault:
            raise fault.under("sparse_csr") from None
    values = source.own(raw_array(plain, "dense", source.layout))
    if shape is not None:
        if math.prod(shape) != values.size:
            raise Fault(f"{values.size} values do not fill the shape {shape}", "shape")
        values = values.reshape(shape)
    return TensorData._wrap(values, source.dtype, shape)


def _sparse_tensor(csr: Plain, source: Source, shape: list[int] | None) -> TensorData:
    if shape is None or len(shape) != 2:
        raise Fault(f"a sparse tensor needs its 2-D dense shape, got {shape}")
    values = source.own(raw_array(csr, "values", source.layout))
    crow: Int64Array = raw_array(csr, "crow_indices", INT64).astype(OWN_INT64)
    col: Int64Array = raw_array(csr, "col_indices", INT64).astype(OWN_INT64)
    problem = csr_problem(values.size, shape, crow, col)
    if problem is not None:
        raise Fault(problem)
    return TensorData._wrap(values, source.dtype, shape, crow, col)


# ------------------------------------------------------------------------------------------ batches in


def split_batch(plain: Plain) -> list[TensorData]:
    """The tensors of a `BatchedTensor`, one for each datum."""
    source = source_of(plain)
    # The number of rows comes in front, and takes a dimension.
    trailing = checked_shape(plain.get("trailing_shape", ()), "trailing_shape", MAX_DIMENSIONS - 1)
    flat = raw_array(plain, "data", source.layout)
    bounds = _bounds(raw_array(plain, "offsets", INT64), flat.size, source.layout.itemsize)
    counts = np.diff(bounds)
    row = math.prod(trailing)
    if counts.any() and (row == 0 or bool((counts % row).any())):
        raise Fault(f"the data do not divide into rows of {trailing}", "trailing_shape")
    dtype, wrap = source.dtype, TensorData._wrap
    # All copies first: making small objects in between costs a third more.
    arrays = _own_arrays(flat, bounds.tolist(), source.own)
    if not trailing:
        return [wrap(array, dtype, [array.size]) for array in arrays]
    shapes = [[array.size // row if row else 0, *trailing] for array in arrays]
    return [wrap(array.reshape(shape), dtype, shape) for array, shape in zip(arrays, shapes, strict=True)]


def _own_arrays(flat: AnyArray, edges: list[int], own: Callable[[AnyArray], AnyArray]) -> list[AnyArray]:
    """Copies of the slices between the edges. Small neighbours share a block: one copy in place of many."""
    arrays: list[AnyArray] = []
    first = 0
    while first < len(edges) - 1:
        start = edges[first]
        last = max(first + 1, bisect_right(edges, start + BLOCK_CELLS) - 1)
        block = own(flat[start : edges[last]])
        arrays += [block[left - start : right - start] for left, right in pairwise(edges[first : last + 1])]
        first = last
    return arrays


def _bounds(offsets: Int64Array, size: int, itemsize: int) -> Int64Array:
    """Byte offsets as positions in the array of `size` values, all of them inside and in rising order."""
    if offsets.size == 0:
        if size:
            raise Fault("there are data but no offsets", "offsets")
        return np.zeros(1, dtype=np.int64)
    if offsets[0] < 0 or offsets[-1] > size * itemsize or bool((offsets[1:] < offsets[:-1]).any()):
        raise Fault(f"the offsets must rise within 0 … {size * itemsize}", "offsets")
    if bool((offsets % itemsize).any()):
        raise Fault(f"an offset falls inside a {itemsize}-byte value", "offsets")
    return offsets // itemsize
