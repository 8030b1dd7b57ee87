"""Torch tensors of every kind, if torch is installed."""

from __future__ import annotations

import copy
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.values import refusal

from tinker_sync.types import (
    Datum,
    EncodedTextChunk,
    ModelInput,
    SamplingParams,
    TensorData,
)

torch = pytest.importorskip("torch")

WHOLE = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]
REAL = ["float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"]
PROMPT = ModelInput.from_ints([1, 2, 3])


def known(names: list[str]) -> list[Any]:
    """Return the dtypes with these names that this torch has."""
    return [getattr(torch, name) for name in names if hasattr(torch, name)]


# ---------------------------------------------------------------------------------------------- to tensors


@pytest.mark.parametrize("dtype", known([*WHOLE, *REAL]), ids=str)
@pytest.mark.parametrize("name", ["int64", "float32"])
def test_a_given_dtype_decides(dtype: Any, name: Any) -> None:
    tensor = TensorData(torch.tensor([1, 0, 1]).to(dtype), name)
    assert (tensor.dtype, tensor.shape, tensor.data) == (name, None, [1, 0, 1])


def test_memory_is_shared_if_the_dtype_fits() -> None:
    for source in (
        torch.zeros(6),
        torch.zeros(2, 3).T,
        torch.zeros(12)[::2],
        torch.zeros(6, dtype=torch.int64),
    ):
        tensor = TensorData.from_torch(source)
        source[0] = 5
        assert tensor.to_numpy().reshape(-1)[0] == 5
        assert np.shares_memory(tensor.to_numpy(), source.numpy())
        assert np.shares_memory(tensor.to_torch().numpy(), source.numpy())


def test_tensors_are_detached() -> None:
    leaf = torch.ones(3, requires_grad=True)
    made = leaf * 2
    for source in (leaf, made, torch.nn.Parameter(torch.ones(3))):
        assert TensorData.from_torch(source).shape == [3]
        assert Datum(PROMPT, {"weights": source}).loss_fn_inputs["weights"].dtype == "float32"
    assert TensorData.from_numpy([made[0], made[1] / 4]).data == [2.0, 0.5]
    assert TensorData.from_numpy([np.array(1.5), made[1]]).data == [1.5, 2.0]
    assert Datum(PROMPT, {"weights": [made[0], made[1]]}).loss_fn_inputs["weights"].data == [2.0, 2.0]


def test_lists_of_tensors_are_accepted() -> None:
    assert TensorData.from_numpy([torch.tensor(1), torch.tensor(2)]).data == [1, 2]
    rows = [torch.tensor([1.0, 2.0], dtype=torch.bfloat16), torch.tensor([3.0, 4.0], dtype=torch.bfloat16)]
    assert TensorData.from_numpy(rows).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert TensorData([torch.tensor(1.0), 2], "int64").data == [1, 2]
    assert "[1]: is a row of 1" in refusal(TensorData.from_numpy, [torch.ones(2), torch.ones(1)])


class Mine(torch.Tensor):
    """A subclass of torch.Tensor from another module."""


def test_subclasses_are_accepted() -> None:
    source = torch.tensor([1, 2]).as_subclass(Mine)
    assert TensorData.from_torch(source).data == [1, 2]
    assert Datum(PROMPT, {"weights": source}).loss_fn_inputs["weights"].data == [1, 2]
    assert EncodedTextChunk(tokens=source).as_int32().tolist() == [1, 2]


def test_scalars_are_accepted() -> None:
    tensor = TensorData.from_torch(torch.tensor(2.5))
    assert (tensor.shape, tensor.data) == ([], [2.5])
    assert tensor.to_torch().shape == ()
    assert pickle.loads(pickle.dumps(tensor)).to_torch().shape == ()
    assert TensorData(torch.tensor(3), "int64").tolist() == 3


def test_sparse_and_other_layouts_become_dense() -> None:
    dense = torch.tensor([[0.0, 2.0], [0.0, 0.0]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layouts = [dense.to_sparse(), dense.to_sparse_csr(), dense.to_sparse_csc()]
        for source in layouts:
            assert TensorData.from_torch(source).tolist() == dense.tolist()
            assert Datum(PROMPT, {"mine": source}).loss_fn_inputs["mine"].tolist() == dense.tolist()
        quantized = torch.quantize_per_tensor(torch.tensor([0.5, 1.0]), 0.5, 0, torch.qint8)
        assert TensorData.from_torch(quantized).data == [0.5, 1.0]
    assert TensorData.from_torch(torch.ones(2, dtype=torch.complex64).conj().imag).data == [0.0, 0.0]


def test_tensors_without_numbers_are_refused() -> None:
    meta = torch.zeros(3, device="meta")
    assert refusal(TensorData.from_torch, meta) == (
        "TensorData.from_torch: a torch tensor on the meta device has no values"
    )
    assert "loss_fn_inputs['weights']: a torch tensor on the meta device" in refusal(
        lambda: Datum(PROMPT, {"weights": meta})
    )
    assert "EncodedTextChunk.tokens: a torch tensor on the meta" in refusal(
        lambda: EncodedTextChunk(tokens=meta)
    )
    assert "expected numbers, got an array of complex64" in refusal(
        TensorData.from_torch, torch.ones(2, dtype=torch.complex64)
    )


# ------------------------------------------------------------------------------------------------ sparse
MATRICES = st.tuples(st.integers(0, 6), st.integers(0, 9)).flatmap(
    lambda shape: st.lists(
        st.sampled_from([0, 0, 0, 0, -1, 7]), min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]
    ).map(lambda cells: np.array(cells, dtype=np.int64).reshape(shape))
)


@given(
    MATRICES,
    st.sampled_from(["int64", "int32", "float32", "bfloat16", "float64", "uint8"]),
    st.sampled_from([0, 7, -1]),
)
def test_numpy_and_torch_give_the_same_csr(dense: np.ndarray, dtype: str, pad: int) -> None:
    if dtype == "uint8":
        dense = np.abs(dense)
    source = torch.from_numpy(dense).to(getattr(torch, dtype))
    tensor = TensorData.from_torch_sparse(source, pad)
    wide = dense if dtype in ("int64", "int32", "uint8") else dense.astype(np.float32)
    assert tensor == TensorData.from_numpy_sparse(wide, pad)
    back = tensor.to_torch(pad)
    assert back.dtype == (torch.int64 if wide.dtype == np.int64 else torch.float32)
    assert back.tolist() == source.tolist()
    assert tensor.tolist(pad) == source.tolist()


def test_pad_values_are_checked() -> None:
    matrix = torch.full((4, 9), -100)
    matrix[1, 2] = 5
    tensor = TensorData.from_torch_sparse(matrix, np.int64(-100))
    assert (tensor.is_sparse, tensor.data) == (True, [5])
    assert torch.equal(tensor.to_torch(-100), matrix)
    for wrong in (True, 0.0, "0", None):
        with pytest.raises(TypeError, match="pad_value"):
            TensorData.from_torch_sparse(matrix, wrong)
        with pytest.raises(TypeError, match="pad_value"):
            tensor.to_torch(wrong)


def test_torch_reads_the_csr() -> None:
    matrix = torch.zeros(5, 9)
    matrix[0, 3], matrix[4, 8], matrix[4, 0] = 1.5, -2.0, 0.25
    tensor = TensorData.from_torch_sparse(matrix)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = torch.sparse_csr_tensor(
            torch.tensor(tensor.sparse_crow_indices),
            torch.tensor(tensor.sparse_col_indices),
            torch.tensor(tensor.data),
            tensor.shape,
            check_invariants=True,
        ).to_dense()
    assert torch.equal(theirs, matrix)
    assert torch.equal(tensor.to_torch(), matrix)


def test_a_datum_compresses_sparse_targets_and_weights() -> None:
    rows = torch.zeros(9, 9)
    rows[2, 3] = 1
    inputs = Datum(
        ModelInput.from_ints(range(9)),
        {"target_tokens": rows.long(), "weights": rows, "advantages": rows, "mine": rows.half()},
    ).loss_fn_inputs
    assert {name: tensor.is_sparse for name, tensor in inputs.items()} == {
        "target_tokens": True,
        "weights": True,
        "advantages": False,
        "mine": False,
    }
    for tensor in inputs.values():
        assert torch.equal(tensor.to_torch().float(), rows)


def test_float_targets_must_be_whole() -> None:
    for targets in (
        torch.tensor([5.0, 6.0]),
        torch.tensor([5.0, 6.0], dtype=torch.bfloat16),
        torch.zeros(9, 9),
    ):
        tensor = Datum(PROMPT, {"target_tokens": targets}).loss_fn_inputs["target_tokens"]
        assert tensor.dtype == "int64"
        assert tensor.tolist() == targets.tolist()
    assert "loss_fn_inputs['target_tokens'][1]: expected a whole number, got 0.5" in refusal(
        lambda: Datum(PROMPT, {"target_tokens": torch.tensor([1.0, 0.5])})
    )


# -------------------------------------------------------------------------------------------------- tokens
@pytest.mark.parametrize(
    "dtype", known(["int8", "uint8", "int32", "int64", "float16", "bfloat16", "float32"]), ids=str
)
def test_tokens_are_accepted(dtype: Any) -> None:
    prompt = ModelInput.from_ints(torch.tensor([5, 6]).to(dtype))
    assert prompt == ModelInput.from_ints([5, 6])
    assert prompt.to_ints() == [5, 6]


def test_tokens_share_memory_and_need_one_dimension() -> None:
    ids = torch.arange(5, dtype=torch.int32)
    chunk = EncodedTextChunk(tokens=ids)
    assert np.shares_memory(chunk.as_int32(), ids.numpy())
    assert "flat sequence of token ids, got shape [1, 5]" in refusal(
        lambda: EncodedTextChunk(tokens=ids[None])
    )
    assert EncodedTextChunk(tokens=list(ids)).tokens == [0, 1, 2, 3, 4]
    assert EncodedTextChunk(tokens=[ids[1], 7]).tokens == [1, 7]
    assert SamplingParams(stop=torch.tensor([1, 2])).stop == [1, 2]


# ------------------------------------------------------------------------------------------------ to torch
@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0, dtype=np.float32),
        np.arange(6),
        np.arange(6).reshape(2, 3).T,
        np.arange(12)[::2],
        np.arange(6)[::-1],
        np.arange(6, dtype=">i8"),
        np.array(3),
        np.empty((0, 3), dtype=np.float32),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}{array.strides}",
)
def test_every_array_converts_to_torch(array: np.ndarray) -> None:
    tensor = TensorData.from_numpy(array)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = tensor.to_torch()
        frozen = tensor.to_numpy().copy()
        frozen.flags.writeable = False
        copied = TensorData.from_numpy(frozen).to_torch()
    assert made.dtype == (torch.float32 if tensor.dtype == "float32" else torch.int64)
    assert made.shape == array.shape
    assert made.tolist() == array.tolist()
    if all(stride > 0 for stride in array.strides) and array.size and array.dtype.isnative:
        assert np.shares_memory(made.numpy(), array)
    if copied.numel():
        copied.fill_(9)
        assert frozen.tolist() == array.tolist()


def test_copies_do_not_refer_to_torch() -> None:
    tensor = TensorData.from_torch(torch.ones(3, requires_grad=True))
    for twin in (copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert twin == tensor
        assert type(twin.to_numpy()) is np.ndarray
