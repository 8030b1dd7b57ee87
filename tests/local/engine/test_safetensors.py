"""The safetensors format keeps every bit and refuses damaged content."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync.local.engine.model import read_safetensors
from tinker_sync.local.engine.safetensors import pieces, read

DTYPES = ["?", "u1", "i1", "u2", "i2", "f2", "u4", "i4", "f4", "u8", "i8", "f8"]


def written(arrays: dict[str, Any], metadata: dict[str, str] | None = None) -> bytearray:
    return bytearray(b"".join(pieces(arrays, metadata)))


def header_of(content: bytes | bytearray) -> dict[str, Any]:
    (size,) = struct.unpack_from("<Q", content)
    tree: dict[str, Any] = json.loads(content[8 : 8 + size])
    return tree


@st.composite
def some_arrays(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.text(min_size=1, max_size=5).filter(_encodes), unique=True, max_size=4))
    made = {}
    for name in names:
        dtype = np.dtype(draw(st.sampled_from(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        size = int(np.prod(shape)) * dtype.itemsize
        content = draw(st.binary(min_size=size, max_size=size))
        made[name] = (
            np.frombuffer(content, "u1").view(dtype).reshape(shape) if size else np.empty(shape, dtype)
        )
        if dtype.kind == "b":
            made[name] = made[name].view("u1").__gt__(127) if size else made[name]
    return made


def _encodes(name: str) -> bool:
    return name != "__metadata__" and not any("\ud800" <= character <= "\udfff" for character in name)


@given(some_arrays())
def test_arrays_keep_every_bit(arrays: dict[str, Any]) -> None:
    back = read(written(arrays))
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()


def test_non_contiguous_arrays_are_written_in_order() -> None:
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    odd = {"columns": base[:, ::2], "turned": base.T, "back": base[::-1], "big": base.astype(">f4")}
    back = read(written(odd))
    for name, array in odd.items():
        np.testing.assert_array_equal(back[name], array)
        assert back[name].dtype == np.dtype("<f4")


def test_arrays_are_aligned_and_equal_content_gives_equal_bytes() -> None:
    arrays = {
        "b": np.zeros(3, "i1"),
        "a": np.zeros(1, "f8"),
        "c": np.zeros((), "f4"),
        "longer name": np.zeros(2),
    }
    content = written(arrays, {"format": "pt"})
    assert content == written(dict(reversed(arrays.items())), {"format": "pt"})
    header = header_of(content)
    assert header.pop("__metadata__") == {"format": "pt"}
    (size,) = struct.unpack_from("<Q", content)
    assert size % 8 == 0
    for name, entry in header.items():
        assert entry["data_offsets"][0] % arrays[name].dtype.itemsize == 0
    ends = sorted(entry["data_offsets"] for entry in header.values())
    assert ends[0][0] == 0  # without gaps
    assert all(one[1] == two[0] for one, two in pairwise(ends))


def test_writing_does_not_copy_arrays() -> None:
    array = np.zeros(1000, np.float32)
    *_, piece = pieces({"a": array})
    assert np.shares_memory(np.frombuffer(piece, np.float32), array)


def test_arrays_read_from_a_bytearray_are_writable() -> None:
    back = read(written({"a": np.zeros(3)}))
    back["a"] += 1
    assert back["a"].tolist() == [1, 1, 1]


def test_the_engine_reads_the_file(tmp_path: Path) -> None:
    array = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    (tmp_path / "x.safetensors").write_bytes(written({"a.weight": array}, {"format": "pt"}))
    np.testing.assert_array_equal(read_safetensors(tmp_path / "x.safetensors")["a.weight"], array)


def test_the_safetensors_library_agrees(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    arrays = {"a": np.arange(6, dtype=np.int16).reshape(2, 3), "b": np.float32([1.5, float("nan")])}
    arrays["flags"], arrays["none"] = np.array([True, False]), np.zeros((0, 3), np.float16)
    theirs = library.load(bytes(written(arrays, {"format": "pt"})))
    ours = read(library.save(arrays))
    for name, array in arrays.items():
        for back in (theirs[name], ours[name]):
            assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize(
    "array", [np.zeros(2, "c8"), np.array(["a"]), np.array([object()]), np.zeros(1, "M8[s]")]
)
def test_types_that_the_format_lacks_are_refused(array: Any) -> None:
    with pytest.raises(ValueError, match="x: cannot be written"):
        written({"x": array})


def test_the_metadata_key_is_refused_as_a_name() -> None:
    with pytest.raises(ValueError, match="__metadata__"):
        written({"__metadata__": np.zeros(1)})


@given(st.data())
def test_damage_raises_value_error_or_changes_numbers_only(data: st.DataObject) -> None:
    content = written({"a": np.arange(4, dtype=np.int32), "b": np.ones((2, 2))})
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(content)))
    content = content[:cut] if data.draw(st.booleans()) else content
    with suppress(ValueError):
        read(content)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (
            {"a": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}},
            "holds F8_E4M3, which is not one of",
        ),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "4 bytes for shape"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}, "impossible"),
        ({"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, "beyond the end"),
        ({"a": {"dtype": "F32", "shape": [1]}}, "damaged"),
        ({"a": 3}, "damaged"),
        ([], "damaged"),
    ],
)
def test_the_error_names_the_fault_in_the_header(header: Any, words: str) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(ValueError, match=words):
        read(struct.pack("<Q", len(text)) + text + bytes(16))
