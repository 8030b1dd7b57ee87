"""`TensorData` converts, shares, compares and refuses values, dense and CSR."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import subprocess
import sys
import tracemalloc
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from support.listing import long_lists
from support.refusals import refusal

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import TensorData

DTYPES = [("int64", np.int64), ("float32", np.float32)]


def csr(pad: int = 0) -> TensorData:
    return TensorData.from_numpy_sparse(np.array([[pad] * 9, [pad] * 8 + [7], [5] + [pad] * 8]), pad)


# ----------------------------------------------------------------------------------------- constructing
def test_arguments_are_accepted_by_position_and_by_name() -> None:
    by_position = TensorData([7.0], "float32", [2, 3], [0, 0, 1], [2])
    by_name = TensorData(
        data=[7.0], dtype="float32", shape=[2, 3], sparse_crow_indices=[0, 0, 1], sparse_col_indices=[2]
    )
    assert by_position == by_name
    with pytest.raises(TypeError, match="dtpye"):
        TensorData(data=[1], dtpye="int64")


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


@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_data_of_every_kind_are_accepted(dtype: Any) -> None:
    for data in ([1, 2], range(1, 3), deque([1, 2]), iter([1, 2]), ["1", 2.0], np.array([1, 2], np.uint16)):
        tensor = TensorData(data, dtype)
        assert tensor.to_numpy().dtype == dtype
        assert tensor.data == [1, 2]
        assert {type(value) for value in tensor.data} == {int if dtype == "int64" else float}


def test_a_single_number_becomes_a_scalar_tensor() -> None:
    scalar = TensorData(2.5, "float32", [])
    assert scalar.to_numpy().shape == ()
    assert (scalar.data, scalar.tolist(), scalar.shape) == ([2.5], 2.5, [])


@pytest.mark.parametrize(
    ("data", "dtype", "message"),
    [
        ([0, 1.9], "int64", "TensorData.data[1]: expected a whole number, got 1.9"),
        ([1.0, 1e39], "float32", "TensorData.data[1]: 1e+39 is too large for float32"),
        ([[1, 2], [3]], "int64", "TensorData.data[1]: is a row of 1 where TensorData.data[0] is a row of 2;"),
    ],
)
def test_lossy_conversions_are_refused(data: Any, dtype: Any, message: str) -> None:
    assert refusal(TensorData, data, dtype).startswith(message)


def test_nan_is_a_float() -> None:
    tensor = TensorData([None, np.nan, np.inf], "float32")
    assert np.isnan(tensor.to_numpy()[:2]).all()
    assert tensor.data[2] == np.inf


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


def test_the_default_shape_is_that_of_the_array() -> None:
    tensor = TensorData([[1, 2], [3, 4]], "int64")
    assert tensor.shape is None
    assert tensor.tolist() == [[1, 2], [3, 4]]
    assert tensor == TensorData([1, 2, 3, 4], "int64", [2, 2])


def test_a_list_of_sizes_is_copied() -> None:
    shape = [2, 2]
    tensor = TensorData([1, 2, 3, 4], "int64", shape)
    shape.append(9)
    assert tensor.shape == [2, 2]


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


def test_a_million_values_cost_no_memory_before_a_list() -> None:
    array = np.zeros((1000, 1000), dtype=np.float32).T
    tracemalloc.start()
    try:
        tensor = TensorData.from_numpy(array)
        text, number, flat = repr(tensor), hash(tensor), tensor.nbytes
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000
    assert text == "TensorData(data=[0.0, 0.0, 0.0, … 1000000 items], dtype='float32', shape=[1000, 1000])"
    assert (number, flat) == (hash(TensorData.from_numpy(array.copy())), 4_000_000)


def test_wrap_does_not_copy() -> None:
    values, crow, col = np.array([1.0], dtype=np.float32), np.array([0, 1]), np.array([3])
    tensor = TensorData._wrap(values, "float32", [1, 5], crow, col)
    assert tensor._numpy is values
    assert tensor == TensorData([1.0], "float32", [1, 5], [0, 1], [3])
    assert type(tensor) is TensorData
    for name in ("_numpy", "dtype"):
        with pytest.raises(AttributeError):
            setattr(tensor, name, values)
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


@pytest.mark.parametrize("array", [np.array([1j]), np.array(["a"]), np.array(["2026"], dtype="M8[Y]")])
def test_from_numpy_refuses_other_types(array: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"^TensorData\.from_numpy"):
        TensorData.from_numpy(array)


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
            tensor._numpy, np.array(stored, dtype=dense.dtype), equal_nan=dense.dtype.kind == "f"
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


def test_a_dense_tensor_ignores_the_pad() -> None:
    tensor = TensorData.from_numpy(np.zeros((2, 2)))
    assert tensor.to_numpy(5) is tensor._numpy


@pytest.mark.parametrize("pad", [True, 1.0, "0", None, np.float32(0), np.bool_(False)])
def test_a_pad_must_be_a_whole_number(pad: Any) -> None:
    with pytest.raises(TypeError, match="pad_value: expected a whole number"):
        TensorData.from_numpy_sparse(np.zeros((9, 9)), pad)
    with pytest.raises(TypeError, match="pad_value: expected a whole number"):
        csr().to_numpy(pad)


def test_a_pad_must_fit_the_dtype() -> None:
    for pad in (2**63, -(2**63) - 1):
        with pytest.raises(InvalidInputError, match=r"^pad_value"):
            csr().to_numpy(pad)
    floats = TensorData([1.0], "float32", [2, 9], [0, 0, 1], [0])
    with pytest.raises(InvalidInputError, match=r"^pad_value"):
        floats.to_numpy(10**39)
    assert floats.to_numpy(2**70)[0, 0] == 2.0**70


def test_sparse_data_are_flattened() -> None:
    tensor = TensorData([[7, 5]], "int64", [3, 9], np.array([0, 0, 1, 2]), (8, 0))
    assert tensor == csr()
    assert tensor.tolist() == csr().tolist()
    assert tensor.data == [7, 5]


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
    with pytest.raises(InvalidInputError, match=r"sparse_col_indices: cell \[1\]\[2\] is listed twice"):
        twice.to_numpy()
    many = TensorData(range(6), "int64", [3, 4], [0, 3, 4, 6], [3, 0, 2, 1, 3, 3])
    with pytest.raises(InvalidInputError, match=r"cell \[2\]\[3\] is listed twice"):
        many.to_numpy()
    again = TensorData(range(6), "int64", [3, 4], [0, 3, 4, 6], [3, 0, 3, 1, 3, 0])
    with pytest.raises(InvalidInputError, match=r"cell \[0\]\[3\] is listed twice"):
        again.to_numpy()


def test_matrices_without_rows_or_columns_work() -> None:
    empty = TensorData([], "int64", [0, 5], [0], [])
    assert empty.is_sparse
    assert empty.to_numpy().shape == (0, 5)
    assert TensorData([], "float32", [2, 0], [0, 0, 0], []).to_numpy().shape == (2, 0)


def test_lists_are_created_at_each_access() -> None:
    tensor = csr()
    for name in ("data", "sparse_crow_indices", "sparse_col_indices"):
        getattr(tensor, name).append(99)
        assert 99 not in getattr(tensor, name)


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


@pytest.mark.parametrize("tensor", [TensorData(1, "int64"), TensorData([], "float32", [0, 3]), csr()])
def test_copies_keep_shape_and_size(tensor: TensorData) -> None:
    copies = [copy.copy(tensor), copy.deepcopy(tensor), tensor.model_copy(), tensor.model_copy(deep=True)]
    copies += [pickle.loads(pickle.dumps(tensor, p)) for p in range(pickle.HIGHEST_PROTOCOL + 1)]
    for twin in copies:
        assert (twin.shape, twin.nbytes) == (tensor.shape, tensor.nbytes)
        assert twin.to_numpy().shape == tensor.to_numpy().shape


def test_a_dump_becomes_the_same_tensor() -> None:
    for tensor in (TensorData([1, 2], "int64"), TensorData([np.nan], "float32")):
        assert TensorData.model_validate(tensor.model_dump()) == tensor


def test_a_deep_copy_shares_nothing() -> None:
    array = np.arange(4)
    tensor = TensorData.from_numpy(array)
    deep = copy.deepcopy(tensor)
    assert not np.shares_memory(deep.to_numpy(), array)
    assert deep.shape is not tensor.shape
    assert copy.copy(tensor) is tensor
    deep_csr = copy.deepcopy(csr())
    assert deep_csr == csr()


def test_a_pickle_of_a_slice_is_small() -> None:
    base = np.zeros(1_000_000, dtype=np.float32)
    assert len(pickle.dumps(TensorData.from_numpy(base[:10]))) < 1000


def _its_twin(tensor: TensorData) -> TensorData:
    assert hash(tensor) == hash(tensor.model_copy())
    return tensor


def test_tensors_can_be_sent_to_other_processes() -> None:
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for tensor in (csr(), TensorData([np.nan, 0.5], "float32"), TensorData(3, "int64")):
            assert pool.submit(_its_twin, tensor).result(120) == tensor


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


def test_dumps_hold_lists() -> None:
    assert csr().model_dump() == {
        "data": [7, 5],
        "dtype": "int64",
        "shape": [3, 9],
        "sparse_crow_indices": [0, 0, 1, 2],
        "sparse_col_indices": [8, 0],
    }
    plain = TensorData([0.5], "float32")
    assert plain.model_dump(exclude_none=True) == {"data": [0.5], "dtype": "float32"}
    assert plain.model_dump_json(include={"data"}) == '{"data":[0.5]}'


def test_a_copy_with_changes_is_checked() -> None:
    tensor = TensorData([1, 2, 3, 4], "int64")
    assert tensor.model_copy(update={"shape": [2, 2]}).tolist() == [[1, 2], [3, 4]]
    assert tensor.model_copy(update={"dtype": "float32"}).dtype == "float32"
    with pytest.raises(InvalidInputError):
        tensor.model_copy(update={"shape": [3]})
    with pytest.raises(TypeError):
        tensor.model_copy(update={"shap": [3]})


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
