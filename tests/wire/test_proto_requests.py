"""The codec of training requests, for the client and for the embedded server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.proto_random import comparable

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.types import Datum, EncodedTextChunk
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import read_message, write_message
from tinker_sync.wire.proto.requests import decode_forward_backward_request, encode_forward_backward_request


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
