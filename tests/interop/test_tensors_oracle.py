"""Types with arrays accept the random input that the reference client's types accept, with the same meaning.

This package keeps the same dtype, shape, values and CSR indices. The intended differences, which the last
tests cover or the comparisons allow:

- This package refuses a number that the reference would change (1.9 or 2**63 as int64, 1e39 as float32), or
  keeps it exactly (2**53 + 1 among floats). It refuses arrays of complex numbers.
- Whole floats under `target_tokens` in an array become int64; the reference keeps float32.
- A token beyond int32 is refused.
- Read-only arrays are not copied. In a shape, -1 is replaced by the real size.
- Unsigned, boolean, object and big-endian arrays, tuples, ranges and other sequences, and lists under the
  user's own names are accepted.
- Invalid CSR indices are refused by the constructor, not at their first use. Cells in any order are accepted.
- A dimension of 2**63 or more in the header of audio is refused.
"""

from __future__ import annotations

import array
import collections
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tinker.types as reference
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from tinker.types._tensor_container import tensor_container_shape
from tinker.types.topk_logprobs import TopkLogprobs as ReferenceTopkLogprobs

import tinker_sync.types as ours
from tinker_sync.errors import InvalidInputError

MANY = settings(max_examples=2000)
SOME = settings(max_examples=500)

TENSOR_DTYPES = st.sampled_from(["int64", "float32"])
NAMES = st.sampled_from(
    [
        *("target_tokens", "weights", "advantages", "logprobs"),
        *("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask"),
    ]
)
CELLS = st.one_of(
    st.integers(-5, 5),
    st.integers(-(2**64), 2**65),
    st.booleans(),
    st.floats(-4, 4, width=16),
    st.floats(),
    st.sampled_from([0.5, 1e38, 1e39, -1e39, 2**53 + 1, 2.0**63, -(2**63)]),
    st.sampled_from([np.int8(-3), np.uint64(2**63), np.float32(0.5), np.float64(1e300), np.bool_(True)]),
    st.sampled_from(
        [Decimal("1.5"), Fraction(1, 2), Fraction(4), None, "7", "1.5", "nan", "many", b"1", [], {}, 1j]
    ),
)
TAME_CELLS = st.one_of(st.integers(-5, 5), st.booleans(), st.floats(-4, 4, width=16), st.just(float("nan")))


def rows(cells: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Return a strategy of lists of cells, and of lists of lists, whose rows may differ in length."""
    flat = st.lists(cells, max_size=5)
    matrix = st.tuples(st.integers(0, 3), st.integers(0, 3)).flatmap(
        lambda size: st.lists(
            st.lists(cells, min_size=size[1], max_size=size[1]), min_size=size[0], max_size=size[0]
        )
    )
    return flat | matrix | st.lists(flat, max_size=3)


ARRAYS = st.one_of(
    npst.arrays(
        npst.integer_dtypes(endianness="?")
        | npst.unsigned_integer_dtypes(endianness="?")
        | npst.floating_dtypes(endianness="?", sizes=(16, 32, 64))
        | npst.boolean_dtypes()
        | npst.complex_number_dtypes(),
        npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    ),
    npst.arrays(np.float64, npst.array_shapes(max_side=3), elements=st.integers(-9, 9).map(float)),
)


def taken(make: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the result of a constructor, or None if it refuses its arguments."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            return make(*args, **kwargs)
        except (ValueError, TypeError, OverflowError, KeyError):
            return None


def stored(tensor: Any) -> np.ndarray:
    """Return the numbers that a server receives; `to_numpy` would fill in the zeros of a sparse tensor."""
    values: np.ndarray = tensor._numpy
    return values


def wire(tensor: Any) -> Any:
    """Return the parts of a tensor that a server receives, with -1 in the shape replaced by the real size."""
    values = stored(tensor)
    shape = None if tensor.shape is None else list(tensor.shape)
    if shape is not None and -1 in shape:
        shape = list(values.shape)
    indices = [
        None if i is None else list(i) for i in (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    ]
    if indices[0] is None:
        assert shape is None or values.shape == tuple(shape)
    return (
        tensor.dtype,
        shape,
        values.dtype.str,
        values.shape,
        np.ascontiguousarray(values).tobytes(),
        *indices,
    )


def same(left: Any, right: Any) -> bool:
    """Return True if two results of `wire` are equal; NaN equals NaN."""
    if (*left[:4], *left[5:]) != (*right[:4], *right[5:]):
        return False
    one, other = (np.frombuffer(side[4], dtype=side[2]) for side in (left, right))
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def flat(value: Any) -> list[Any]:
    if isinstance(value, np.ndarray):
        return value.reshape(-1).tolist()
    return [cell for item in value for cell in flat(item)] if isinstance(value, (list, tuple)) else [value]


def changed(given_value: Any, tensor: Any) -> bool:
    """Return True if a number in the tensor differs from the given one by more than rounding to float32."""
    if getattr(given_value, "dtype", np.dtype(int)).kind == "c":
        return True
    for cell, kept in zip(flat(given_value), stored(tensor).reshape(-1).tolist(), strict=True):
        if isinstance(cell, complex):
            return True
        meant = float("nan") if cell is None else cell
        if isinstance(meant, (str, bytes)):
            meant = float(meant) if tensor.dtype == "float32" else int(meant)
        if tensor.dtype == "int64" and (meant != meant or meant != kept):
            return True
        if tensor.dtype == "float32" and np.isinf(kept) and not np.isinf(float(meant)):
            return True
    return False


def check_tensors(given_value: Any, theirs: Any, mine: Any, widened: bool = False) -> None:
    if theirs is None:
        return  # other tests cover input that only this package accepts
    if mine is None:
        assert changed(given_value, theirs), given_value
        return
    if widened and theirs.dtype == "float32" and mine.dtype == "int64":
        assert np.array_equal(stored(theirs), stored(mine).astype(np.float32))
        return
    assert not changed(given_value, mine), given_value
    assert changed(given_value, theirs) or same(wire(mine), wire(theirs)), given_value


# ---------------------------------------------------------------------------------------------- TensorData


@MANY
@given(rows(CELLS) | rows(TAME_CELLS) | ARRAYS | TAME_CELLS, TENSOR_DTYPES)
def test_data_of_every_kind(data: Any, dtype: Any) -> None:
    check_tensors(data, taken(reference.TensorData, data, dtype), taken(ours.TensorData, data, dtype))


@MANY
@given(
    st.lists(st.integers(-5, 5), max_size=12),
    st.lists(st.integers(-1, 6), max_size=3) | st.none() | st.lists(st.integers(1, 3), max_size=3).map(tuple),
    TENSOR_DTYPES,
)
@example([1, 2, 3, 4], [2, -1], "int64")
@example([1, 2, 3, 4], [2.0, 2.0], "int64")
def test_shapes(data: list[int], shape: Any, dtype: Any) -> None:
    check_tensors(
        data, taken(reference.TensorData, data, dtype, shape), taken(ours.TensorData, data, dtype, shape)
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: collections.deque([1, 2]),
        lambda: array.array("d", [1, 2]),
        lambda: memoryview(array.array("q", [1, 2])),
        lambda: bytearray(b"\x01\x02"),
        lambda: range(3),
        lambda: (1, (2,)),
        lambda: [np.array([1, 2]), np.array([3, 4])],
        lambda: np.arange(6).reshape(2, 3).T,
        lambda: np.arange(6.0)[::-2],
        lambda: np.arange(4).view(np.matrix),
        lambda: np.array(["1", "2"]),
        lambda: np.array([1, 2.0], dtype=object),
        lambda: None,
    ],
)
@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_containers(make: Any, dtype: Any) -> None:
    theirs, mine = taken(reference.TensorData, make(), dtype), taken(ours.TensorData, make(), dtype)
    assert theirs is None or same(wire(mine), wire(theirs))


# --------------------------------------------------------------------------------------------------- Datum


@MANY
@given(NAMES, rows(CELLS) | rows(TAME_CELLS) | ARRAYS)
@example("target_tokens", np.array(3e-268))
def test_inputs_of_every_kind(name: str, value: Any) -> None:
    theirs = taken(reference.Datum, reference.ModelInput.from_ints([1]), {name: value})
    mine = taken(ours.Datum, ours.ModelInput.from_ints([1]), {name: value})
    in_array = isinstance(value, np.ndarray) and name == "target_tokens"
    if in_array and mine is None and theirs is not None:
        # The reference client rounds to float32 first, so a small fraction may become a whole number there.
        fractions = value.dtype.kind == "f" and not np.array_equal(value, np.trunc(value))
        assert changed(value, theirs.loss_fn_inputs[name]) or fractions or over_int64(value)
        return
    check_tensors(
        value, theirs and theirs.loss_fn_inputs[name], mine and mine.loss_fn_inputs[name], widened=in_array
    )


def over_int64(value: np.ndarray) -> bool:
    return bool((~(np.abs(value.astype(np.float64)) < 2.0**63)).any())


# ---------------------------------------------------------------------------------------------- ModelInput


@MANY
@given(
    st.lists(
        CELLS | st.integers(0, 2**31 - 1) | st.sampled_from(["4", "4.0", " 4 ", "1_0", b"4", 4.0]), max_size=4
    ),
    st.sampled_from([list, tuple, collections.deque]),
)
def test_tokens(cells: list[Any], container: Any) -> None:
    theirs = taken(reference.EncodedTextChunk, tokens=container(cells))
    mine = taken(ours.EncodedTextChunk, tokens=container(cells))
    if theirs is None:
        return
    if mine is None:
        assert any(not -(2**31) <= token < 2**31 for token in theirs.tokens)
        return
    assert list(mine.tokens) == list(theirs.tokens)
    assert {type(token) for token in mine.tokens} <= {int}
    assert (mine.length, mine.type) == (theirs.length, theirs.type)
    assert mine.model_dump_json() == theirs.model_dump_json()


@SOME
@given(
    st.binary(max_size=16)
    | st.lists(st.sampled_from([0, 1, 2, 7, 8, 12, 127, 128, 254, 255]), max_size=14).map(bytes)
    | st.lists(st.sampled_from([128, 255]), max_size=11).map(lambda octets: bytes([0, 1, *octets, 1]))
)
def test_lengths_of_audio(dmel: bytes) -> None:
    theirs = taken(lambda: reference.DmelChunk(dmel=dmel).length)
    mine = taken(lambda: ours.DmelChunk(dmel=dmel).length)
    if theirs is not None and mine is None:
        assert any(size >= 2**63 for size in tensor_container_shape(dmel))
    else:
        assert mine == theirs


# ------------------------------------------------------------------------------------------------ sampling


@MANY
@given(
    st.lists(CELLS | st.text(max_size=2) | st.integers(0, 9), max_size=3)
    | st.lists(st.integers(0, 9) | st.booleans(), max_size=3).map(tuple)
    | st.text(max_size=3)
    | st.sampled_from([5, 1.5, b"x", {"a"}, {"a": 1}, range(3)])
)
def test_stop(stop: Any) -> None:
    theirs, mine = taken(reference.SamplingParams, stop=stop), taken(ours.SamplingParams, stop=stop)
    if theirs is not None:
        assert mine is not None
        assert (mine.stop if isinstance(mine.stop, str) else [*(mine.stop or ())]) == (
            theirs.stop if isinstance(theirs.stop, str) else [*(theirs.stop or ())]
        )
        assert type(mine.stop) is type(theirs.stop)


FLOATS = st.sampled_from([-0.5, 0.0, float("nan"), -99999.0, float("-inf")]) | st.floats(width=32)


@SOME
@given(
    st.none() | st.lists(FLOATS, max_size=5),
    st.none() | st.lists(st.integers(0, 9), max_size=5),
    st.booleans(),
)
def test_list_views(logprobs: Any, tokens: Any, listed: bool) -> None:
    def views(module: Any) -> Any:
        if listed:
            sequence = module.SampledSequence("stop", "s", _tokens_list=tokens, _logprobs_list=logprobs)
            response = module.SampleResponse([sequence], _prompt_logprobs_list=logprobs)
        else:
            floats = None if logprobs is None else np.array(logprobs, dtype=np.float32)
            ids = None if tokens is None else np.array(tokens, dtype=np.int32)
            sequence = module.SampledSequence("stop", "s", ids, floats)
            response = module.SampleResponse([sequence], floats)
        return (
            sequence.tokens,
            repr(sequence.logprobs),
            repr(response.prompt_logprobs),
            response.topk_prompt_logprobs,
        )

    assert views(ours) == views(reference)


@SOME
@given(
    st.tuples(st.integers(0, 4), st.integers(0, 3)).flatmap(
        lambda shape: st.tuples(
            npst.arrays(np.int32, shape, elements=st.integers(0, 2)),
            npst.arrays(np.float32, shape, elements=st.sampled_from([-99999.0, -0.5, 0.0])),
        )
    )
)
def test_topk_views(matrices: Any) -> None:
    mine = ours.SampleResponse(
        [ours.SampledSequence("stop", "s", topk_logprobs_np=ours.TopkLogprobs(*matrices))],
        topk_prompt_logprobs_np=ours.TopkLogprobs(*matrices),
    )
    theirs = reference.SampleResponse(
        [reference.SampledSequence("stop", "s", topk_logprobs_np=ReferenceTopkLogprobs(*matrices))],
        topk_prompt_logprobs_np=ReferenceTopkLogprobs(*matrices),
    )
    assert mine.topk_prompt_logprobs == theirs.topk_prompt_logprobs
    assert mine.sequences[0].topk_logprobs == theirs.sequences[0].topk_logprobs


# --------------------------------------------------------------------------------- torch tensors

SPARSE_MATRICES = npst.arrays(
    st.sampled_from([np.int64, np.int32, np.int16, np.float32, np.float64]),
    npst.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=8),
    elements=st.sampled_from([0, 0, 0, 0, 0, -1, 7]),
)


@SOME
@given(SPARSE_MATRICES, st.sampled_from([0, 7, -1, -100, np.int64(7)]))
def test_csr_of_torch(dense: np.ndarray, pad: Any) -> None:
    torch = pytest.importorskip("torch")
    source = torch.from_numpy(dense)
    theirs, mine = (module.TensorData.from_torch_sparse(source, pad) for module in (reference, ours))
    assert same(wire(mine), wire(theirs))
    assert np.array_equal(mine.to_numpy(pad), theirs.to_numpy(pad))
    assert torch.equal(mine.to_torch(pad), theirs.to_torch(pad))
    assert mine.tolist(pad) == theirs.tolist(pad)


# -------------------------------------------------------------------------------- intended differences


@pytest.mark.parametrize(
    ("name", "value", "cut"),
    [
        ("target_tokens", [1.9], [1]),
        ("target_tokens", [2**63], [-(2**63)]),
        ("target_tokens", [float("nan")], [-(2**63)]),
        ("weights", [1e39], [float("inf")]),
    ],
)
def test_what_the_reference_cuts_we_refuse(name: str, value: Any, cut: Any) -> None:
    theirs = taken(reference.Datum, reference.ModelInput.from_ints([1]), {name: value})
    assert theirs.loss_fn_inputs[name].data == cut
    with pytest.raises(InvalidInputError, match=rf"loss_fn_inputs\['{name}'\]\[0\]"):
        ours.Datum(ours.ModelInput.from_ints([1]), {name: value})
