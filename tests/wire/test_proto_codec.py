"""The reader follows proto3's rules and names the path of a fault."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.proto_cases import MESSAGES, comparable, messages, random_message, varint

from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.wire.proto import codec as writer
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import (
    BOOL,
    FLOAT,
    INT32,
    INT64,
    STRING,
    UINT32,
    UINT64,
    Buffers,
    Message,
    plain,
    present,
    read_message,
    repeated,
    undecodable,
    write_message,
)


def read(table: Message, *parts: str | bytes) -> dict[str, Any]:
    """Join parts, given as bytes or as hexadecimal text, and read the message."""
    data = b"".join(bytes.fromhex(part) if isinstance(part, str) else part for part in parts)
    result = comparable(read_message(table, data))
    assert isinstance(result, dict)
    return result


def fault(table: Message, *parts: str | bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        read(table, *parts)
    return caught.value


def field(number: int, payload: bytes) -> bytes:
    """Return the bytes of a length-delimited field."""
    return varint(number << 3 | 2) + varint(len(payload)) + payload


NUMBERS = Message(
    "Numbers",
    plain(1, "i32", INT32),
    plain(2, "u32", UINT32),
    plain(3, "i64", INT64),
    plain(4, "u64", UINT64),
    plain(5, "flag", BOOL),
    repeated(6, "many", INT64),
    present(7, "real", FLOAT),
    repeated(8, "texts", STRING),
    repeated(9, "reals", FLOAT),
)


# ------------------------------------------------------------------------------------------ numbers
@pytest.mark.parametrize("number", [1, 127, 128, 300, 2**31 - 1, -1, -(2**31)])
def test_int32_takes_the_low_half_with_its_sign(number: int) -> None:
    assert read(NUMBERS, "08", varint(number & (2**64 - 1))) == {"i32": number}
    # Some writers send negative numbers in five bytes.
    assert read(NUMBERS, "08", varint(number & (2**32 - 1))) == {"i32": number}


# -------------------------------------------------------------------------------- presence and repetition


def test_lists_are_read_packed_unpacked_and_mixed() -> None:
    assert read(NUMBERS, "32 04 01 ac02 00") == {"many": [1, 300, 0]}
    assert read(NUMBERS, "30 01 32 02 02 03 30 04") == {"many": [1, 2, 3, 4]}
    assert read(NUMBERS, "32 00") == {}
    assert read(NUMBERS, "4d0000803f 4a080000004000004040") == {"reals": [(1.0, 1.0), (2.0, 1.0), (3.0, 1.0)]}


def test_a_truncated_packed_list_is_refused() -> None:
    error = fault(NUMBERS, "32 02 01 ac", "0801")
    assert error.path == "many[1]"


def test_repeated_submessages_are_merged() -> None:
    once, twice = field(3, b"\x18\x02"), field(3, b"\x20\x07\x18\x03")
    assert read(tables.SAMPLE_RESPONSE, once, twice) == {"topk_prompt_logprobs": {"k": 3, "length": 7}}
    first, second = field(5, field(4, b"\x01\x02")), field(5, b"\x18\x01" + field(4, b"\x03"))
    assert read(tables.SAMPLE_RESPONSE, first, second) == {
        "target_prompt_logprobs": {"shape": [1, 2, 3], "dtype": 1}
    }


def test_map_entries_may_lack_key_or_value_and_the_last_one_counts() -> None:
    value = b"\x11" + b"\0\0\0\0\0\0\xf8\x3f"
    assert read(tables.FORWARD_BACKWARD_OUTPUT, field(3, value)) == {"metrics": {"": (1.5, 1.0)}}
    assert read(tables.FORWARD_BACKWARD_OUTPUT, field(3, field(1, b"a"))) == {"metrics": {"a": (0.0, 1.0)}}
    assert read(
        tables.FORWARD_BACKWARD_OUTPUT, field(3, field(1, b"a") + value), field(3, field(1, b"a"))
    ) == {"metrics": {"a": (0.0, 1.0)}}
    twice = [field(2, field(1, b"a") + field(2, tensor)) for tensor in (b"\x18\x01", field(4, b"\x05"))]
    assert read(tables.DATUM, *twice) == {"loss_fn_inputs": {"a": {"shape": [5]}}}  # replaced, not merged


def test_unknown_fields_of_every_wire_type_are_skipped() -> None:
    unknown = ["78ac02", "79" + "00" * 8, "7a03616263", "7d" + "00" * 4, "7b 7801 7a0161 1b 1c 7c"]
    for part in unknown:
        assert read(NUMBERS, "0801", part, "1002") == {"i32": 1, "u32": 2}


def test_a_known_number_with_another_wire_type_is_unknown() -> None:
    assert read(NUMBERS, "0a0161", "0801") == {"i32": 1}
    assert read(NUMBERS, "0d00000000", "1801") == {"i64": 1}
    assert read(tables.SAMPLE_RESPONSE, "0801", "2003") == {"prompt_cache_hit_tokens": 3}


# ------------------------------------------------------------------------------------------ faults
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("08", "does not end"),
        ("08ff", "does not end"),
        ("08" + "80" * 10 + "00", "longer than 10 bytes"),
        ("80", "does not end"),
        ("00", "not a field number"),
        ("0200", "not a field number"),
        ("f8ffffffff01", "not a field number"),
        ("7e", "not a wire type"),
        ("7f", "not a wire type"),
        ("79" + "00" * 7, "ends after 7"),
        ("7d" + "00" * 3, "ends after 3"),
        ("7a05", "5 bytes announced, 0 present"),
        ("7affffffffffffffffff01", "bytes announced"),
        ("7b", "does not end"),
        ("7b0801", "does not end"),
        ("7c", "did not begin"),
        ("7b8401", "did not begin"),
        ("3d0000", "ends after 2"),
    ],
)
def test_broken_bytes_are_refused(data: str, reason: str) -> None:
    assert reason in str(fault(NUMBERS, data))


def test_groups_nest_at_most_a_hundred_deep() -> None:
    assert read(NUMBERS, b"\x7b" * 100 + b"\x7c" * 100) == {}
    assert "deeper than 100" in str(fault(NUMBERS, b"\x7b" * 101 + b"\x7c" * 101))


@pytest.mark.parametrize("text", [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"ab\xe2\x98"])
def test_text_must_be_utf8(text: bytes) -> None:
    error = fault(tables.FORWARD_BACKWARD_REQUEST, field(1, text))
    assert error.path == "model_id"
    assert "UTF-8" in str(error)
    assert fault(tables.FORWARD_BACKWARD_OUTPUT, field(3, field(1, text))).path == "metrics['']"


def test_faults_have_the_path_of_their_field() -> None:
    sequences = [field(1, b""), field(1, b"\x12\x00"), field(1, field(4, b"\x18\xff"))]
    error = fault(tables.SAMPLE_RESPONSE, *sequences)
    assert error.path == "sequences[2].topk_sampled_logprobs.k"
    assert str(error).startswith("sequences[2].topk_sampled_logprobs.k: cannot decode SampleResponse:")

    batch = field(2, field(2, field(1, b"logprobs") + field(2, b"\x12\x09")))
    assert (
        fault(tables.FORWARD_BACKWARD_OUTPUT, batch).path == "loss_fn_outputs[0].fields['logprobs'].offsets"
    )

    datum = field(3, field(1, b"") + field(1, field(1, b"\x0a\x05")))
    assert fault(tables.FORWARD_BACKWARD_REQUEST, datum).path == "data[0].model_input[1].encoded_text.tokens"

    assert fault(tables.SAMPLE_RESPONSE, "80").path == "$"


def test_a_refusal_by_a_type_becomes_a_wire_error() -> None:
    error = undecodable("SampleResponse", InvalidInputError("sequences: odd"))
    assert (error.path, str(error)) == ("$", "$: cannot decode SampleResponse: sequences: odd")


# -------------------------------------------------------------------------------- round trips and bounds
@pytest.mark.parametrize("table", MESSAGES, ids=lambda table: table.name)
@given(data=st.data())
def test_written_messages_are_read_back(table: Message, data: st.DataObject) -> None:
    message = data.draw(messages(table))
    written = write_message(table, message)
    assert written.size == len(written.join())
    assert comparable(read_message(table, written.join())) == comparable(message)


@pytest.mark.parametrize("table", MESSAGES, ids=lambda table: table.name)
def test_truncated_messages_are_read_or_refused(table: Message) -> None:
    data = write_message(table, random_message(random.Random(7), table)).join()
    for length in range(len(data)):
        with contextlib.suppress(WireError):
            assert isinstance(read_message(table, data[:length]), dict)


def test_payloads_are_views_of_the_received_bytes() -> None:
    data = field(1, field(2, bytes(1_000_000)))
    tracemalloc.start()
    try:
        message = read_message(tables.SAMPLE_RESPONSE, data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(message["sequences"][0]["tokens"]) == 1_000_000
    assert peak < 20_000


# ------------------------------- The writer refuses values out of range and copies no large payload
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
