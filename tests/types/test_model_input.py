"""Chunks and `ModelInput` keep containers, check ids, compare by value and know lengths."""

from __future__ import annotations

import base64
import copy
import json
import pickle
import tracemalloc
from array import array as c_array
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.listing import long_lists
from support.refusals import refusal

from tinker_sync.types import (
    Datum,
    EncodedTextChunk,
    ImageAssetPointerChunk,
    ImageChunk,
    ModelInput,
)


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


def test_an_iterator_is_consumed_once() -> None:
    assert text(i for i in (5, 6)).tokens == [5, 6]
    assert text(map(int, "56")).length == 2


@pytest.mark.parametrize(
    "tokens",
    [(5, 6), *[np.array([5, 6], dtype=kind) for kind in ("i4", "i8", "u2", ">i8")]],
    ids=repr,
)
def test_tuples_and_arrays_of_integers_are_kept(tokens: Any) -> None:
    assert text(tokens).tokens is tokens


def test_a_range_becomes_a_list() -> None:
    tokens = ModelInput.from_ints(range(5, 7)).chunks[0].tokens
    assert (type(tokens), tokens) == (list, [5, 6])
    assert json.dumps(text(range(5, 7)).tokens) == "[5, 6]"


def test_a_list_is_copied() -> None:
    conversation = [1, 2]
    prompt = ModelInput.from_ints(conversation)
    before = hash(prompt)
    conversation.append(2**40)
    assert prompt.to_ints() == [1, 2]
    assert hash(prompt) == before
    assert isinstance(prompt.chunks[0].tokens, list)


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


@pytest.mark.parametrize(
    ("tokens", "kept"), [([True, np.int8(2)], [1, 2]), (("3", 4.0), (3, 4)), (deque([1]), [1])]
)
def test_equivalent_values_are_kept_as_ids(tokens: Any, kept: Any) -> None:
    found = text(tokens).tokens
    assert found == kept
    assert type(found) is type(kept)
    assert {type(token) for token in found} == {int}


@pytest.mark.parametrize("ids", [[1, 2, 3], range(100)], ids=len)
def test_an_array_is_shown_as_the_ids_that_it_holds(ids: Any) -> None:
    listed, held = ModelInput.from_ints(list(ids)), ModelInput.from_ints(np.array(ids))
    assert repr(held) == repr(listed)


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


@given(st.lists(st.integers(-(2**31) - 2, 2**31 + 1), max_size=5), st.sampled_from([list, tuple, np.array]))
def test_ids_must_fit_int32(tokens: list[int], container: Any) -> None:
    bad = [index for index, token in enumerate(tokens) if not -(2**31) <= token < 2**31]
    if bad:
        assert refusal(text, container(tokens)).startswith(f"EncodedTextChunk.tokens[{bad[0]}]: ")
    else:
        assert text(container(tokens)).as_int32().tolist() == tokens


def test_empty_text_is_accepted() -> None:
    for nothing in ([], (), range(0), np.array([], dtype=np.int64), np.array([]), iter(())):
        assert text(nothing).length == 0
        assert text(nothing).as_int32().dtype == np.int32
        assert text(nothing) == text([])


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


def test_the_list_of_chunks_is_copied() -> None:
    chunks = [text([1])]
    prompt = ModelInput(chunks=chunks)
    chunks.append(text([2]))
    assert prompt.length == 1


def test_ids_of_other_chunks_are_refused() -> None:
    mixed = ModelInput(chunks=[text([1]), ImageChunk(data=b"", format="png", expected_tokens=7)])
    assert refusal(mixed.to_ints) == "ModelInput.to_ints: chunks[1] is a ImageChunk, which has no token ids"
    assert mixed.length == 8


def test_the_known_length_is_that_of_text() -> None:
    assert ModelInput(chunks=[text([1]), text(range(5))]).known_length() == 6
    image = ImageChunk(data=b"", format="png", expected_tokens=7)
    assert ModelInput(chunks=[text([1]), image]).known_length() is None


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


def test_a_dump_becomes_the_same_input() -> None:
    for tokens in SAME_TOKENS:
        prompt = ModelInput.from_ints(tokens)
        for twin in (ModelInput.model_validate(prompt.model_dump()), pickle.loads(pickle.dumps(prompt))):
            assert (twin, hash(twin)) == (prompt, hash(prompt))


def test_reprs_stay_one_short_line() -> None:
    long = ModelInput(
        chunks=[text(list(range(10**5))), text(range(10**6)), ImageChunk(data=b"x" * 10**6, format="png")]
    )
    assert repr(long) == (
        "ModelInput(chunks=[EncodedTextChunk(tokens=[0, 1, 2, … 100000 items], type='encoded_text'), "
        "EncodedTextChunk(tokens=[0, 1, 2, … 1000000 items], type='encoded_text'), "
        "ImageChunk(data=<1000000 bytes>, format='png', expected_tokens=None, type='image')])"
    )
    assert len(repr(ModelInput(chunks=[text([1])] * 1000))) < 300
