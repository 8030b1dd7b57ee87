"""Token ids keep their container and convert exactly; a bad one is named by its index."""

from __future__ import annotations

from array import array as c_array
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arrays import CONTAINERS
from support.each import for_each
from support.refusals import refusal

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import check_tokens, tokens_as_int32


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
