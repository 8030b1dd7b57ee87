"""The writer refuses values out of range and copies no large payload."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinker_sync.errors import InvalidInputError
from tinker_sync.wire.proto import codec as writer
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import (
    FLOAT,
    STRING,
    UINT64,
    Buffers,
    Message,
    plain,
    present,
    read_message,
    repeated,
    write_message,
)

KINDS = Message(
    "Kinds", plain(1, "seed", UINT64), present(2, "temperature", FLOAT), repeated(3, "values", STRING)
)


def refused(table: Message, value: dict[str, Any]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        write_message(table, value)
    return str(caught.value)


# ------------------------------------------------------------------------------------------ writing


def test_defaults_and_none_are_left_out() -> None:
    value = {
        "model_id": "",
        "seq_id": 0,
        "forward_only": False,
        "data": [],
        "loss_fn_config": {},
        "loss_fn": None,
    }
    assert write_message(tables.FORWARD_BACKWARD_REQUEST, value).size == 0
    assert write_message(tables.SPARSE_CSR, {"values": b"", "crow_indices": memoryview(b"")}).pieces == []


def test_numpy_numbers_are_accepted() -> None:
    value = {"prompt_cache_hit_tokens": np.int64(7)}
    assert write_message(tables.SAMPLE_RESPONSE, value).join().hex() == "2007"
    assert (
        write_message(tables.LOSS_CONFIG_VALUE, {"number": np.float32(0.5)}).join()[-8:].hex()
        == "000000000000e03f"
    )


# ------------------------------------------------------------------------------------------ refusals
@pytest.mark.parametrize(
    ("table", "value", "text"),
    [
        (tables.FORWARD_BACKWARD_REQUEST, {"seq_id": 2**31}, "seq_id: 2147483648 does not fit int32"),
        (tables.TOPK_LOGPROBS, {"k": -1}, "k: -1 does not fit uint32"),
        (KINDS, {"seed": 2**64}, "seed: 18446744073709551616 does not fit uint64"),
        (KINDS, {"seed": 1.0}, "seed: expected a whole number, got float"),
        (KINDS, {"temperature": 1e39}, "temperature: 1e+39 does not fit float"),
        (KINDS, {"temperature": "hot"}, "temperature: expected a number, got str"),
        (tables.TENSOR, {"shape": [1, 2**63]}, "shape[1]: 9223372036854775808 does not fit int64"),
        (KINDS, {"values": ["a", b"b"]}, "values[1]: expected text, got bytes"),
        (KINDS, {"values": ["a\ud800"]}, "values[0]: the text has no UTF-8 form: a lone surrogate at 1"),
        (tables.IMAGE_CHUNK, {"data": "text"}, "data: expected bytes, got str"),
        (
            tables.FORWARD_BACKWARD_REQUEST,
            {"forward_only": 1},
            "forward_only: expected true or false, got int",
        ),
        (tables.CHUNK, {"image": b"raw"}, "image: expected ImageChunk, got bytes"),
        (tables.CHUNK, {"image": {}, "dmel": {}}, "only one of image, encoded_text, dmel can be set"),
        (tables.CHUNK, {"picture": {}}, "Chunk has no field 'picture'"),
        (
            tables.DATUM,
            {"loss_fn_inputs": {"w": {"sparse_csr": {"values": 3}}}},
            "loss_fn_inputs['w'].sparse_csr.values: expected bytes, got int",
        ),
        (tables.DATUM, {"loss_fn_inputs": {3: {}}}, "loss_fn_inputs[3]: expected text, got int"),
        (
            tables.FORWARD_BACKWARD_OUTPUT,
            {"metrics": {"a": None}},
            "metrics['a']: expected a number, got NoneType",
        ),
    ],
)
def test_bad_values_are_refused_with_their_path(table: Message, value: dict[str, Any], text: str) -> None:
    assert text in refused(table, value)


def test_a_message_above_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MAX_SIZE", 100)
    assert write_message(tables.DMEL_CHUNK, {"dmel": bytes(98)}).size == 100
    assert "the message has 101 bytes; at most 100 can be sent" in refused(
        tables.DMEL_CHUNK, {"dmel": bytes(99)}
    )


# ------------------------------------------------------------------------------------------ buffers
def test_views_are_not_copied() -> None:
    array = np.arange(1000)
    view = memoryview(array).cast("B")
    out = write_message(tables.SAMPLE_RESPONSE, {"sequences": [{"tokens": view}]})
    assert any(np.shares_memory(np.frombuffer(piece, np.uint8), array) for piece in out)
    assert out.size == len(out.join()) == 8000 + 3 + 3
    assert read_message(tables.SAMPLE_RESPONSE, out.join())["sequences"][0]["tokens"] == array.tobytes()


def test_buffers_serve_as_bytes_and_as_messages() -> None:
    inner = write_message(tables.TOPK_LOGPROBS, {"k": 2, "token_ids": Buffers([b"ab", memoryview(b"cd")])})
    expected = write_message(
        tables.SAMPLED_SEQUENCE, {"topk_sampled_logprobs": {"k": 2, "token_ids": b"abcd"}}
    )
    assert write_message(tables.SAMPLED_SEQUENCE, {"topk_sampled_logprobs": inner}).join() == expected.join()
