"""The codec of outputs splits batches into separate arrays and checks every offset."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from support.each import for_each

from tinker_sync.errors import WireError
from tinker_sync.types import ForwardBackwardOutput, TensorData
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._tensors import BLOCK_CELLS, MOST_SHARED_BYTES
from tinker_sync.wire.proto.codec import read_message, write_message
from tinker_sync.wire.proto.outputs import (
    MAX_EMPTY_RECORDS,
    decode_forward_backward_output,
    encode_forward_backward_output,
)


def int64s(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


def column(
    data: bytes = b"", offsets: bytes = b"", dtype: int = tables.DTYPE_FLOAT32, *trailing: int
) -> dict[str, Any]:
    return {"data": data, "offsets": offsets, "dtype": dtype, "trailing_shape": trailing}


def message(*batches: dict[str, Any], kind: str = "m:ArrayRecord") -> bytes:
    plain = {"loss_fn_output_type": kind, "loss_fn_outputs": batches}
    return write_message(tables.FORWARD_BACKWARD_OUTPUT, plain).join()


def decoded(*batches: dict[str, Any], kind: str = "m:ArrayRecord") -> ForwardBackwardOutput:
    body = message(*batches, kind=kind)
    output = decode_forward_backward_output(body)
    assert decode_forward_backward_output(bytearray(body)) == output  # maybe in the memory of the message
    return output


def batch(num_datums: int = 0, **fields: Any) -> dict[str, Any]:
    return {"fields": fields, "num_datums": num_datums}


def fault(*batches: dict[str, Any]) -> WireError:
    with pytest.raises(WireError) as caught:
        decode_forward_backward_output(bytearray(message(*batches)))
    with pytest.raises(WireError) as again:
        decoded(*batches)
    assert str(caught.value) == str(again.value)
    return caught.value


ONES = np.ones(4, dtype="<f4").tobytes()


# ------------------------------------------------------------------------------------------ decoding
@pytest.mark.parametrize(
    ("kind", "with_batch", "expected"),
    [
        ("pkg.mod:ArrayRecord", True, "ArrayRecord"),
        ("a:b:C", True, "C"),
        ("Plain", True, "Plain"),
        ("", True, ""),
        ("", False, "ArrayRecord"),
        ("pkg.mod:ArrayRecord", False, "pkg.mod:ArrayRecord"),
    ],
)
def test_the_output_type_is_the_bare_class_name(kind: str, with_batch: bool, expected: str) -> None:
    batches = [batch(1)] if with_batch else []
    assert decoded(*batches, kind=kind).loss_fn_output_type == expected


@pytest.mark.parametrize(
    ("dtype", "layout", "widened"),
    [
        (tables.DTYPE_FLOAT32, "<f4", np.float32),
        (tables.DTYPE_INT64, "<i8", np.int64),
        (tables.DTYPE_INT32, "<i4", np.int64),
    ],
)
def test_numbers_are_widened(dtype: int, layout: str, widened: Any) -> None:
    values = np.array([1, -2, 2**31 - 1], dtype=layout)
    offsets = int64s(0, 2 * values.itemsize, 3 * values.itemsize)
    tensors = [
        record["x"]
        for record in decoded(batch(2, x=column(values.tobytes(), offsets, dtype))).loss_fn_outputs
    ]
    assert [tensor.dtype for tensor in tensors] == [np.dtype(widened).name] * 2
    assert [tensor.to_numpy().dtype for tensor in tensors] == [np.dtype(widened)] * 2
    assert [tensor.data for tensor in tensors] == [values[:2].tolist(), values[2:].tolist()]


def test_bfloat16_is_widened() -> None:
    values = np.array([1.0, -0.5, np.inf, 3.140625], dtype="<f4")
    halves = (values.view("<u4") >> 16).astype("<u2").tobytes()
    (record,) = decoded(batch(x=column(halves, int64s(0, 8), tables.DTYPE_BFLOAT16))).loss_fn_outputs
    assert record["x"].data == values.tolist()


def memory_of(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of this array, which may be a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    assert array.base is None
    return array


@pytest.mark.parametrize("dtype", [tables.DTYPE_FLOAT32, tables.DTYPE_BFLOAT16, tables.DTYPE_INT32])
def test_arrays_are_writable_aligned_and_small(dtype: int) -> None:
    itemsize = 2 if dtype == tables.DTYPE_BFLOAT16 else 4
    # Small and empty arrays, one that just fits a block, a larger one, and some after it.
    sizes = [1, 0, 100, 0, BLOCK_CELLS - 1, 3 * BLOCK_CELLS, 2, BLOCK_CELLS, 1, 1, 0]
    offsets = itemsize * np.cumsum([0, *sizes])
    data = np.arange(sum(sizes) * itemsize, dtype=np.uint8).tobytes()
    x = column(data, int64s(*offsets), dtype)
    tensors = [record["x"] for record in decoded(batch(len(sizes), x=x)).loss_fn_outputs]
    assert [tensor.shape for tensor in tensors] == [[size] for size in sizes]
    for index, tensor in enumerate(tensors):
        array = tensor.to_numpy()
        assert array.flags.writeable
        assert array.flags.aligned
        assert memory_of(array).size <= max(BLOCK_CELLS, array.size)
        assert not any(np.shares_memory(array, other.to_numpy()) for other in tensors[:index])
    (together,) = decoded(batch(x=column(data, int64s(0, len(data)), dtype))).loss_fn_outputs
    assert b"".join(tensor.to_numpy().tobytes() for tensor in tensors) == together["x"].to_numpy().tobytes()


@pytest.mark.parametrize("padding", range(8))
def test_arrays_keep_the_memory_of_their_message(padding: int) -> None:
    floats = np.arange(30_000, dtype="<f4")
    whole = np.arange(500, dtype="<i8")
    ends = [0, 1, 1, 20_000, 30_000]
    x = column(floats.tobytes(), int64s(*(4 * end for end in ends)))
    y = column(whole.tobytes(), int64s(0, 8, 16, 24, 4000), tables.DTYPE_INT64)
    body = bytearray(message(batch(4, x=x, y=y), kind="k" * padding))  # so the arrays begin anywhere
    records = decode_forward_backward_output(body).loss_fn_outputs
    arrays = [record[name].to_numpy() for name in "xy" for record in records]
    assert np.array_equal(np.concatenate(arrays[:4]), floats)
    assert np.array_equal(np.concatenate(arrays[4:]), whole)
    assert all(array.flags.writeable and array.flags.aligned for array in arrays)
    memory = np.frombuffer(body, np.uint8)
    assert all(np.shares_memory(array, memory) for array in arrays[:4] if array.size)
    for index, array in enumerate(arrays):
        assert not any(np.shares_memory(array, other) for other in arrays[:index])


def share(sizes: list[int], padding_bytes: int = 0, dtype: int = tables.DTYPE_FLOAT32) -> bool:
    """Return True if the first array of an answer uses the memory of the answer."""
    offsets = int64s(*(4 * np.cumsum([0, *sizes])))
    x = column(bytes(4 * sum(sizes)), offsets, dtype)
    body = bytearray(message(batch(len(sizes), x=x), kind="k" * padding_bytes))
    array = decode_forward_backward_output(body).loss_fn_outputs[0]["x"].to_numpy()
    return np.shares_memory(array, np.frombuffer(body, np.uint8))


def test_what_an_array_keeps_alive_is_bounded() -> None:
    most = MOST_SHARED_BYTES // 4
    assert share([1, most - 100])
    assert not share([1, most])  # the message is larger than its arrays
    assert not share([1, 1000], padding_bytes=5000)  # arrays are the smaller part
    assert not share([1, 1000], dtype=tables.DTYPE_INT32)  # widened


def test_trailing_shapes_divide_each_datum() -> None:
    tensors = decoded(batch(x=column(bytes(48), int64s(0, 24, 24, 48), 1, 3, 2))).loss_fn_outputs
    assert [record["x"].shape for record in tensors] == [[1, 3, 2], [0, 3, 2], [1, 3, 2]]
    assert [record["x"].to_numpy().shape for record in tensors] == [(1, 3, 2), (0, 3, 2), (1, 3, 2)]
    assert decoded(batch(x=column(b"", int64s(0, 0), 1, 0, 5))).loss_fn_outputs[0]["x"].shape == [0, 0, 5]


@for_each(
    ("given", "where"),
    [
        (batch(x=column(ONES, int64s(0, 16), 0)), "fields['x'].dtype"),
        (batch(x=column(ONES, int64s(0, 16), 5)), "fields['x'].dtype"),
        (batch(x=column(ONES[:-1], int64s(0, 12))), "fields['x'].data"),
        (batch(x=column(ONES, int64s(0, 16)[:-1])), "fields['x'].offsets"),
        (batch(x=column(ONES)), "fields['x'].offsets"),
        (batch(x=column(ONES, int64s(0, 20))), "fields['x'].offsets"),
        (batch(x=column(ONES, int64s(0, 2**62))), "fields['x'].offsets"),
        (batch(x=column(ONES, int64s(-4, 16))), "fields['x'].offsets"),
        (batch(x=column(ONES, int64s(0, 12, 8, 16))), "fields['x'].offsets"),
        (batch(x=column(ONES, int64s(0, 2**63 - 1, 0, 16))), "fields['x'].offsets"),
        (batch(x=column(ONES, int64s(0, 6, 16))), "fields['x'].offsets"),
        (batch(x=column(ONES, int64s(0, 16), 1, 3)), "fields['x'].trailing_shape"),
        (batch(x=column(ONES, int64s(0, 4, 16), 1, 2)), "fields['x'].trailing_shape"),
        (batch(x=column(ONES, int64s(0, 16), 1, 0)), "fields['x'].trailing_shape"),
        (batch(x=column(ONES, int64s(0, 16), 1, -1)), "fields['x'].trailing_shape"),
        (batch(x=column(ONES, int64s(0, 16), 1, 2**40, 2**40)), "fields['x'].trailing_shape"),
        (batch(x=column(b"", int64s(0, 0), 1, 0, 2**62, 2**62)), "fields['x'].trailing_shape"),
        (batch(x=column(b"", int64s(0, 0), 1, *[1] * 32)), "fields['x'].trailing_shape"),
        (batch(3, x=column(ONES, int64s(0, 8, 16))), "fields['x'].offsets"),
        (batch(10**18, x=column(ONES, int64s(0, 8, 16))), "fields['x'].offsets"),
        (batch(0, x=column(ONES, int64s(0, 16)), y=column(ONES, int64s(0, 8, 16))), "fields['y'].offsets"),
        (batch(-1), "num_datums"),
        (batch(-1, x=column(ONES, int64s(0, 16))), "num_datums"),
        (batch(10**18), "num_datums"),
    ],
)
def test_inconsistent_batches_are_refused_with_their_path(given: dict[str, Any], where: str) -> None:
    good = batch(1, x=column(ONES, int64s(0, 16)))
    assert fault(good, given).path == f"loss_fn_outputs[1].{where}"


def test_empty_records_are_bounded_over_all_batches() -> None:
    assert len(decoded(batch(MAX_EMPTY_RECORDS)).loss_fn_outputs) == MAX_EMPTY_RECORDS
    error = fault(batch(MAX_EMPTY_RECORDS), batch(1))
    assert error.path == "loss_fn_outputs[1].num_datums"
    # A negative count does not offset the others.
    assert fault(batch(-(10**18)), batch(10**18)).path == "loss_fn_outputs[0].num_datums"


def test_a_false_count_of_data_costs_no_memory() -> None:
    claims = [
        batch(10**18),
        batch(2**40, x=column(ONES, int64s(0, 16))),
        batch(x=column(b"", b"", 1, 0, 2**50)),
    ]
    tracemalloc.start()
    try:
        for claim in claims:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            with pytest.raises(WireError):
                decoded(claim, batch(1, y=column(b"x")))
            assert tracemalloc.get_traced_memory()[1] - before < 50_000
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------ encoding
def output(*records: dict[str, TensorData]) -> ForwardBackwardOutput:
    return ForwardBackwardOutput("ArrayRecord", list(records), {"loss:sum": 0.0})


def tensor(*shape: int, dtype: Any = np.float32) -> TensorData:
    return TensorData.from_numpy(np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape))


def test_outputs_round_trip() -> None:
    sent = output(
        {"x": tensor(3), "k": tensor(3, 2, dtype=np.int64)},
        {"x": tensor(0), "k": tensor(0, 2, dtype=np.int64)},
        {"x": tensor(5), "k": tensor(5, 4, dtype=np.int64)},
        {"x": tensor(1)},
        {},
        {},
    )
    body = encode_forward_backward_output(sent).join()
    assert decode_forward_backward_output(body) == sent
    batches = read_message(tables.FORWARD_BACKWARD_OUTPUT, body)["loss_fn_outputs"]
    assert [one["num_datums"] for one in batches] == [2, 1, 1, 2]


def test_sparse_tensors_and_scalars_are_encoded_densely() -> None:
    sparse = TensorData([5], "int64", [1, 3], [0, 1], [2])
    scalar = TensorData.from_numpy(np.float32(1.5))
    (record,) = decode_forward_backward_output(
        encode_forward_backward_output(output({"a": sparse, "b": scalar})).join()
    ).loss_fn_outputs
    assert record["a"].tolist() == [[0, 0, 5]]
    assert (record["b"].shape, record["b"].data) == ([1], [1.5])
