"""Chunks and `ModelInput` keep containers, check ids, compare by value and know lengths."""

from __future__ import annotations

import base64
import copy
import pickle
import struct
import tracemalloc
import zlib
from array import array as c_array
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.values import CONTAINERS, for_each, long_lists, refusal

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    Datum,
    DmelChunk,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
)
from tinker_sync.types._arrays import check_tokens, tokens_as_int32


def text(tokens: Any) -> EncodedTextChunk:
    return EncodedTextChunk(tokens=tokens)


SAME_TOKENS: list[Any] = [
    [5, 6],
    (5, 6),
    range(5, 7),
    *[np.array([5, 6], dtype=kind) for kind in ("i4", "i8", "u1", ">i4", "f2", object)],
    np.array([5, 0, 6])[::2],
    np.array(["5", "6"]),
    ["5", 6.0],
    deque([5, 6]),
    memoryview(c_array("i", [5, 6])),
]


# ------------------------------------------------------------------------------------------------ tokens
@pytest.mark.parametrize("tokens", SAME_TOKENS, ids=lambda tokens: type(tokens).__name__)
def test_chunks_compare_by_tokens_not_container(tokens: Any) -> None:
    chunk = text(tokens)
    assert chunk.length == 2
    assert chunk.type == "encoded_text"
    ids = chunk.as_int32()
    assert ids.dtype == np.dtype("<i4")
    assert ids.flags.c_contiguous
    assert ids.tolist() == [5, 6]
    assert chunk.model_dump() == {"tokens": [5, 6], "type": "encoded_text"}
    assert chunk.model_dump_json() == '{"tokens":[5,6],"type":"encoded_text"}'
    prompt = ModelInput.from_ints(tokens)
    assert prompt.to_ints() == [5, 6]
    assert {type(token) for token in prompt.to_ints()} == {int}
    for other in SAME_TOKENS:
        assert chunk == text(other)
        assert hash(chunk) == hash(text(other))
        assert ModelInput.from_ints(other) == prompt
        assert hash(ModelInput.from_ints(other)) == hash(prompt)


@pytest.mark.parametrize("read", [False, True])
def test_a_list_is_packed_and_read_when_asked_for(read: bool) -> None:
    given = [5, 6]
    chunk = text(given)
    given.append(7)
    if read:
        assert chunk.tokens == [5, 6]
        assert chunk.tokens is chunk.tokens
    for copied in (pickle.loads(pickle.dumps(chunk)), copy.deepcopy(chunk), chunk.model_copy()):
        assert copied == chunk
        assert copied.tokens == copied.listed() == [5, 6]
        assert copied.length == 2
    with pytest.raises(AttributeError):
        chunk.logprobs  # noqa: B018


def test_an_array_is_shared_without_lists() -> None:
    ids = np.arange(1_000_000, dtype=np.int32)
    tracemalloc.start()
    try:
        with long_lists() as made:
            prompt = ModelInput.from_ints(ids)
            chunk = prompt.chunks[0]
            assert isinstance(chunk, EncodedTextChunk)
            assert chunk.as_int32() is ids
            message, number, length = repr(prompt), hash(prompt), prompt.length
            same = chunk == text(ids[:])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert made == []
    assert np.shares_memory(chunk.as_int32(), ids)
    assert (message, length, same) == (
        "ModelInput(chunks=[EncodedTextChunk(tokens=[0, 1, 2, … 1000000 items], type='encoded_text')])",
        1_000_000,
        True,
    )
    assert number == hash(ModelInput.from_ints(ids))
    assert peak < 3_000_000  # enough for the booleans of the comparison, and too little for a list


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2.5], "[1]: expected a token id, got 2.5 (float)"),
        ((0, -(2**31) - 1), f"[1]: {-(2**31) - 1} does not fit int32"),
        (range(2**31, 2**31 + 2), f"[0]: {2**31} does not fit int32"),
        (np.array([0.5]), "[0]: expected a whole number, got 0.5"),
        (np.array([[1, 2]]), ": expected a flat sequence of token ids, got shape [1, 2]"),
        ([[1, 2]], "[0]: expected a token id, got [1, 2] (list)"),
        ("hello", ": expected token ids; ModelInput.from_text(text, tokenizer) encodes"),
        (b"ab", ": expected a sequence of token ids, got <2 bytes> (bytes)"),
        ({"input_ids": [1]}, ": expected a sequence of token ids"),
        ({1, 2}, ": expected a sequence of token ids"),
        (7, ": expected a sequence of token ids, got 7 (int)"),
        (None, ": expected a sequence of token ids, got None (NoneType)"),
        (ModelInput.empty(), ": expected a sequence of token ids, got ModelInput("),
    ],
)
def test_bad_tokens_are_refused_with_their_index(tokens: Any, message: str) -> None:
    assert refusal(ModelInput.from_ints, tokens).startswith(f"EncodedTextChunk.tokens{message}")


# ------------------------------------------------------------------------------------------ other chunks
def test_images_have_a_length_if_given() -> None:
    for chunk in (
        ImageChunk(data=b"\x89PNG", format="png", expected_tokens=64),
        ImageAssetPointerChunk(format="jpeg", location="asset://cat", expected_tokens=64),
    ):
        assert chunk.length == 64
        assert hash(chunk) == hash(copy.deepcopy(chunk))
        unknown = chunk.model_copy(update={"expected_tokens": None})
        assert refusal(lambda of: of.length, unknown) == (
            f"{type(chunk).__name__}: the length is not known; set expected_tokens"
        )
        assert unknown != chunk
    assert ImageChunk(data=base64.b64encode(b"raw").decode(), format="png").data == b"raw"
    assert ImageChunk(data=bytearray(b"raw"), format="png").data == b"raw"
    assert "base64" in refusal(ImageChunk, data="not base64!", format="png")
    assert "'png', 'jpeg'" in refusal(ImageChunk, data=b"", format="gif")
    assert refusal(ImageChunk, data=b"", format="png", expected_tokens=1.5).startswith(
        "ImageChunk.expected_tokens"
    )


# ------------------------------------------------------------------------------------------ model inputs
def test_inputs_grow_by_append() -> None:
    empty = ModelInput.empty()
    assert (empty.length, empty.to_ints(), empty.chunks) == (0, [], [])
    one = ModelInput.from_ints([])
    assert (one.length, len(one.chunks)) == (0, 1)
    grown = one.append(text((1, 2))).append_int(3).append_int(np.int64(4))
    assert (grown.length, grown.to_ints(), len(grown.chunks)) == (4, [1, 2, 3, 4], 4)
    assert one.length == 0
    assert ModelInput(chunks=(text([1]),)) == ModelInput.from_ints([1])


def test_a_subclass_is_preserved() -> None:
    class Prompt(ModelInput):
        pass

    grown = Prompt.from_ints([1]).append_int(2)
    assert type(grown) is Prompt
    assert grown.to_ints() == [1, 2]


def test_ids_of_other_chunks_are_refused() -> None:
    mixed = ModelInput(chunks=[text([1]), ImageChunk(data=b"", format="png", expected_tokens=7)])
    assert refusal(mixed.to_ints) == "ModelInput.to_ints: chunks[1] is a ImageChunk, which has no token ids"
    assert mixed.length == 8


def test_chunks_are_models_or_mappings() -> None:
    prompt = ModelInput(
        chunks=[{"type": "encoded_text", "tokens": [1]}, {"tokens": [2]}, {"data": "eA==", "format": "png"}]
    )
    assert prompt.chunks[:2] == [text([1]), text([2])]
    assert prompt.chunks[2] == ImageChunk(data=b"x", format="png")
    assert refusal(ModelInput, chunks=[text([1]), 5]).startswith("ModelInput.chunks[1]: ")
    assert refusal(ModelInput, chunks=[{"type": "video"}]).startswith("ModelInput.chunks[0].type: ")
    assert refusal(ModelInput, chunks=[{"tokens": [0.5]}]).startswith("ModelInput.chunks[0].tokens[0]: ")
    assert refusal(ModelInput, chunks=text([1])) == (
        "ModelInput.chunks: expected a list, got a single EncodedTextChunk; put it into one"
    )
    prompt = ModelInput.from_ints([1])
    for several in ([prompt, prompt], (prompt,)):
        assert refusal(Datum, several) == (
            f"Datum.model_input: expected one ModelInput, got {len(several)} in a {type(several).__name__}; "
            "give one at a time"
        )
    for wrong in ([1, 2], "hello"):
        assert refusal(Datum, wrong).endswith(
            f"got {type(wrong).__name__}; "
            "ModelInput.from_ints(token_ids) or ModelInput.from_text(text, tokenizer) makes one"
        )
    with pytest.raises(TypeError):
        ModelInput(chunk=[])
    with pytest.raises(TypeError):
        EncodedTextChunk(token=[1])


# -------------- Token ids keep their container and convert exactly; a bad one is named by its index
@for_each("container", CONTAINERS)
def test_tokens_are_accepted_in_every_container(container: Any) -> None:
    tokens = tokens_as_int32(container, "x")
    assert (tokens.dtype, tokens.tolist()) == (np.dtype("<i4"), [5, 6])
    assert tokens.flags.c_contiguous


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2.5], "x[1]: expected a token id, got 2.5 (float)"),
        ([1, 2, None], "x[2]: expected a token id, got None (NoneType)"),
        ([float("nan")], "x[0]: expected a token id, got nan (float)"),
        ([0, float("inf")], "x[1]: expected a token id, got inf (float)"),
        (["a"], "x[0]: expected a token id, got 'a' (str)"),
        ([[1, 2]], "x[0]: expected a token id, got [1, 2] (list)"),
        ([0, 2**31], f"x[1]: {2**31} does not fit int32"),
        ([-(2**31) - 1], f"x[0]: {-(2**31) - 1} does not fit int32"),
        ([2**70], f"x[0]: {2**70} does not fit int32"),
        (np.array([0.0, 0.5]), "x[1]: expected a whole number, got 0.5"),
        (np.array([[1, 2]]), "x: expected a flat sequence of token ids, got shape [1, 2]"),
        (np.array(1), "x: expected a flat sequence of token ids, got shape []"),
        (np.array([1, None], dtype=object), "x[1]: expected a token id, got None (NoneType)"),
        (range(2**31 - 1, 2**31 + 1), f"x[1]: {2**31} does not fit int32"),
        (range(0, 2**80, 2**30), f"x[2]: {2**31} does not fit int32"),
        (range(1, -(2**31) - 9, -1), f"x[{2**31 + 2}]: {-(2**31) - 1} does not fit int32"),
        (range(-(2**31), 2**32, 2**31), f"x[2]: {2**31} does not fit int32"),
        (range(-(2**70), 5), f"x[0]: {-(2**70)} does not fit int32"),
    ],
)
def test_bad_tokens_are_named(tokens: Any, message: str) -> None:
    assert refusal(tokens_as_int32, tokens, "x") == message


@given(st.integers(-(2**33), 2**33), st.integers(-(2**33), 2**33), st.integers(-(2**33), 2**33))
def test_ranges_convert_like_lists(start: int, stop: int, step: int) -> None:
    tokens = range(start, stop, step or 1)
    if len(tokens) <= 64:
        outcomes = []
        for container in (tokens, list(tokens)):
            try:
                outcomes.append(tokens_as_int32(container, "x").tolist())
            except InvalidInputError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]


def test_long_ranges_are_checked_without_lists() -> None:
    assert tokens_as_int32(range(10, 0, -3), "x").tolist() == [10, 7, 4, 1]
    assert tokens_as_int32(range(-(2**31), -(2**31) + 2), "x").tolist() == [-(2**31), -(2**31) + 1]
    assert tokens_as_int32(range(2**31 - 1, 2**31 - 3, -1), "x").tolist() == [2**31 - 1, 2**31 - 2]
    assert refusal(tokens_as_int32, range(10**18), "x") == f"x[{2**31}]: {2**31} does not fit int32"


def test_tuples_and_arrays_are_kept_and_lists_copied() -> None:
    for same in ((1, 2), np.arange(3), np.arange(3, dtype=np.uint16)):
        assert check_tokens(same, "x") is same
    given_list = [1, 2]
    kept = check_tokens(given_list, "x")
    assert kept == given_list
    assert kept is not given_list
    assert check_tokens((i for i in (1, 2)), "x") == [1, 2]
    assert check_tokens(deque([1, 2]), "x") == [1, 2]
    assert isinstance(check_tokens(c_array("i", [1, 2]), "x"), np.ndarray)


def test_contiguous_int32_tokens_are_shared() -> None:
    array = np.arange(8, dtype=np.int32)
    assert tokens_as_int32(array, "x") is array
    assert np.shares_memory(tokens_as_int32(array[2:5], "x"), array)
    assert tokens_as_int32(array[::2], "x").flags.c_contiguous
    assert tokens_as_int32(array[::-1], "x").tolist() == list(range(7, -1, -1))


def test_masked_tokens_are_refused_with_their_index() -> None:
    assert "x[1]: is masked" in refusal(tokens_as_int32, np.ma.masked_array([1, 2], mask=[0, 1]), "x")


# ----- Images come from bytes, files and Pillow. Damaged and unknown files are refused, as is damaged audio.
def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress(b"".join(b"\0" * (width + 1) for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + head + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def jpeg(
    width: int, height: int, *, frame: int = 0xC0, before: bytes = b"", end: bytes = b"\xff\xd9"
) -> bytes:
    tables = (
        segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0") + segment(0xC4, b"\0" * 17) + segment(0xDB, b"\0" * 65)
    )
    size = segment(frame, b"\x08" + struct.pack(">HH", height, width) + b"\1\1\x11\0")
    return b"\xff\xd8" + before + tables + size + segment(0xDA, b"\1\1\0\0\x3f\0") + b"\x12\xff\x00\x34" + end


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(3, 2), ("png", (3, 2))),
        (png(1, 70000), ("png", (1, 70000))),
        (jpeg(640, 480), ("jpeg", (640, 480))),
        (jpeg(5, 7, frame=0xC2), ("jpeg", (5, 7))),  # progressive
        (jpeg(5, 7, before=b"\xff\xff\xff\xe1\0\4ab"), ("jpeg", (5, 7))),  # padding before a segment
        (jpeg(65535, 1) + b"trailing", ("jpeg", (65535, 1))),
        (png(3, 2) + b"trailing", ("png", (3, 2))),
    ],
)
def test_format_and_size_come_from_the_header(data: bytes, expected: Any, tmp_path: Path) -> None:
    chunk = ImageChunk.from_bytes(data, expected_tokens=9)
    assert (chunk.format, chunk.size) == expected
    assert (chunk.data, chunk.length) == (data, 9)
    path = tmp_path / "misnamed.gif"
    path.write_bytes(data)
    assert ImageChunk.from_file(path, expected_tokens=9) == chunk
    assert ImageChunk.from_file(str(path)).expected_tokens is None
    assert ImageChunk.from_bytes(memoryview(bytearray(data)), expected_tokens=9) == chunk


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "got nothing"),
        (b"hello", "got something else"),
        (b"GIF89a...", "got GIF"),
        (b"RIFF....WEBP", "got WebP"),
        (b"BM......", "got BMP"),
        (b"II*\0", "got TIFF"),
        (png(0, 5), "0 x 5 pixels"),
        (jpeg(5, 0), "5 x 0 pixels"),
        (png(3, 2)[:-5], "cut short"),
        (png(3, 2)[:20], "cut short"),
        (png(3, 2).replace(b"IHDR", b"IDAT"), "damaged"),
        (jpeg(3, 2, end=b""), "cut short"),
        (jpeg(3, 2)[:30], "cut short"),
        (b"\xff\xd8\xff\xd9", "damaged"),
        (jpeg(3, 2, frame=0xC8), "damaged"),
    ],
)
def test_incomplete_images_are_refused_with_their_path(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ImageChunk.from_bytes(data)
    path = tmp_path / "picture"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match=f"picture: .*{words}"):
        ImageChunk.from_file(path)


class Pillow:
    """A stand-in for an image of Pillow."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def convert(self, mode: str) -> Pillow:
        return Pillow(mode)

    def save(self, file: Any, format: str) -> None:  # noqa: A002
        assert self.mode in {"PNG": ("RGB", "RGBA", "P"), "JPEG": ("RGB", "L")}[format]
        file.write(png(4, 3) if format == "PNG" else jpeg(4, 3))


@pytest.mark.parametrize(
    ("mode", "form"),
    [("RGBA", "png"), ("CMYK", "png"), ("F", "png"), ("RGBA", "jpeg"), ("P", "jpeg"), ("L", "jpeg")],
)
def test_images_of_pillow_are_converted_to_a_mode_of_the_format(mode: str, form: Any) -> None:
    chunk = ImageChunk.from_image(Pillow(mode), format=form, expected_tokens=5)
    assert (chunk.format, chunk.size, chunk.length) == (form, (4, 3), 5)


def test_other_objects_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"image: .*str"):
        ImageChunk.from_image("cat.png")
    with pytest.raises(InvalidInputError, match=r"format: .*'gif'"):
        ImageChunk.from_image(Pillow("RGB"), format="gif")  # type: ignore[arg-type]


def test_the_size_of_a_damaged_chunk_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"ImageChunk\.data: .*PNG"):
        ImageChunk(data=b"...", format="png").size  # noqa: B018  # the access is the test


# ------------------------------------------------------------------------------------------------ audio
@pytest.mark.parametrize(
    ("dmel", "length"),
    [
        (bytes([0, 1, 12]), 12),
        (bytes([7, 2, 3, 80]), 3),
        (bytes([254, 0, 1, 5]), 5),
        (bytes([0, 1, 0]), 0),
        (bytes([0, 1, 0x80, 0x01]), 128),
        (bytes([0, 1, *[0xFF] * 8, 0x7F]), 2**63 - 1),
        (bytes([0, 1, 12]) + b"payload", 12),
        (bytes([0, 1, 0x85, *[0x80] * 8, 0x00]), 5),
    ],
)
def test_the_header_of_audio_gives_its_length(dmel: bytes, length: int) -> None:
    chunk = DmelChunk(dmel=dmel)
    assert chunk.length == length
    assert DmelChunk(dmel=base64.b64encode(dmel).decode()) == chunk
    assert ModelInput(chunks=[chunk]).append_int(1).length == length + 1


@pytest.mark.parametrize(
    "dmel",
    [
        b"",
        bytes([0]),
        bytes([0, 1]),
        bytes([0, 0]),
        bytes([0, 2, 3]),
        bytes([8, 1, 12]),
        bytes([255, 1, 12]),
        bytes([254]),
        bytes([254, 254, 1, 12]),
        bytes([0, 1, 0x80]),
        bytes([0, 1, *[0xFF] * 9, 0x01]),
        bytes([0, 1, *[0x80] * 9, 0x01, 0x00]),
        bytes([0, 1, 0x85, *[0x80] * 9, 0x00]),
        bytes([0, 1, *[0x80] * 30]),
        bytes([0, *[0xFF] * 8, 0x7F]),
    ],
    ids=lambda dmel: dmel.hex(),
)
def test_a_damaged_header_of_audio_is_refused(dmel: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"^DmelChunk\.dmel: "):
        DmelChunk(dmel=dmel).length  # noqa: B018  # the access is the test
