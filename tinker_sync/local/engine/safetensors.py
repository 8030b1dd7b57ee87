"""The safetensors file format: eight bytes with the size of the header, a header in JSON, the numbers.

Arrays keep their bits and their type; types that the format lacks are refused. The file orders arrays by item
size, the largest first, then by name. This aligns every array and gives equal bytes for equal content. BF16,
which NumPy lacks, is read as float32. Pure functions.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

_CODES: Final = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "float16": "F16",
    "uint32": "U32",
    "int32": "I32",
    "float32": "F32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
}
_DTYPES: Final = {code: np.dtype(name).newbyteorder("<") for name, code in _CODES.items()}
_HEADER_LIMIT_BYTES: Final = 100_000_000
"""The limit in the format's specification."""


def pieces(
    arrays: Mapping[str, Array], metadata: Mapping[str, str] | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the content of a file in pieces, without copying contiguous arrays.

    Raises:
        ValueError: an array has a type that the format lacks, or a reserved name.

    >>> content = b"".join(pieces({"a": np.arange(3, dtype=np.int16)}))
    >>> read(content)["a"]
    array([0, 1, 2], dtype=int16)
    """
    ordered = sorted(arrays.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, array in ordered:
        if name == "__metadata__" or array.dtype.name not in _CODES:
            raise ValueError(f"{name}: cannot be written, its type is {array.dtype}")
        header[name] = {
            "dtype": _CODES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for _, array in ordered:
        if array.size:  # an empty memoryview cannot be cast
            little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
            yield little.reshape(-1).view(np.uint8).data


def read(content: bytes | bytearray | memoryview) -> dict[str, Array]:
    """Return the arrays of a file: views of `content`, writable if `content` is, except for BF16.

    Raises:
        ValueError: the content is damaged, or holds an unknown type.
    """
    try:
        return _arrays(memoryview(content))
    except (KeyError, TypeError, AttributeError, struct.error, RecursionError) as problem:
        raise ValueError(f"the header is damaged ({problem!r})") from problem


def _arrays(content: memoryview) -> dict[str, Array]:
    (size,) = struct.unpack_from("<Q", content)
    if size > min(_HEADER_LIMIT_BYTES, len(content) - 8):
        raise ValueError(f"the header claims {size} bytes")
    header = json.loads(bytes(content[8 : 8 + size]).decode("utf-8"))
    header.pop("__metadata__", None)
    numbers = content[8 + size :]
    return {name: _array(numbers, name, entry) for name, entry in header.items()}


def _array(numbers: memoryview, name: str, entry: Mapping[str, Any]) -> Array:
    start, end = entry["data_offsets"]
    code = entry["dtype"]
    dtype = _DTYPES.get("U16" if code == "BF16" else code)
    if dtype is None:
        raise ValueError(f"{name} holds {code}, which is not one of BF16, {', '.join(_DTYPES)}")
    shape = tuple(entry["shape"])
    if not all(isinstance(size, int) and size >= 0 for size in (*shape, start, end)):
        raise ValueError(f"{name} has an impossible shape or position")
    count = math.prod(shape)
    if end - start != count * dtype.itemsize or end > len(numbers):
        raise ValueError(f"{name} has {end - start} bytes for shape {shape}, or lies beyond the end")
    flat = np.frombuffer(numbers, dtype=dtype, count=count, offset=start) if count else np.empty(0, dtype)
    if code == "BF16":  # the upper 16 bits of a float32
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    return flat.reshape(shape)
