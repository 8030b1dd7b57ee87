"""Conversions to arrays are exact, avoid copies, and name the index of a bad value."""

from __future__ import annotations

import decimal
import fractions
import sys
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.values import FLOATS, INTS, refusal

from tinker_sync.types._arrays import (
    ByValue,
    is_torch,
    plain_array,
    quick_hash,
    same_values,
    wire_array,
)

# ------------------------------------------------------------------------------------------- containers


@pytest.mark.parametrize("dtype", INTS)
def test_integers_become_int64_by_default(dtype: Any) -> None:
    high = min(np.iinfo(dtype).max, 2**63 - 1)
    low = np.iinfo(dtype).min
    array = wire_array(np.array([low, 0, high], dtype=dtype), "x")
    assert array.dtype == np.int64
    assert array.tolist() == [low, 0, high]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_become_float32_by_default(dtype: Any) -> None:
    array = wire_array(np.array([-1.5, np.nan, np.inf], dtype=dtype), "x")
    assert array.dtype == np.float32
    assert np.array_equal(array, np.array([-1.5, np.nan, np.inf], dtype=np.float32), equal_nan=True)


@pytest.mark.parametrize("dtype", ["int64", "float32", None])
@pytest.mark.parametrize("empty", [[], (), range(0), deque(), np.empty(0), np.empty(0, dtype=object)])
def test_empty_values_become_empty_arrays(empty: Any, dtype: Any) -> None:
    array = wire_array(empty, "x", dtype)
    assert array.shape == (0,)
    assert array.dtype == (dtype or "float32")


def test_shapes_are_kept() -> None:
    assert wire_array(np.array(3), "x").shape == ()
    assert wire_array(3, "x").shape == ()
    assert wire_array(np.float32(0.5), "x").shape == ()
    assert wire_array([[1, 2], [3, 4], [5, 6]], "x", "float32").shape == (3, 2)
    assert wire_array([[], []], "x").shape == (2, 0)
    assert wire_array(np.empty((0, 3), dtype=object), "x").shape == (0, 3)
    assert wire_array([["1", 2], [None, 4]], "x", "float32").shape == (2, 2)
    assert wire_array([np.array([1, 2]), np.array([3, 4])], "x").tolist() == [[1, 2], [3, 4]]


def test_none_becomes_nan() -> None:
    array = wire_array([None, -0.5], "x", "float32")
    assert np.isnan(array[0])
    assert array[1] == -0.5
    assert refusal(wire_array, [1, None], "x", "int64") == (
        "x[1]: expected a whole number within 64 bits, got None (NoneType)"
    )


@pytest.mark.parametrize(
    "value", ["12", b"12", {"a": 1}, {1, 2}, None, object(), (i for i in [1]), {1: 2}.keys(), 1j]
)
def test_values_without_numbers_raise_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"^x: expected a list, "):
        wire_array(value, "x")


@pytest.mark.parametrize(
    "array",
    [
        np.array([1 + 0j]),
        np.array(["2026-01-31"], dtype="datetime64[D]"),
        np.array([1], dtype="timedelta64[s]"),
        np.zeros(2, dtype=[("a", "i4")]),
        np.zeros(2, dtype="V4"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_other_types_are_refused(array: np.ndarray) -> None:
    assert refusal(wire_array, array, "x", "int64") == f"x: expected numbers, got an array of {array.dtype}"


def test_extension_dtypes_are_widened() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    wide = wire_array(np.array([1.5, -3.0], dtype=ml_dtypes.bfloat16), "x")
    assert wide.dtype == np.float32
    assert wide.tolist() == [1.5, -3.0]
    assert wire_array(np.array([7, -8], dtype=ml_dtypes.int4), "x").dtype == np.int64


# --------------------------------------------------------------------------------------- nothing is copied
@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_arrays_of_the_wire_dtype_are_shared(dtype: Any, tmp_path: Path) -> None:
    array = np.arange(12, dtype=dtype)
    readonly = array.copy()
    readonly.flags.writeable = False
    mapped = np.memmap(tmp_path / "numbers", dtype=dtype, mode="w+", shape=12)
    views = [array, array.reshape(3, 4), array[::2], array[::-1], array.reshape(3, 4).T, array[3:4], readonly]
    for view in [*views, mapped, array.view(np.recarray)]:
        kept = wire_array(view, "x", dtype)
        assert type(kept) is np.ndarray
        assert kept.shape == view.shape
        assert np.shares_memory(kept, view)
    assert wire_array(array, "x") is array


def test_subclasses_become_plain_arrays_without_copies() -> None:
    matrix = np.arange(4).view(np.matrix)
    kept = plain_array(matrix, "x")
    assert type(kept) is np.ndarray
    assert kept.shape == (1, 4)
    assert np.shares_memory(kept, matrix)


def test_masked_cells_are_refused_with_their_index() -> None:
    whole = np.ma.masked_array([[1, 2], [3, 4]], mask=False)
    assert wire_array(whole, "x").tolist() == [[1, 2], [3, 4]]
    holed = np.ma.masked_array([[1, 2], [3, 4]], mask=[[0, 0], [1, 0]])
    assert (
        refusal(wire_array, holed, "x") == "x[1][0]: is masked; call .filled(...) to choose the value to send"
    )


# ------------------------------------------------------------------------------------- nothing is changed
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 2.5], "x[1]: expected a whole number, got 2.5"),
        ([1, float("nan")], "x[1]: expected a whole number, got nan"),
        ([1, float("-inf")], "x[1]: expected a whole number within 64 bits, got -inf (float)"),
        ([[0, 1], [2, 3.5]], "x[1][1]: expected a whole number, got 3.5"),
        (np.array(0.5), "x: expected a whole number, got 0.5"),
        (np.array([[1, 2], [np.nan, 4]], dtype=np.float16), "x[1][0]: expected a whole number, got nan"),
        (np.array([1, 2**63], dtype=np.uint64), f"x[1]: {2**63} does not fit int64"),
        (np.array([0.0, 2.0**63]), f"x[1]: {2.0**63} does not fit int64"),
        (np.array([0.0, -(2.0**64)]), f"x[1]: {-(2.0**64)} does not fit int64"),
        (np.array([np.float32(2**63)]), f"x[0]: {2.0**63} does not fit int64"),
        ([2**63], f"x[0]: {2**63} does not fit int64"),
        ([5, -(2**63) - 1], f"x[1]: expected a whole number within 64 bits, got {-(2**63) - 1} (int)"),
        ([10**5000], "x[0]: expected a whole number within 64 bits, got <a number of 16610 bits> (int)"),
        (["1", "1.5"], "x[1]: expected a whole number within 64 bits, got '1.5' (str)"),
        (["one"], "x[0]: expected a whole number within 64 bits, got 'one' (str)"),
        ([[1], ["one"]], "x[1][0]: expected a whole number within 64 bits, got 'one' (str)"),
        ([1, {}], "x[1]: expected a whole number within 64 bits, got {} (dict)"),
        ([1 + 0j], "x[0]: expected a whole number within 64 bits, got (1+0j) (complex)"),
        (
            [decimal.Decimal("1.5")],
            "x[0]: expected a whole number within 64 bits, got Decimal('1.5') (Decimal)",
        ),
    ],
)
def test_values_beyond_int64_are_refused_with_their_index(value: Any, message: str) -> None:
    assert refusal(wire_array, value, "x", "int64") == message


@pytest.mark.skipif(np.finfo(np.longdouble).max <= np.finfo(float).max, reason="no wider float here")
def test_longdouble_is_checked() -> None:
    array = np.array([1, np.finfo(np.longdouble).max], dtype=np.longdouble)
    assert refusal(wire_array, array, "x").startswith("x[1]: ")
    assert refusal(wire_array, np.array([2.0**64], dtype=np.longdouble), "x", "int64").startswith("x[0]: ")


def test_the_error_state_of_numpy_has_no_effect() -> None:
    with np.errstate(all="raise"):
        assert wire_array([1e-60, 0.5], "x", "float32").tolist() == [0.0, 0.5]
        assert wire_array(np.array([1e-320, np.nan]), "x").shape == (2,)
        assert refusal(wire_array, np.array([1.0, 1e300]), "x").startswith("x[1]")
        assert refusal(wire_array, np.array([1.0, np.nan]), "x", "int64").startswith("x[1]")


def test_numbers_decide_the_dtype_by_default() -> None:
    assert wire_array([1, 2.0], "x").dtype == np.float32
    assert wire_array([fractions.Fraction(1, 2)], "x").tolist() == [0.5]
    assert wire_array([decimal.Decimal(2), 1], "x").dtype == np.float32
    assert wire_array(["1", "2"], "x").dtype == np.float32
    assert wire_array(np.array([1, 2], dtype=object), "x").dtype == np.int64
    assert refusal(wire_array, [2**63, 1], "x").startswith(
        f"x[0]: expected a whole number within 64 bits, got {2**63}"
    )


NUMBERS = st.one_of(
    st.integers(-(2**65), 2**65),
    st.integers(-5, 5),
    st.booleans(),
    st.floats(width=64),
    st.floats(-5, 5, width=16),
    st.integers(-(2**63), 2**64 - 1).map(str),
    st.sampled_from(
        [np.int8(-3), np.uint64(2**64 - 1), np.float16(0.5), np.float64(2**53), None, "nan", "x"]
    ),
)


def exactly(value: Any) -> fractions.Fraction | None:
    """Return the exact value of a cell, or None for values other than finite numbers."""
    try:
        if isinstance(value, np.generic):
            value = value.item()
        return fractions.Fraction(value)
    except (ValueError, OverflowError, TypeError):
        return None


@given(st.lists(NUMBERS, max_size=6), st.sampled_from([list, tuple, deque]))
def test_int64_is_exact_or_names_a_bad_cell(cells: list[Any], container: Any) -> None:
    meant = [exactly(cell) for cell in cells]
    fits = [m is not None and m.denominator == 1 and -(2**63) <= m < 2**63 for m in meant]
    if all(fits):
        assert wire_array(container(cells), "x", "int64").tolist() == [int(m) for m in meant if m is not None]
    else:
        message = refusal(wire_array, container(cells), "x", "int64")
        assert any(message.startswith(f"x[{index}]: ") for index, fit in enumerate(fits) if not fit)


@given(st.lists(NUMBERS, max_size=6), st.sampled_from([list, tuple, deque]))
def test_float32_is_nearest_or_names_a_bad_cell(cells: list[Any], container: Any) -> None:
    def nearest(cell: Any) -> float | None:
        if cell is None:
            return float("nan")
        try:
            with np.errstate(over="ignore"):
                narrow = float(np.float32(float(cell)))
        except ValueError:
            return None
        return None if np.isinf(narrow) and not np.isinf(float(cell)) else narrow

    wanted = [nearest(cell) for cell in cells]
    if None not in wanted:
        assert np.array_equal(wire_array(container(cells), "x", "float32"), wanted, equal_nan=True)
    else:
        message = refusal(wire_array, container(cells), "x", "float32")
        assert any(message.startswith(f"x[{index}]: ") for index, want in enumerate(wanted) if want is None)


# -------------------------------------------------------------------------------------------- ragged rows
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1, 2], [3]], "x[1]: is a row of 1 where x[0] is a row of 2; ragged lists cannot be sent"),
        ([[1], [2], [3, 4]], "x[2]: is a row of 2 where x[0] is a row of 1;"),
        ([[1, 2], 3], "x[1]: is a single cell where x[0] is a row of 2;"),
        ([1, [2]], "x[1]: is a row of 1 where x[0] is a single cell;"),
        ([[], [1]], "x[1]: is a row of 1 where x[0] is a row of 0;"),
        ([[[1, 2], [3]], [[1, 2], [3, 4]]], "x[0][1]: is a row of 1 where x[0][0] is a row of 2;"),
        ([[[1], [2]], [[3]]], "x[1]: is an array of shape [1, 1] where x[0] is an array of shape [2, 1];"),
        ([np.zeros(2), np.zeros(3)], "x[1]: is a row of 3 where x[0] is a row of 2;"),
        ([(1, 2), [3, "x"]], "x[1][1]: expected"),
        ([[1, None], [2]], "x[1]: is a row of 1"),
    ],
)
def test_ragged_rows_are_named(rows: Any, message: str) -> None:
    for dtype in ("int64", "float32"):
        assert refusal(wire_array, rows, "x", dtype).startswith(message)


def test_the_limit_of_dimensions_is_32() -> None:
    deep: Any = None
    for _ in range(32):
        deep = [deep]
    assert wire_array(deep, "x", "float32").shape == (1,) * 32
    assert "nested deeper than 32 lists" in refusal(wire_array, [deep], "x", "float32")


def test_recursive_lists_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert "nested deeper than 32 lists" in refusal(wire_array, loop, "x")


# -------------------------------------------------------------------------------------------- dtype to dtype


# ------------------------------------------------------------------------------------------ arrays as values
VALUES = st.lists(st.one_of(st.integers(-3, 3), st.sampled_from([0.0, -0.0, float("nan"), 0.5])), max_size=3)


PAIRS = st.tuples(VALUES, VALUES) | VALUES.map(lambda values: (values, values))


@given(PAIRS, st.sampled_from("bhilq"), st.sampled_from(["f2", "f4", "f8", ">f4"]), st.booleans())
def test_equal_arrays_share_a_hash(pair: Any, whole: str, real: str, floats: bool) -> None:
    left, right = pair
    if floats:
        one, two = np.array(left, dtype=real), np.array(right, dtype=np.float32)
    else:
        one = np.array([int(v) if v == v else 0 for v in left], dtype=whole)
        two = np.array([int(v) if v == v else 0 for v in right], dtype=np.int32)
    equal = one.shape == two.shape and all(
        a == b or (a != a and b != b) for a, b in zip(one, two, strict=True)
    )
    assert same_values(one, two) is equal
    assert same_values(two, one) is equal
    assert (ByValue(one) == ByValue(two)) is equal
    if equal:
        assert quick_hash(one) == quick_hash(two)
        assert hash(ByValue(one)) == hash(ByValue(two))


def test_equality_compares_shape_kind_and_absence() -> None:
    one = np.array([1, 2])
    for other in (one.reshape(1, 2), one.astype(float), None):
        assert not same_values(one, other)
    assert not same_values(None, one)
    assert same_values(None, None)
    assert same_values(np.array(np.nan), np.array(np.nan))
    assert ByValue(None) == ByValue(None)
    assert hash(ByValue(None)) == hash(ByValue(None))
    assert ByValue(one) != one.tolist()


def test_a_hash_reads_the_first_cells_only() -> None:
    class Counted(np.ndarray):
        copied = 0

        def __array_finalize__(self, base: Any) -> None:
            Counted.copied += self.size

    huge = np.zeros((1000, 1000)).T.view(Counted)
    Counted.copied = 0
    quick_hash(huge)
    assert Counted.copied < 100


# ---------------------------------------------------------------------------------------------------- torch
def test_torch_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        __module__ = "torch"

        def detach(self) -> None: ...

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not is_torch(Tensor())
    assert "torch" not in sys.modules
