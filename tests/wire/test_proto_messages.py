"""The codec of training requests, for the client and for the embedded server."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from support.proto_cases import comparable
from support.values import for_each

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardOutput,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TensorData,
    TopkLogprobs,
)
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._tensors import BLOCK_CELLS, MOST_SHARED_BYTES
from tinker_sync.wire.proto.codec import read_message, write_message
from tinker_sync.wire.proto.outputs import (
    MAX_EMPTY_RECORDS,
    decode_forward_backward_output,
    encode_forward_backward_output,
)
from tinker_sync.wire.proto.requests import decode_forward_backward_request, encode_forward_backward_request
from tinker_sync.wire.proto.samples import decode_sample_response, encode_sample_response


def request(*data: Datum, config: Any = None, seq_id: int | None = 1) -> types.ForwardBackwardRequest:
    return types.ForwardBackwardRequest(
        types.ForwardBackwardInput(list(data), "cross_entropy", config), "model", seq_id
    )


def datum(*chunks: Any, **inputs: Any) -> Datum:
    return Datum(types.ModelInput(chunks=list(chunks)), inputs)


def encoded(*data: Datum, **more: Any) -> dict[str, Any]:
    """Encode a request of these data, and return it as the reader reads it."""
    forward_only = more.pop("forward_only", False)
    body = encode_forward_backward_request(request(*data, **more), forward_only=forward_only).join()
    result = comparable(read_message(tables.FORWARD_BACKWARD_REQUEST, body))
    assert isinstance(result, dict)
    return result


def refused(*data: Datum, **more: Any) -> str:
    with pytest.raises(InvalidInputError) as caught:
        encode_forward_backward_request(request(*data, **more))
    return str(caught.value)


def decoded(plain: dict[str, Any]) -> types.ForwardBackwardRequest:
    return decode_forward_backward_request(write_message(tables.FORWARD_BACKWARD_REQUEST, plain).join())[0]


def wire_fault(plain: dict[str, Any]) -> WireError:
    with pytest.raises(WireError) as caught:
        decoded(plain)
    return caught.value


# ------------------------------------------------------------------------------------------ encoding
def test_forward_only_and_sequence_number_are_encoded() -> None:
    assert encoded(seq_id=None) == {"model_id": "model", "loss_fn": "cross_entropy"}
    assert encoded(seq_id=7, forward_only=True)["forward_only"] is True
    assert encoded(seq_id=2**31 - 1)["seq_id"] == 2**31 - 1
    assert refused(seq_id=2**31) == "seq_id: 2147483648 does not fit int32"


def test_numbers_of_the_config_fill_both_maps_and_text_one() -> None:
    plain = encoded(config={"mode": "token", "beta": 0.5, "on": True, "n": 3})
    numbers = {"beta": (0.5, 1.0), "on": (1.0, 1.0), "n": (3.0, 1.0)}
    assert plain["loss_fn_config"] == numbers
    assert plain["loss_fn_config_v2"] == {
        "mode": {"text": "token"},
        **{name: {"number": number} for name, number in numbers.items()},
    }
    assert list(plain["loss_fn_config_v2"]) == ["mode", "beta", "on", "n"]
    assert "loss_fn_config" not in encoded(config={})


def test_every_kind_of_chunk_is_encoded() -> None:
    chunks = encoded(
        datum(
            EncodedTextChunk(tokens=[1, -1, 2**31 - 1]),
            types.ImageChunk(data=b"png", format="png"),
            types.ImageChunk(data=b"jpg", format="jpeg", expected_tokens=0),
            types.DmelChunk(dmel=b"\x00\x01\x05"),
            EncodedTextChunk(tokens=[]),
        )
    )["data"][0]["model_input"]
    assert chunks == [
        {"encoded_text": {"tokens": np.array([1, -1, 2**31 - 1], dtype="<i4").tobytes()}},
        {"image": {"data": b"png", "format": "png"}},
        {"image": {"data": b"jpg", "format": "jpeg", "expected_tokens": 0}},
        {"dmel": {"dmel": b"\x00\x01\x05"}},
        {"encoded_text": {}},
    ]


def test_an_image_by_address_is_refused_with_its_path() -> None:
    pointer = types.ImageAssetPointerChunk(format="png", location="asset://x")
    good = datum(EncodedTextChunk(tokens=[1]))
    text = refused(good, good, good, datum(EncodedTextChunk(tokens=[1]), pointer))
    assert text.startswith("data[3].model_input.chunks[1]: ImageAssetPointerChunk cannot be sent")


def test_a_token_changed_after_creation_is_refused_with_its_path() -> None:
    tokens = np.array([1, 2, 3])
    spoiled = datum(EncodedTextChunk(tokens=tokens))
    tokens[2] = 2**31
    text = refused(datum(EncodedTextChunk(tokens=[1])), spoiled)
    assert text.startswith("data[1].model_input.chunks[0]: tokens[2]: ")


def test_names_of_inputs_must_be_text() -> None:
    odd = Datum(types.ModelInput.from_ints([1]), {"x\ud800": np.zeros(1)})
    assert refused(odd).startswith("data[0].loss_fn_inputs['x\\ud800']: the text has no UTF-8 form")


@pytest.mark.parametrize("shape", [None, [3], [1, 3], [3, 1, 1]])
def test_dense_tensors_are_encoded_with_and_without_a_shape(shape: list[int] | None) -> None:
    tensor = types.TensorData([1, 2, 3], "int64", shape)
    plain = encoded(datum(x=tensor))["data"][0]["loss_fn_inputs"]["x"]
    expected = {"dtype": tables.DTYPE_INT64, "dense": np.arange(1, 4).tobytes()}
    assert plain == ({**expected, "shape": shape} if shape else expected)


def test_sparse_tensors_stay_sparse() -> None:
    tensor = types.TensorData([7.0, 8.0], "float32", [2, 5], [0, 2, 2], [1, 4])
    plain = encoded(datum(weights=tensor))["data"][0]["loss_fn_inputs"]["weights"]
    assert plain == {
        "dtype": tables.DTYPE_FLOAT32,
        "shape": [2, 5],
        "sparse_csr": {
            "values": np.array([7, 8], dtype="<f4").tobytes(),
            "crow_indices": np.array([0, 2, 2]).tobytes(),
            "col_indices": np.array([1, 4]).tobytes(),
        },
    }


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6)[::2],
        np.arange(6).reshape(2, 3).T,
        np.arange(3).astype(">i8"),
        np.arange(3, dtype=np.uint8),
    ],
)
def test_other_layouts_become_row_major_little_endian(array: np.ndarray) -> None:
    plain = encoded(datum(EncodedTextChunk(tokens=array.reshape(-1)), x=array))["data"][0]
    assert plain["loss_fn_inputs"]["x"]["dense"] == array.astype("<i8").tobytes()
    assert plain["model_input"] == [{"encoded_text": {"tokens": array.astype("<i4").tobytes()}}]


# ------------------------------------------------------------------------------------------ decoding
def test_a_request_round_trips() -> None:
    first = datum(
        EncodedTextChunk(tokens=[1, 2]),
        types.ImageChunk(data=b"x", format="png", expected_tokens=3),
        types.DmelChunk(dmel=b"\0\1\5"),
        target_tokens=types.TensorData([1, 2], "int64", [2, 9], [0, 1, 2], [3, 8]),
        weights=np.ones((2, 9), dtype=np.float32),
    )
    sent = request(first, datum(), config={"a": 1.5, "b": "text"})
    body = encode_forward_backward_request(sent, forward_only=True).join()
    assert decode_forward_backward_request(body) == (sent, True)


def test_the_newer_map_of_settings_takes_precedence() -> None:
    old = {"loss_fn_config": {"a": 1.0, "b": 2.0}}
    assert decoded(old).forward_backward_input.loss_fn_config == {"a": 1.0, "b": 2.0}
    new = {**old, "loss_fn_config_v2": {"a": {"number": 0.0}, "c": {"text": ""}}}
    assert decoded(new).forward_backward_input.loss_fn_config == {"a": 0.0, "c": ""}
    assert decoded({}).forward_backward_input.loss_fn_config is None


TEXT = {"encoded_text": {"tokens": bytes(4)}}


@pytest.mark.parametrize(
    ("plain", "path"),
    [
        ({"model_input": [TEXT, {}]}, "data[1].model_input[1]"),
        (
            {"model_input": [{"encoded_text": {"tokens": b"abc"}}]},
            "data[1].model_input[0].encoded_text.tokens",
        ),
        ({"model_input": [TEXT, {"image": {"format": "bmp"}}]}, "data[1].model_input[1].image"),
        ({"loss_fn_inputs": {"w": {}}}, "data[1].loss_fn_inputs['w'].dtype"),
        ({"loss_fn_inputs": {"w": {"dtype": 9}}}, "data[1].loss_fn_inputs['w'].dtype"),
        ({"loss_fn_inputs": {"w": {"dtype": 1, "dense": bytes(6)}}}, "data[1].loss_fn_inputs['w'].dense"),
        (
            {"loss_fn_inputs": {"w": {"dtype": 1, "dense": bytes(8), "shape": [3]}}},
            "data[1].loss_fn_inputs['w'].shape",
        ),
        ({"model_input_spans": [{}]}, "data[1].model_input_spans[0]"),
        (
            {
                "loss_fn_input_spans": [
                    {"prompt_tokens": {"sequence_id": "s"}},
                    {"sampled_tokens": {"length": 1}},
                ]
            },
            "data[1].loss_fn_input_spans[1]",
        ),
        (
            {"model_input_spans": [{"prompt_tokens": {"sequence_id": "s", "offset": -1}}]},
            "data[1].model_input_spans[0]",
        ),
    ],
)
def test_values_that_a_type_refuses_are_reported_with_their_path(plain: dict[str, Any], path: str) -> None:
    assert wire_fault({"data": [{"model_input": [TEXT]}, plain]}).path == path


def test_a_setting_must_have_a_value() -> None:
    assert wire_fault({"loss_fn_config_v2": {"a": {}}}).path == "loss_fn_config_v2['a']"


# ------------------- The codec of sample responses keeps presence and refuses inconsistent messages
def decoded_sample(**plain: Any) -> SampleResponse:
    return decode_sample_response(write_message(tables.SAMPLE_RESPONSE, plain).join())


def fault(**plain: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        decoded_sample(**plain)
    return caught.value


def again(response: SampleResponse) -> SampleResponse:
    return decode_sample_response(encode_sample_response(response).join())


def topk(length: int, k: int, cells: int | None = None) -> dict[str, Any]:
    cells = length * k if cells is None else cells
    return {"token_ids": bytes(4 * cells), "logprobs": bytes(4 * cells), "k": k, "length": length}


# ------------------------------------------------------------------------------------------ decoding
def test_presence_of_logprobs_is_kept() -> None:
    absent, empty = decoded_sample(
        sequences=[{"tokens": bytes(8)}, {"tokens": bytes(8), "logprobs": b""}]
    ).sequences
    assert absent.logprobs_np is None
    assert empty.logprobs_np is not None
    assert empty.logprobs == []
    assert decoded_sample().prompt_logprobs_np is None
    assert decoded_sample(prompt_logprobs=b"").prompt_logprobs == []


def test_arrays_are_writable_and_separate() -> None:
    response = decoded_sample(
        sequences=[{"tokens": bytes(8), "logprobs": bytes(8), "topk_sampled_logprobs": topk(2, 3)}],
        prompt_logprobs=bytes(12),
        target_prompt_logprobs={"dtype": 1, "dense": bytes(16), "shape": [2, 2]},
    )
    (sequence,) = response.sequences
    top, target = sequence.topk_logprobs_np, response.target_prompt_logprobs
    arrays = [sequence.tokens_np, sequence.logprobs_np, top.token_ids, top.logprobs]
    for array in (*arrays, response.prompt_logprobs_np, target.to_numpy()):
        assert array.flags.writeable
        assert array.flags.aligned
        assert array.base is None or array.base.nbytes == array.nbytes


@pytest.mark.parametrize(
    ("dtype", "data", "expected"),
    [
        (tables.DTYPE_BFLOAT16, "803f 00c0", [1.0, -2.0]),
        (tables.DTYPE_INT32, "01000000 ffffffff", [1, -1]),
        (tables.DTYPE_INT64, "0100000000000000 ffffffffffffff7f", [1, 2**63 - 1]),
        (tables.DTYPE_FLOAT32, "0000803f 000000c0", [1.0, -2.0]),
    ],
)
def test_plain_tensors_are_widened(dtype: int, data: str, expected: list[float]) -> None:
    tensor = {"dtype": dtype, "dense": bytes.fromhex(data)}
    found = decoded_sample(target_prompt_logprobs=tensor).target_prompt_logprobs
    assert found.data == expected
    assert found.to_numpy().dtype == np.dtype(found.dtype)
    assert found.shape is None


CSR = {
    "values": bytes(8),
    "crow_indices": np.array([0, 1, 2]).tobytes(),
    "col_indices": np.array([2, 0]).tobytes(),
}


def sparse(shape: list[int] | None = None, **changed: bytes) -> dict[str, Any]:
    return {"dtype": 1, "shape": [2, 3] if shape is None else shape, "sparse_csr": {**CSR, **changed}}


def int64s(*numbers: int) -> bytes:
    return np.array(numbers, dtype="<i8").tobytes()


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ({}, ".dtype"),
        ({"dtype": -1}, ".dtype"),
        ({"dtype": 1, "dense": bytes(7)}, ".dense"),
        ({"dtype": 1, "dense": bytes(8), "shape": [1]}, ".shape"),
        ({"dtype": 1, "dense": bytes(8), "shape": [-1, -2]}, ".shape"),
        ({"dtype": 1, "dense": b"", "shape": [0, 2**62, 2]}, ".shape"),
        ({"dtype": 1, "dense": bytes(4), "shape": [1] * 33}, ".shape"),
        ({"dtype": 1, "shape": [2**32, 2**32]}, ".shape"),
        (sparse([]), ".sparse_csr"),
        (sparse([2, 3, 1]), ".sparse_csr"),
        (sparse([10**18, 3]), ".shape"),
        (sparse([10**17, 3]), ".sparse_csr"),
        (sparse([2, 2]), ".sparse_csr"),
        (sparse(values=bytes(4)), ".sparse_csr"),
        (sparse(values=bytes(6)), ".sparse_csr.values"),
        (sparse(crow_indices=b""), ".sparse_csr"),
        (sparse(crow_indices=bytes(23)), ".sparse_csr.crow_indices"),
        (sparse(crow_indices=int64s(0, 3, 2)), ".sparse_csr"),
        (sparse(crow_indices=int64s(1, 1, 2)), ".sparse_csr"),
        (sparse(crow_indices=int64s(0, 1, 1)), ".sparse_csr"),
        (sparse(col_indices=int64s(2, -1)), ".sparse_csr"),
        (sparse(col_indices=int64s(2)), ".sparse_csr"),
    ],
)
def test_inconsistent_tensors_are_refused_with_their_path(tensor: dict[str, Any], where: str) -> None:
    assert fault(target_prompt_logprobs=tensor).path == f"target_prompt_logprobs{where}"
    good = {"dtype": 1, "dense": bytes(4)}
    both = {"tokens": good, "logprobs": tensor}
    assert fault(prompt_alt_tokens=both).path == f"prompt_alt_tokens.logprobs{where}"


@pytest.mark.parametrize(
    ("sequence", "where"),
    [
        ({"stop_reason": 2}, "stop_reason"),
        ({"stop_reason": -1}, "stop_reason"),
        ({"tokens": bytes(5)}, "tokens"),
        ({"tokens": bytes(8), "logprobs": bytes(6)}, "logprobs"),
        ({"tokens": bytes(8), "logprobs": bytes(4)}, "logprobs"),
        ({"topk_sampled_logprobs": topk(2, 3, 5)}, "topk_sampled_logprobs.token_ids"),
        ({"topk_sampled_logprobs": topk(2**32 - 1, 2**32 - 1, 1)}, "topk_sampled_logprobs.token_ids"),
        ({"topk_sampled_logprobs": topk(0, 0, 1)}, "topk_sampled_logprobs.token_ids"),
        ({"topk_sampled_logprobs": {**topk(1, 2), "logprobs": bytes(4)}}, "topk_sampled_logprobs.logprobs"),
        ({"topk_sampled_logprobs": {**topk(1, 2), "logprobs": bytes(3)}}, "topk_sampled_logprobs.logprobs"),
    ],
)
def test_inconsistent_sequences_are_refused_with_their_path(sequence: dict[str, Any], where: str) -> None:
    assert fault(sequences=[{}, {}, sequence]).path == f"sequences[2].{where}"


# ------------------------------------------------------------------------------------------ encoding
def test_responses_round_trip() -> None:
    ids, logprobs = np.arange(6, dtype=np.int32).reshape(3, 2), np.zeros((3, 2), dtype=np.float32)
    alternatives = PromptAltTokens(
        TensorData([1, 2], "int64", [2, 1]), TensorData([-1.0, -2.0], "float32", [2, 1])
    )
    response = SampleResponse(
        [
            SampledSequence("stop", None, ids[:, 0], logprobs[:, 1], TopkLogprobs(ids, logprobs)),
            SampledSequence("length", None, np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)),
        ],
        np.array([np.nan, -1.0], dtype=np.float32),
        TopkLogprobs(ids, logprobs),
        TensorData([1.0], "float32", [1, 4], [0, 1], [3]),
        12,
        alternatives,
    )
    assert again(response) == response


def test_lists_are_encoded_like_arrays() -> None:
    rows = [None, [(5, -1.0), (6, -2.0)], [(7, -3.0)]]
    sequence = SampledSequence("stop", None, _tokens_list=[1, 2, 3], _logprobs_list=[-1.0, -2.0, -3.0])
    response = again(
        SampleResponse([sequence], _prompt_logprobs_list=[None, -1.5], _topk_prompt_logprobs_list=rows)
    )
    assert response.sequences[0].tokens == [1, 2, 3]
    assert response.sequences[0].logprobs == [-1.0, -2.0, -3.0]
    assert response.prompt_logprobs == [None, -1.5]
    assert response.topk_prompt_logprobs == rows


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (SampleResponse([SampledSequence("stop", None, np.array([1, 2**31]))]), "sequences[0].tokens[1]"),
        (SampleResponse([], np.array([0, 1e39])), "prompt_logprobs[1]"),
        (SampleResponse([], prompt_cache_hit_tokens=2**31), "prompt_cache_hit_tokens: 2147483648"),
        (
            SampleResponse([], topk_prompt_logprobs_np=TopkLogprobs(np.zeros((2, 1), int), np.zeros((1, 2)))),
            "topk_prompt_logprobs: token_ids and logprobs must be two matrices of one shape",
        ),
    ],
)
def test_values_out_of_range_are_refused_with_their_path(response: SampleResponse, text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        encode_sample_response(response)
    assert str(caught.value).startswith(text)


# ----------------- The codec of outputs splits batches into separate arrays and checks every offset
def column(
    data: bytes = b"", offsets: bytes = b"", dtype: int = tables.DTYPE_FLOAT32, *trailing: int
) -> dict[str, Any]:
    return {"data": data, "offsets": offsets, "dtype": dtype, "trailing_shape": trailing}


def message(*batches: dict[str, Any], kind: str = "m:ArrayRecord") -> bytes:
    plain = {"loss_fn_output_type": kind, "loss_fn_outputs": batches}
    return write_message(tables.FORWARD_BACKWARD_OUTPUT, plain).join()


def decoded_output(*batches: dict[str, Any], kind: str = "m:ArrayRecord") -> ForwardBackwardOutput:
    body = message(*batches, kind=kind)
    output = decode_forward_backward_output(body)
    assert decode_forward_backward_output(bytearray(body)) == output  # maybe in the memory of the message
    return output


def batch(num_datums: int = 0, **fields: Any) -> dict[str, Any]:
    return {"fields": fields, "num_datums": num_datums}


def output_fault(*batches: dict[str, Any]) -> WireError:
    with pytest.raises(WireError) as caught:
        decode_forward_backward_output(bytearray(message(*batches)))
    with pytest.raises(WireError) as again:
        decoded_output(*batches)
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
    assert decoded_output(*batches, kind=kind).loss_fn_output_type == expected


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
        for record in decoded_output(batch(2, x=column(values.tobytes(), offsets, dtype))).loss_fn_outputs
    ]
    assert [tensor.dtype for tensor in tensors] == [np.dtype(widened).name] * 2
    assert [tensor.to_numpy().dtype for tensor in tensors] == [np.dtype(widened)] * 2
    assert [tensor.data for tensor in tensors] == [values[:2].tolist(), values[2:].tolist()]


def test_bfloat16_is_widened() -> None:
    values = np.array([1.0, -0.5, np.inf, 3.140625], dtype="<f4")
    halves = (values.view("<u4") >> 16).astype("<u2").tobytes()
    (record,) = decoded_output(batch(x=column(halves, int64s(0, 8), tables.DTYPE_BFLOAT16))).loss_fn_outputs
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
    tensors = [record["x"] for record in decoded_output(batch(len(sizes), x=x)).loss_fn_outputs]
    assert [tensor.shape for tensor in tensors] == [[size] for size in sizes]
    for index, tensor in enumerate(tensors):
        array = tensor.to_numpy()
        assert array.flags.writeable
        assert array.flags.aligned
        assert memory_of(array).size <= max(BLOCK_CELLS, array.size)
        assert not any(np.shares_memory(array, other.to_numpy()) for other in tensors[:index])
    (together,) = decoded_output(batch(x=column(data, int64s(0, len(data)), dtype))).loss_fn_outputs
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
    tensors = decoded_output(batch(x=column(bytes(48), int64s(0, 24, 24, 48), 1, 3, 2))).loss_fn_outputs
    assert [record["x"].shape for record in tensors] == [[1, 3, 2], [0, 3, 2], [1, 3, 2]]
    assert [record["x"].to_numpy().shape for record in tensors] == [(1, 3, 2), (0, 3, 2), (1, 3, 2)]
    assert decoded_output(batch(x=column(b"", int64s(0, 0), 1, 0, 5))).loss_fn_outputs[0]["x"].shape == [
        0,
        0,
        5,
    ]


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
    assert output_fault(good, given).path == f"loss_fn_outputs[1].{where}"


def test_empty_records_are_bounded_over_all_batches() -> None:
    assert len(decoded_output(batch(MAX_EMPTY_RECORDS)).loss_fn_outputs) == MAX_EMPTY_RECORDS
    error = output_fault(batch(MAX_EMPTY_RECORDS), batch(1))
    assert error.path == "loss_fn_outputs[1].num_datums"
    # A negative count does not offset the others.
    assert output_fault(batch(-(10**18)), batch(10**18)).path == "loss_fn_outputs[0].num_datums"


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
                decoded_output(claim, batch(1, y=column(b"x")))
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
