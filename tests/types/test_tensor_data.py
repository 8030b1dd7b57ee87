"""`TensorData` converts, shares, compares and refuses values, dense and CSR."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.values import long_lists, refusal

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import TensorData

DTYPES = [("int64", np.int64), ("float32", np.float32)]


def csr(pad: int = 0) -> TensorData:
    return TensorData.from_numpy_sparse(np.array([[pad] * 9, [pad] * 8 + [7], [5] + [pad] * 8]), pad)


# ----------------------------------------------------------------------------------------- constructing


def test_the_dtype_is_required_and_checked() -> None:
    with pytest.raises(TypeError, match="dtype is required"):
        TensorData([1])
    for wrong in ("int32", "float64", "", np.float32):
        assert "expected 'int64' or 'float32'" in refusal(TensorData, [1], wrong)


def test_no_data_is_an_empty_tensor() -> None:
    for name, dtype in DTYPES:
        empty: Any = TensorData(dtype=name)
        assert empty.to_numpy().dtype == dtype
        assert (empty.shape, empty.data, empty.tolist(), empty.nbytes) == (None, [], [], 0)


@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        ([4], [4]),
        ([2, 2], [2, 2]),
        ((2, 2), [2, 2]),
        (np.array([4, 1]), [4, 1]),
        ([1, 2, 2, 1], [1, 2, 2, 1]),
        ([-1], [4]),
        ([2, -1], [2, 2]),
        ([4.0], [4]),
        (iter([2, 2]), [2, 2]),
    ],
)
def test_shapes_are_applied(shape: Any, kept: list[int]) -> None:
    tensor = TensorData([1, 2, 3, 4], "int64", shape)
    assert tensor.shape == kept
    assert tensor.to_numpy().shape == tuple(kept)
    assert tensor.data == [1, 2, 3, 4]


@pytest.mark.parametrize("shape", [[3], [2, 3], [-1, -1], [-2], [-2, -2], [0, -1], [], [5, -1], [2**70]])
def test_a_wrong_shape_is_refused(shape: list[int]) -> None:
    assert refusal(TensorData, [1, 2, 3, 4], "int64", shape).startswith("TensorData.shape: ")


@pytest.mark.parametrize("shape", [4, "22", [2.5], [None], {"a": 1}])
def test_a_shape_of_another_type_is_refused(shape: Any) -> None:
    assert refusal(TensorData, [1, 2, 3, 4], "int64", shape).startswith("TensorData.shape")


# --------------------------------------------------------------------------------------- nothing is copied
@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_arrays_are_shared_without_lists(name: Any, dtype: Any, tmp_path: Path) -> None:
    array = np.arange(24, dtype=dtype)
    readonly = array.copy()
    readonly.flags.writeable = False
    mapped = np.memmap(tmp_path / "values", dtype=dtype, mode="w+", shape=24)
    for given_array in (array, array[::2], array[::-1], array.reshape(4, 6).T, readonly, mapped):
        for make in (lambda array: TensorData(array, name), TensorData.from_numpy):
            with long_lists(16) as made:
                tensor = make(given_array)
                assert np.shares_memory(tensor.to_numpy(), given_array)
                assert tensor.nbytes == given_array.nbytes
                assert (repr(tensor), hash(tensor), tensor == make(given_array))[2]
            assert made == []
    with long_lists(16) as made:
        assert len(tensor.data) == 24
    assert made == [24]
    reshaped = TensorData(array, name, [2, 12])
    assert np.shares_memory(reshaped.to_numpy(), array)


def test_a_tensor_of_an_array_shares_its_memory_and_is_frozen() -> None:
    values = np.array([1.0], dtype=np.float32)
    assert np.shares_memory(TensorData.from_numpy(values).to_numpy(), values)
    tensor = TensorData(values, "float32", [1, 5], np.array([0, 1]), np.array([3]))
    assert tensor == TensorData([1.0], "float32", [1, 5], [0, 1], [3])
    for name in ("data", "dtype"):
        with pytest.raises(AttributeError):
            setattr(tensor, name, [2.0])
        with pytest.raises(AttributeError):
            delattr(tensor, name)
    assert pickle.loads(pickle.dumps(tensor)) == copy.deepcopy(tensor) == tensor


class Named(TensorData):
    """A subclass of `TensorData`, like those in scripts: its instances may have further attributes."""


def test_a_subclass_is_preserved() -> None:
    for made in (
        Named([1], "int64"),
        Named.from_numpy([1]),
        Named.from_numpy_sparse(np.eye(9, dtype=np.int64)),
    ):
        for twin in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made), made.model_copy()):
            assert type(twin) is Named
            assert twin == made
            assert hash(twin) == hash(made)


# -------------------------------------------------------------------------------------- other constructors
def test_from_numpy_accepts_arrays_lists_and_scalars() -> None:
    for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "?", ">i4"):
        tensor = TensorData.from_numpy(np.array([[1, 0]], dtype=kind))
        assert (tensor.dtype, tensor.shape, tensor.data) == ("int64", [1, 2], [1, 0])
    for kind in ("f2", "f4", "f8", ">f8", "g"):
        tensor = TensorData.from_numpy(np.array([[0.5, np.inf]], dtype=kind))
        assert (tensor.dtype, tensor.shape, tensor.data) == ("float32", [1, 2], [0.5, np.inf])
    assert TensorData.from_numpy([[1, 2]]).shape == [1, 2]
    assert TensorData.from_numpy(np.float64(0.5)).shape == []
    assert TensorData.from_numpy(3).dtype == "int64"


# --------------------------------------------------------------------------------------------------- CSR
def by_hand(dense: np.ndarray, pad: int) -> tuple[list[Any], list[int], list[int]]:
    stored, crow, col = [], [0], []
    for row in dense.tolist():
        for column, value in enumerate(row):
            if value != pad:
                stored.append(value)
                col.append(column)
        crow.append(len(col))
    return stored, crow, col


def matrices(dtype: Any, elements: list[Any]) -> st.SearchStrategy[np.ndarray]:
    shapes = npst.array_shapes(min_dims=2, max_dims=2, min_side=0, max_side=9)
    return npst.arrays(dtype, shapes, elements=st.sampled_from(elements))


MATRICES = matrices(np.int64, [0, 0, 0, -1, 7, 2**62]) | matrices(
    np.float32, [0.0, -0.0, 0.0, -1.0, 0.5, float("nan"), float("inf")]
)


@given(MATRICES, st.sampled_from([0, -1, 7, np.int64(-1), np.uint8(7)]))
def test_sparse_tensors_round_trip(dense: np.ndarray, pad: Any) -> None:
    tensor = TensorData.from_numpy_sparse(dense, pad)
    stored, crow, col = by_hand(dense, int(pad))
    rows, columns = dense.shape
    assert tensor.is_sparse == (rows + 1 + 2 * len(stored) < rows * columns)
    if tensor.is_sparse:
        assert np.array_equal(
            np.array(tensor.data, dense.dtype),
            np.array(stored, dense.dtype),
            equal_nan=dense.dtype.kind == "f",
        )
        assert (tensor.sparse_crow_indices, tensor.sparse_col_indices) == (crow, col)
        assert tensor.nbytes == len(stored) * dense.itemsize + 8 * (len(crow) + len(col))
    else:
        assert (tensor.sparse_crow_indices, tensor.sparse_col_indices) == (None, None)
    assert tensor.shape == [rows, columns]
    back = tensor.to_numpy(pad)
    assert back.dtype == dense.dtype
    assert np.array_equal(back, dense, equal_nan=dense.dtype.kind == "f")
    assert tensor == pickle.loads(pickle.dumps(tensor))


def test_csr_is_used_only_if_smaller() -> None:
    # 3 x 4 cells: CSR takes 4 + 2 nnz, so 3 stored values make 10 < 12 and 4 make 12.
    dense = np.zeros((3, 4), dtype=np.int64)
    dense.flat[:3] = 1
    assert TensorData.from_numpy_sparse(dense).is_sparse
    dense.flat[:4] = 1
    assert not TensorData.from_numpy_sparse(dense).is_sparse


@pytest.mark.parametrize("shape", [(0, 0), (0, 9), (9, 0), (1, 1), (1, 2)])
def test_small_matrices_stay_dense(shape: tuple[int, int]) -> None:
    tensor = TensorData.from_numpy_sparse(np.zeros(shape, dtype=np.float32))
    assert not tensor.is_sparse
    assert tensor.to_numpy().shape == shape


def test_empty_and_very_wide_matrices_compress() -> None:
    nothing = TensorData.from_numpy_sparse(np.full((5, 8), -100), -100)
    assert (nothing.data, nothing.sparse_crow_indices, nothing.sparse_col_indices) == ([], [0] * 6, [])
    assert nothing.tolist(-100) == [[-100] * 8] * 5
    wide = np.zeros((1, 100_000), dtype=np.float32)
    wide[0, 99_999] = np.nan
    tensor = TensorData.from_numpy_sparse(wide)
    assert tensor.sparse_col_indices == [99_999]
    assert np.array_equal(tensor.to_numpy(), wide, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (12,), (2, 3, 2)])
def test_only_matrices_become_sparse(shape: tuple[int, ...]) -> None:
    tensor = TensorData.from_numpy_sparse(np.zeros(shape, dtype=np.int64))
    assert not tensor.is_sparse
    assert tensor.shape == list(shape)


@pytest.mark.parametrize("pad", [True, 1.0, "0", None, np.float32(0), np.bool_(False)])
def test_a_pad_must_be_a_whole_number(pad: Any) -> None:
    with pytest.raises(TypeError, match="pad_value"):
        TensorData.from_numpy_sparse(np.zeros((9, 9)), pad)
    with pytest.raises(TypeError, match="pad_value"):
        csr().to_numpy(pad)


@pytest.mark.parametrize(
    ("shape", "crow", "col", "message"),
    [
        ([2, 3], [0, 1], [0], "sparse_crow_indices: 2 rows need 3 pointers, got 2"),
        ([2, 3], [[0, 0, 1]], [0], "sparse_crow_indices: 2 rows need 3 pointers, got 3"),
        ([2, 3], [0, 0, 1], [0, 1], "sparse_col_indices: 1 values need as many columns, got 2"),
        ([2, 3], [0, 0, 1], [[0]], "sparse_col_indices: 1 values need as many columns, got 1"),
        ([2, 3], [1, 1, 1], [0], "sparse_crow_indices: must rise from 0 to the 1 stored values"),
        ([2, 3], [0, 0, 2], [0], "sparse_crow_indices: must rise from 0 to the 1 stored values"),
        ([2, 3], [0, 2, 1], [0], "sparse_crow_indices: must rise from 0 to the 1 stored values"),
        ([2, 3], [0, -1, 1], [0], "sparse_crow_indices: must rise from 0 to the 1 stored values"),
        ([2, 3], [0, 0, 1], [3], "sparse_col_indices: columns must lie in 0 … 2"),
        ([2, 3], [0, 0, 1], [-1], "sparse_col_indices: columns must lie in 0 … 2"),
        ([2, 0], [0, 0, 1], [0], "sparse_col_indices: columns must lie in 0 … -1"),
        ([2, 3], [0, 0, 1.5], [0], "sparse_crow_indices[2]: expected a whole number"),
        ([2, 3], [0, 0, 1], [2**63], "sparse_col_indices[0]: "),
        ([3], [0, 1], [0], "shape: a sparse tensor needs its 2-D dense shape, got [3]"),
        ([-1, 3], [0, 1], [0], "shape: a sparse tensor needs its 2-D dense shape, got [-1, 3]"),
        (None, [0, 1], [0], "shape: a sparse tensor needs its 2-D dense shape, got None"),
    ],
)
def test_bad_indices_are_refused(shape: Any, crow: Any, col: Any, message: str) -> None:
    assert refusal(TensorData, [7.0], "float32", shape, crow, col).startswith(f"TensorData.{message}")


def test_indices_must_come_in_pairs() -> None:
    assert "go together" in refusal(TensorData, [7.0], "float32", [1, 3], [0, 1])
    assert "go together" in refusal(TensorData, [7.0], "float32", [1, 3], None, [0])


def test_cells_may_have_any_order_but_no_duplicates() -> None:
    unordered = TensorData([3, 1], "int64", [1, 4], [0, 2], [3, 1])
    assert unordered.tolist() == [[0, 1, 0, 3]]
    twice = TensorData([3, 1, 2], "int64", [2, 4], [0, 1, 3], [0, 2, 2])
    with pytest.raises(InvalidInputError, match=r"sparse_col_indices: cell \[1\]\[2\]"):
        twice.to_numpy()
    many = TensorData(range(6), "int64", [3, 4], [0, 3, 4, 6], [3, 0, 2, 1, 3, 3])
    with pytest.raises(InvalidInputError, match=r"cell \[2\]\[3\]"):
        many.to_numpy()
    again = TensorData(range(6), "int64", [3, 4], [0, 3, 4, 6], [3, 0, 3, 1, 3, 0])
    with pytest.raises(InvalidInputError, match=r"cell \[0\]\[3\]"):
        again.to_numpy()


# ------------------------------------------------------------------------------------------- being a value
def test_equal_tensors_may_have_different_forms() -> None:
    array = np.arange(6)
    pairs = [
        (TensorData([-0.0, np.nan], "float32"), TensorData([0.0, -np.nan], "float32", [2])),
        (TensorData(array, "int64"), TensorData(array.astype(">i4"), "int64")),
        (TensorData(array[::-1], "int64"), TensorData([5, 4, 3, 2, 1, 0], "int64")),
        (TensorData(array.reshape(2, 3).T, "int64"), TensorData([0, 3, 1, 4, 2, 5], "int64", [3, 2])),
    ]
    for one, other in pairs:
        assert one == other
        assert hash(one) == hash(other)


def test_a_pickle_of_a_slice_is_small() -> None:
    base = np.zeros(1_000_000, dtype=np.float32)
    assert len(pickle.dumps(TensorData.from_numpy(base[:10]))) < 1000


def test_reprs_are_short() -> None:
    assert repr(TensorData([1, 2], "int64")) == "TensorData(data=[1, 2], dtype='int64', shape=None)"
    assert repr(TensorData(0.5, "float32")) == "TensorData(data=[0.5], dtype='float32', shape=None)"
    assert repr(TensorData(range(8), "int64")).startswith("TensorData(data=[0, 1, 2, 3, 4, 5, 6, 7], ")
    assert repr(csr()) == "TensorData(data=[7, 5], dtype='int64', shape=[3, 9], stored=2)"
    assert (
        repr(TensorData(range(9), "int64"))
        == "TensorData(data=[0, 1, 2, … 9 items], dtype='int64', shape=None)"
    )
    assert str(csr()) == repr(csr())


def test_a_missing_torch_is_reported() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tinker_sync.types import TensorData\n"
        "from tinker_sync.errors import MissingExtraError\n"
        "try: TensorData([1], 'int64').to_torch()\n"
        "except MissingExtraError as error: assert 'pip install torch' in str(error), error\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
