"""Conversion between numpy arrays and `bytes` fields. Importing this module imports numpy.

Outgoing arrays are not copied unless they are non-contiguous or have another dtype than the wire.

Incoming arrays are writable, aligned, in this machine's byte order, and do not overlap. The arrays of an
answer may use the memory in which the answer was received (`find_shared`). Each of them then keeps that
memory alive, `MOST_SHARED_BYTES` at most. Other arrays are copied. Small neighbours of a batch share a block
of at most `BLOCK_CELLS` values, and each of them keeps the block alive; a larger array is copied alone. Any
thread may use this module.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import attrs

from tinker_sync._base.numpy import np
from tinker_sync.types.tensor_data import TensorData, csr_problem
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import FieldFault, varint

if TYPE_CHECKING:
    from tinker_sync._base.numpy import AnyArray, Int64Array
    from tinker_sync.wire.proto.codec import Plain

INT32 = np.dtype("<i4")
INT64 = np.dtype("<i8")
FLOAT32 = np.dtype("<f4")

# The dtypes of users' arrays. As dtype objects, not classes, they halve the cost of a small copy.
OWN_INT32 = np.dtype(np.int32)
OWN_INT64 = np.dtype(np.int64)
OWN_FLOAT32 = np.dtype(np.float32)

WIRE_DTYPES: dict[str, tuple[int, np.dtype[Any]]] = {
    "float32": (tables.DTYPE_FLOAT32, FLOAT32),
    "int64": (tables.DTYPE_INT64, INT64),
}
"""The dtypes that can be sent, by name: the number in the protocol, and the memory layout of the values."""
LAYOUTS = {name: layout for name, (_, layout) in WIRE_DTYPES.items()}

BLOCK_CELLS = 16_384
"""The most values in a block that small arrays share and may keep alive.

They are 64 KiB of float32, or 128 KiB of int64.
"""

MOST_SHARED_BYTES = 16 * 1024 * 1024
"""The largest message whose memory its arrays share, and so the most that one array keeps alive."""

MAX_DIMENSIONS = 32
"""The most dimensions of an array in all supported numpy versions."""
MAX_CELLS = 2**59
"""The bound on the product of nonzero sizes, also for empty arrays; numpy counts bytes in 63 bits."""


# ------------------------------------------------------------------------------------------ arrays out


def wire_values(array: AnyArray, dtype: np.dtype[Any]) -> AnyArray:
    """Return an array as the little-endian `dtype`, in row-major order, without a copy if possible."""
    if array.dtype is dtype and array.flags.c_contiguous:
        return array  # the usual case
    return np.ascontiguousarray(array, dtype=dtype)


def payload(array: AnyArray, dtype: np.dtype[Any]) -> memoryview:
    """Return the array's values as bytes of the little-endian `dtype`, row-major; a view if possible.

    >>> payload(np.arange(2), INT32).tobytes().hex()
    '0000000001000000'
    """
    return wire_values(array, dtype).reshape(-1).view(np.uint8).data


def find_wire_dtype(tensor: TensorData) -> tuple[int, np.dtype[Any]]:
    """Return the number of a tensor's dtype in the protocol, and the memory layout of its values.

    Raises:
        FieldFault: the dtype cannot be sent.
    """
    known = WIRE_DTYPES.get(tensor.dtype)
    if known is None:
        raise FieldFault(f"expected 'float32' or 'int64', got {tensor.dtype!r}", "dtype")
    return known


def tensor_to_plain(tensor: TensorData) -> Plain:
    """Convert a tensor to the dict of a `Tensor` message.

    A shape of None is left out; a sparse tensor stays sparse.
    """
    dtype, layout = find_wire_dtype(tensor)
    values = payload(tensor._numpy, layout)
    plain: Plain = {"dtype": dtype, "shape": tensor.shape}
    if not tensor.is_sparse:
        return {**plain, "dense": values}
    if tensor._crow is None or tensor._col is None:
        raise FieldFault("row pointers and column indices go together; one is missing", "sparse_csr")
    crow, col = payload(tensor._crow, INT64), payload(tensor._col, INT64)
    return {**plain, "sparse_csr": {"values": values, "crow_indices": crow, "col_indices": col}}


# ------------------------------------------------------------------------------------------ arrays in


@attrs.frozen
class ReceivedDtype:
    """A dtype in which a server may send values: their memory layout, and their conversion for users."""

    layout: np.dtype[Any]
    dtype: Literal["float32", "int64"]
    own: Callable[[AnyArray], AnyArray]
    """Copy values to a writable array, widened to `dtype`."""


def _from_bfloat16(halves: AnyArray) -> AnyArray:
    """Return bfloat16 values as float32. A bfloat16 value is the upper half of a float32 value."""
    widened = halves.astype(np.uint32)
    widened <<= 16
    return widened.view(np.float32)


_RECEIVED_DTYPES = {
    tables.DTYPE_FLOAT32: ReceivedDtype(FLOAT32, "float32", lambda values: values.astype(OWN_FLOAT32)),
    tables.DTYPE_INT64: ReceivedDtype(INT64, "int64", lambda values: values.astype(OWN_INT64)),
    tables.DTYPE_INT32: ReceivedDtype(INT32, "int64", lambda values: values.astype(OWN_INT64)),
    tables.DTYPE_BFLOAT16: ReceivedDtype(np.dtype("<u2"), "float32", _from_bfloat16),
}


def find_dtype(plain: Plain) -> ReceivedDtype:
    """Return the dtype that a `Tensor` or `BatchedTensor` message states, or raise `FieldFault`."""
    number = plain.get("dtype", tables.DTYPE_UNSPECIFIED)
    received = _RECEIVED_DTYPES.get(number)
    if received is None:
        raise FieldFault(f"{number} is not a known DType", "dtype")
    return received


def view_array(plain: Plain, name: str, layout: np.dtype[Any]) -> AnyArray:
    """Return a view of a `bytes` field as numbers; empty if the field is absent.

    The view can be written if the message is a `bytearray`. Bytes that end within a number are refused.
    """
    octets = plain.get(name, b"")
    if len(octets) % layout.itemsize:
        raise FieldFault(f"{len(octets)} bytes are not a whole number of {layout.itemsize}-byte values", name)
    return np.frombuffer(octets, layout)


def check_shape(sizes: Sequence[int], name: str, most: int = MAX_DIMENSIONS) -> list[int]:
    """Return the sizes as a shape, or raise `FieldFault` if numpy cannot represent it.

    The check of the number of values leaves out sizes of 0, so that the other sizes are still bounded.
    """
    if not sizes:
        return []
    if len(sizes) > most:
        raise FieldFault(f"{len(sizes)} dimensions, at most {most} can be held", name)
    if any(size < 0 for size in sizes):
        raise FieldFault(f"{list(sizes)} has a negative size", name)
    if math.prod(size for size in sizes if size) > MAX_CELLS:
        raise FieldFault(f"{list(sizes)} is too large", name)
    return list(sizes)


def read_tensor(plain: Plain) -> TensorData:
    """Return the tensor of a `Tensor` message, with copied values. Without a shape it has one dimension.

    Raises:
        FieldFault: the dtype is not known, or the values do not fit the shape or the sparse indices.
    """
    received = find_dtype(plain)
    shape = check_shape(plain["shape"], "shape") if "shape" in plain else None
    if "sparse_csr" in plain:
        try:
            return _sparse_tensor(plain["sparse_csr"], received, shape)
        except FieldFault as fault:
            raise fault.under("sparse_csr") from None
    values = received.own(view_array(plain, "dense", received.layout))
    if shape is not None:
        if math.prod(shape) != values.size:
            raise FieldFault(f"{values.size} values do not fill the shape {shape}", "shape")
        values = values.reshape(shape)
    return TensorData._wrap(values, received.dtype, shape)


def _sparse_tensor(csr: Plain, received: ReceivedDtype, shape: list[int] | None) -> TensorData:
    if shape is None or len(shape) != 2:
        raise FieldFault(f"a sparse tensor needs its 2-D dense shape, got {shape}")
    values = received.own(view_array(csr, "values", received.layout))
    crow: Int64Array = view_array(csr, "crow_indices", INT64).astype(OWN_INT64)
    col: Int64Array = view_array(csr, "col_indices", INT64).astype(OWN_INT64)
    problem = csr_problem(values.size, shape, crow, col)
    if problem is not None:
        raise FieldFault(problem)
    return TensorData._wrap(values, received.dtype, shape, crow, col)


# ------------------------------------------------------------------------------------------ batches in


def find_shared(data: bytearray, payload_bytes: int) -> memoryview | None:
    """Return the memory of a message if its decoded arrays may use this memory, else None.

    They may if the arrays, `payload_bytes` in all, are more than half of the message, and the message has at
    most `MOST_SHARED_BYTES`.
    """
    return memoryview(data) if payload_bytes * 2 > len(data) <= MOST_SHARED_BYTES else None


def split_batch(plain: Plain, shared: memoryview | None = None) -> list[TensorData]:
    """Return the tensors of a `BatchedTensor`, one for each datum.

    Args:
        plain: the message.
        shared: the memory that the tensors may use; see `find_shared`.

    Raises:
        FieldFault: the dtype is not known, or the offsets or the shape do not fit the data.
    """
    received = find_dtype(plain)
    # The number of rows adds a dimension in front.
    trailing = check_shape(plain.get("trailing_shape", ()), "trailing_shape", MAX_DIMENSIONS - 1)
    flat = view_array(plain, "data", received.layout)
    edges = _find_edges(view_array(plain, "offsets", INT64), flat.size, received.layout.itemsize)
    row = math.prod(trailing)
    if row != 1 and any((right - left) % row if row else right > left for left, right in pairwise(edges)):
        raise FieldFault(f"the data do not divide into rows of {trailing}", "trailing_shape")
    dtype, wrap = received.dtype, TensorData._wrap
    # Copy everything first: creating small objects in between takes a third longer.
    kept = None if shared is None else _keep(flat, shared)
    if kept is None:
        arrays = _copy_slices(flat, edges, received.own)
    else:
        arrays = [kept[left:right] for left, right in pairwise(edges)]
    if not trailing:
        return [wrap(array, dtype, [array.size]) for array in arrays]
    shapes = [[array.size // row if row else 0, *trailing] for array in arrays]
    return [wrap(array.reshape(shape), dtype, shape) for array, shape in zip(arrays, shapes, strict=True)]


def _keep(values: AnyArray, shared: memoryview) -> AnyArray | None:
    """Return the values of a field as an array in `shared`, the message's memory; None if they need a copy.

    Values that are not aligned are moved back by a few bytes, over the field's encoded length, which is in
    front of them and no longer needed.
    """
    if values.dtype not in (OWN_FLOAT32, OWN_INT64):
        return None
    address, size = _address(values), values.nbytes
    shift = address % values.itemsize
    if shift > len(varint(size)):
        return None
    if shift:
        start = address - _address(np.frombuffer(shared, np.uint8))
        shared[start - shift : start - shift + size] = shared[start : start + size]
        return np.frombuffer(shared, values.dtype, values.size, start - shift)
    return values


def _address(array: AnyArray) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _copy_slices(flat: AnyArray, edges: list[int], own: Callable[[AnyArray], AnyArray]) -> list[AnyArray]:
    """Return a copy, made by `own`, of each slice between two edges.

    Small neighbours are copied together, as one block.
    """
    arrays: list[AnyArray] = []
    first = 0
    while first < len(edges) - 1:
        start = edges[first]
        last = max(first + 1, bisect_right(edges, start + BLOCK_CELLS) - 1)
        block = own(flat[start : edges[last]])
        arrays += [block[left - start : right - start] for left, right in pairwise(edges[first : last + 1])]
        first = last
    return arrays


def _find_edges(offsets: Int64Array, size: int, itemsize: int) -> list[int]:
    """Convert byte offsets to positions in an array of `size` values; check range and order."""
    edges: list[int] = offsets.tolist()
    if not edges:
        if size:
            raise FieldFault("there are data but no offsets", "offsets")
        return [0]
    if edges[0] < 0 or edges[-1] > size * itemsize or edges != sorted(edges):
        raise FieldFault(f"the offsets must rise within 0 … {size * itemsize}", "offsets")
    if int(np.bitwise_or.reduce(offsets)) % itemsize:  # sizes of values are powers of two
        raise FieldFault(f"an offset falls inside a {itemsize}-byte value", "offsets")
    return [edge // itemsize for edge in edges]
