"""The protobuf codecs agree with the reference client's protobuf classes, and read and write what it does."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker.types as theirs
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet
from hypothesis import given, settings
from hypothesis import strategies as st
from support.proto_cases import MESSAGES, comparable, messages, mutated, random_message
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import forward_backward_request_to_proto
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

import tinker_sync.types as ours
from tinker_sync.errors import WireError
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import Field, FieldRule, Message, read_message, write_message
from tinker_sync.wire.proto.outputs import decode_forward_backward_output, encode_forward_backward_output
from tinker_sync.wire.proto.requests import decode_forward_backward_request, encode_forward_backward_request
from tinker_sync.wire.proto.samples import decode_sample_response, encode_sample_response

TOP_LEVEL = (tables.FORWARD_BACKWARD_REQUEST, tables.FORWARD_BACKWARD_OUTPUT, tables.SAMPLE_RESPONSE)
KINDS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_DOUBLE: "double",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_INT32: "int32",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


# ------------------------------------------------------------------------------------------ the tables


def described(field: FieldDescriptor) -> tuple[Any, ...]:
    kind = field.message_type.name if field.message_type else KINDS[field.type]
    repeated = field.is_repeated
    if repeated and field.message_type and field.message_type.GetOptions().map_entry:
        value = field.message_type.fields_by_name["value"]
        assert field.message_type.fields_by_name["key"].type == FieldDescriptor.TYPE_STRING
        return field.number, field.name, FieldRule.MAP, described(value)[3], ()
    rule = FieldRule.REPEATED if repeated else FieldRule.PRESENT if field.has_presence else FieldRule.PLAIN
    group = field.containing_oneof
    # In the descriptor, an `optional` field is a oneof with one member.
    rivals = {member.name for member in group.fields} - {field.name} if group else set()
    return field.number, field.name, rule, kind, tuple(sorted(rivals))


def tabled(field: Field) -> tuple[Any, ...]:
    kind = field.kind
    if field.rule is FieldRule.MAP:
        assert isinstance(kind, Message)
        kind = kind.by_name["value"].kind
    return field.number, field.name, field.rule, kind.name, tuple(sorted(field.rivals))


def test_tables_are_the_schema() -> None:
    messages: dict[str, Descriptor] = dict(pb.DESCRIPTOR.message_types_by_name)
    unused = {"SamplingParams", "StopStrings", "StopTokens"}  # sampling requests are JSON
    assert {table.name for table in MESSAGES} == set(messages) - unused
    for table in MESSAGES:
        expected = [described(field) for field in messages[table.name].fields]
        assert [tabled(field) for field in table.fields] == sorted(expected)


def test_enum_numbers_are_the_schema() -> None:
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        for value in enum.values:
            assert getattr(tables, value.name) == value.number


# ------------------------------------------------------------------------------------------ conversions


def to_reference(table: Message, value: dict[str, Any], message: Any = None) -> Any:
    """Return a message of the reference client with this content."""
    message = getattr(pb, table.name)() if message is None else message
    for name, item in value.items():
        field = table.by_name[name]
        inside = field.kind.by_name["value"].kind if field.rule is FieldRule.MAP else field.kind
        target = getattr(message, name)
        if field.rule is FieldRule.MAP:
            for key, entry in item.items():
                if isinstance(inside, Message):
                    to_reference(inside, entry, target[key])
                else:
                    target[key] = entry
        elif field.rule is FieldRule.REPEATED and isinstance(inside, Message):
            for element in item:
                to_reference(inside, element, target.add())
        elif field.rule is FieldRule.REPEATED:
            target.extend(item)
        elif isinstance(inside, Message):
            target.SetInParent()
            to_reference(inside, item, target)
        else:
            setattr(message, name, item)
    return message


def from_reference(table: Message, message: Any) -> dict[str, Any]:
    """Return the content of the reference client's message in the form of this package's reader."""
    value: dict[str, Any] = {}
    for field in table.fields:
        found = getattr(message, field.name)
        inside = field.kind.by_name["value"].kind if field.rule is FieldRule.MAP else field.kind
        if field.rule is FieldRule.MAP:
            found = {key: _plain(inside, found[key]) for key in found}
        elif field.rule is FieldRule.REPEATED:
            found = [_plain(inside, element) for element in found]
        elif field.rule is FieldRule.PRESENT:
            found = _plain(inside, found) if message.HasField(field.name) else None
        if found or (field.rule is FieldRule.PRESENT and found is not None):
            value[field.name] = found
    return value


def _plain(kind: Any, value: Any) -> Any:
    return from_reference(kind, value) if isinstance(kind, Message) else value


def parsed(table: Message, data: bytes) -> Any:
    message = getattr(pb, table.name)()
    message.ParseFromString(data)
    return message


# ------------------------------------------------------------------------------------------ the message layer


def check_both_ways(table: Message, value: dict[str, Any]) -> None:
    expected = comparable(value)
    reference = to_reference(table, value)
    ours = write_message(table, value)
    joined = ours.join()
    assert len(joined) == ours.size
    assert comparable(from_reference(table, parsed(table, joined))) == expected
    assert comparable(read_message(table, joined)) == expected
    assert comparable(read_message(table, reference.SerializeToString())) == expected


@pytest.mark.parametrize("table", MESSAGES, ids=lambda table: table.name)
def test_random_messages_of_every_kind(table: Message) -> None:
    rng = random.Random(zlib.crc32(table.name.encode()))
    for _ in range(20_000):
        check_both_ways(table, random_message(rng, table))


@pytest.mark.parametrize("table", MESSAGES, ids=lambda table: table.name)
def test_damaged_bytes_mean_the_same_or_are_refused_by_both(table: Message) -> None:
    rng = random.Random(zlib.crc32(table.name.encode()) + 1)
    seeds = [write_message(table, random_message(rng, table)).join() for _ in range(200)]
    rounds = 20_000 if table in TOP_LEVEL else 2_000
    accepted = 0
    for _ in range(rounds):
        data = mutated(rng, rng.choice(seeds), seeds)
        ours = outcome(read_message, table, data)
        message = outcome(parsed, table, data)
        if laxer_than_the_format(ours, message) or keeps_entries_as_unknown(table, message):
            continue
        theirs = message if isinstance(message, Exception) else from_reference(table, message)
        assert isinstance(ours, Exception) == isinstance(theirs, Exception), (data.hex(), ours, theirs)
        if not isinstance(ours, Exception):
            accepted += 1
            assert comparable(ours) == comparable(theirs), data.hex()
    assert rounds // 10 < accepted < rounds * 9 // 10  # both outcomes occur often


def outcome(call: Callable[[Message, bytes], Any], table: Message, data: bytes) -> Any:
    try:
        return call(table, data)
    except (DecodeError, WireError) as error:
        return error


def laxer_than_the_format(ours: Any, theirs: Any) -> bool:
    """Return True if only this package refuses a field number 0.

    The reference accepts it in unknown groups, though the format forbids it.
    """
    refused = isinstance(ours, WireError) and "0 is not a field number" in str(ours)
    return refused and not isinstance(theirs, Exception)


def keeps_entries_as_unknown(table: Message, message: Any) -> bool:
    """Return True if the reference has kept a map entry as an unknown field.

    It does so if the entry has an unknown field. This package skips only that field.
    """
    if isinstance(message, Exception):
        return False
    aside = {(field.number, 2) for field in table.fields if field.rule is FieldRule.MAP}
    if any((field.field_number, field.wire_type) in aside for field in UnknownFieldSet(message)):
        return True
    for field in table.fields:
        kind = field.kind.by_name["value"].kind if field.rule is FieldRule.MAP else field.kind
        if isinstance(kind, Message):
            found = getattr(message, field.name)
            inner = found.values() if field.rule is FieldRule.MAP else found
            inner = inner if field.rule in (FieldRule.MAP, FieldRule.REPEATED) else [inner]
            if any(keeps_entries_as_unknown(kind, one) for one in inner):
                return True
    return False


@pytest.mark.parametrize("table", TOP_LEVEL, ids=lambda table: table.name)
@settings(max_examples=120)
@given(first=st.data(), second=st.data())
def test_messages_one_behind_the_other_are_merged_alike(
    table: Message, first: st.DataObject, second: st.DataObject
) -> None:
    both = b"".join(write_message(table, part.draw(messages(table))).join() for part in (first, second))
    assert comparable(read_message(table, both)) == comparable(from_reference(table, parsed(table, both)))


# ------------------------------------------------------------------------------------------ the golden files


GOLDEN = Path(__file__).parents[1] / "wire" / "golden"


def content(value: Any) -> Any:
    """Return the fields of a message as JSON data, with the keys of maps sorted as in its bytes."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    if not hasattr(value, "ListFields"):
        return value
    found: dict[str, Any] = {}
    for field, inner in value.ListFields():
        if field.message_type and field.message_type.GetOptions().map_entry:
            found[field.name] = {key: content(inner[key]) for key in sorted(inner, key=str.encode)}
        else:
            found[field.name] = [content(item) for item in inner] if field.is_repeated else content(inner)
    return found


def test_the_reference_reads_and_writes_the_golden_files() -> None:
    """The default suite compares the codecs with these files: NAME.hex for bytes, NAME.json for content."""
    names = {path.stem for path in GOLDEN.glob("*.hex")}
    assert len(names) == 9
    for name in names:
        described = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
        octets = bytes.fromhex((GOLDEN / f"{name}.hex").read_text())
        message = getattr(pb, described["message"]).FromString(octets)
        assert message.SerializeToString(deterministic=True) == octets
        assert content(message) == described["content"]


ROUNDS = 2_000


# ------------------------------------------------------------------------------------------ requests


def random_request(rng: random.Random) -> dict[str, Any]:
    """Return the random content of a request, from which `build` makes a request of either client."""
    config = {"beta": rng.choice((0, 0.1, True, 3)), "mode": rng.choice(("token", "")), "z": rng.gauss(0, 1)}
    names = rng.sample(sorted(config), rng.randrange(4))
    return {
        "data": [_random_datum(rng) for _ in range(rng.randrange(4))],
        "loss_fn": rng.choice(("cross_entropy", "ppo")),
        "config": rng.choice((None, {name: config[name] for name in names})),
        "seq_id": rng.choice((None, 1, 300, 2**31 - 1)),
    }


def _random_datum(rng: random.Random) -> dict[str, Any]:
    names = rng.sample(("target_tokens", "weights", "advantages", "own ☃"), rng.randrange(4))
    spans = [
        (rng.choice(("prompt", "sampled")), f"s{i}", i, rng.randrange(9)) for i in range(rng.randrange(3))
    ]
    return {
        "chunks": [_random_chunk(rng) for _ in range(rng.randrange(4))],
        "inputs": {name: _random_tensor(rng) for name in names},
        "spans": rng.choice((None, spans)),
    }


def _random_chunk(rng: random.Random) -> tuple[str, Any]:
    kind = rng.choice(("text", "text", "image", "dmel"))
    if kind == "text":
        return kind, [rng.randrange(-1, 150_000) for _ in range(rng.choice((0, 1, 7, 40)))]
    if kind == "image":
        return kind, (rng.randbytes(9), rng.choice(("png", "jpeg")), rng.choice((None, 0, 64)))
    return kind, bytes((0, 1, rng.randrange(1, 100)))


def _random_tensor(rng: random.Random) -> dict[str, Any]:
    dtype = rng.choice(("int64", "float32"))
    shape = rng.choice(([0], [1], [5], [2, 3], [0, 4], [1, 1, 2], None))
    size = 5 if shape is None else int(np.prod(shape))
    values = np.array([rng.randrange(-5, 2**40) for _ in range(size)]).astype(dtype)
    if rng.random() < 0.25:
        columns = sorted(rng.sample(range(8), size))[:8] if size <= 8 else []
        crow, size = [0, len(columns)], len(columns)
        return {"data": values[:size], "dtype": dtype, "shape": [1, 8], "crow": crow, "col": columns}
    return {"data": values, "dtype": dtype, "shape": shape, "crow": None, "col": None}


def build(types: Any, content: dict[str, Any]) -> Any:
    """Return a request with this content, made of the types of one client."""
    data = []
    for datum in content["data"]:
        inputs = {name: _tensor(types, tensor) for name, tensor in datum["inputs"].items()}
        chunks = [_chunk(types, kind, value) for kind, value in datum["chunks"]]
        made = types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)
        if datum["spans"] is not None:
            spans = [_span(types, *span) for span in datum["spans"]]
            made = types.Datum(
                model_input=made.model_input,
                loss_fn_inputs=inputs,
                model_input_spans=spans,
                loss_fn_input_spans=spans[:1],
            )
        data.append(made)
    body = types.ForwardBackwardInput(data=data, loss_fn=content["loss_fn"], loss_fn_config=content["config"])
    return types.ForwardBackwardRequest(
        forward_backward_input=body, model_id="model-1", seq_id=content["seq_id"]
    )


def _tensor(types: Any, tensor: dict[str, Any]) -> Any:
    return types.TensorData(
        data=tensor["data"].copy(),
        dtype=tensor["dtype"],
        shape=tensor["shape"],
        sparse_crow_indices=tensor["crow"],
        sparse_col_indices=tensor["col"],
    )


def _chunk(types: Any, kind: str, value: Any) -> Any:
    if kind == "text":
        return types.EncodedTextChunk(tokens=value)
    if kind == "dmel":
        return types.DmelChunk(dmel=value)
    data, form, expected = value
    return types.ImageChunk(data=data, format=form, expected_tokens=expected)


def _span(types: Any, kind: str, sequence_id: str, offset: int, length: int) -> Any:
    span = types.PromptProvenanceSpan if kind == "prompt" else types.SampledProvenanceSpan
    return span(sequence_id=sequence_id, offset=offset, length=length)


@pytest.mark.parametrize("threshold", [[0.8], np.array([0.8], np.float32), [0.8, 0.9, 1.0]], ids=str)
def test_thresholds_of_one_value_are_sent_as_the_reference_sends_them(threshold: Any) -> None:
    sent = []
    for types in (theirs, ours):
        inputs = {"target_tokens": [2, 3, 4], "logprobs": [-1.0] * 3, "advantages": [1.0] * 3}
        inputs |= {"clip_low_threshold": threshold, "clip_high_threshold": [1.2]}
        datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs=inputs)
        body = types.ForwardBackwardInput(data=[datum], loss_fn="ppo")
        sent.append(types.ForwardBackwardRequest(forward_backward_input=body, model_id="m", seq_id=1))
    sent[1].forward_backward_input.validate()
    expected = forward_backward_request_to_proto(sent[0])
    body = encode_forward_backward_request(sent[1]).join()
    assert meaning(parsed(tables.FORWARD_BACKWARD_REQUEST, body)) == meaning(expected)
    assert len(body) == len(expected.SerializeToString())


def test_requests_have_equal_content() -> None:
    rng = random.Random(21)
    for _ in range(ROUNDS):
        content = random_request(rng)
        body = encode_forward_backward_request(build(ours, content)).join()
        expected = forward_backward_request_to_proto(build(theirs, content))
        assert meaning(parsed(tables.FORWARD_BACKWARD_REQUEST, body)) == meaning(expected)
        # The server's decoder reads the reference client's message, and encoding the result gives an equal
        # message.
        request, forward_only = decode_forward_backward_request(expected.SerializeToString())
        again = encode_forward_backward_request(request).join()
        assert meaning(parsed(tables.FORWARD_BACKWARD_REQUEST, again)) == meaning(expected)
        assert not forward_only


def meaning(message: Any) -> Any:
    return comparable(from_reference(tables.FORWARD_BACKWARD_REQUEST, message))


# ------------------------------------------------------------------------------------------ answers


def array_content(array: Any) -> Any:
    """Return the dtype, the shape and the bytes of an array, so that NaN equals NaN."""
    return None if array is None else (str(array.dtype), array.shape, array.tobytes())


def tensor_content(tensor: Any) -> Any:
    if tensor is None:
        return None
    indices = tensor.sparse_crow_indices, tensor.sparse_col_indices
    return tensor.dtype, tensor.shape, array_content(tensor._numpy), indices


def output_content(output: Any) -> Any:
    records = [
        {name: tensor_content(tensor) for name, tensor in record.items()} for record in output.loss_fn_outputs
    ]
    return output.loss_fn_output_type, records, comparable(dict(output.metrics))


def topk_content(topk: Any) -> Any:
    return None if topk is None else (array_content(topk.token_ids), array_content(topk.logprobs))


def response_content(response: Any) -> Any:
    """Return all values of a response, as arrays and as lists. Empty log-probabilities count as missing."""
    alternatives = response.prompt_alt_tokens
    return (
        [_sequence_content(sequence) for sequence in response.sequences],
        array_content(_filled(response.prompt_logprobs_np)),
        response.prompt_logprobs or None,
        topk_content(response.topk_prompt_logprobs_np),
        response.topk_prompt_logprobs,
        tensor_content(response.target_prompt_logprobs),
        alternatives and (tensor_content(alternatives.tokens), tensor_content(alternatives.logprobs)),
        response.prompt_cache_hit_tokens,
    )


def _sequence_content(sequence: Any) -> Any:
    return (
        sequence.stop_reason,
        sequence.sequence_id,
        array_content(sequence.tokens_np),
        sequence.tokens,
        array_content(_filled(sequence.logprobs_np)),
        comparable(sequence.logprobs or None),
        topk_content(sequence.topk_logprobs_np),
        sequence.topk_logprobs,
    )


def _filled(array: Any) -> Any:
    # The reference client treats empty arrays as missing.
    return array if array is not None and array.size else None


DTYPES = {1: "<f4", 2: "<i8", 3: "<i4", 4: "<u2"}


def random_values(rng: random.Random, dtype: int, size: int) -> bytes:
    if dtype == tables.DTYPE_FLOAT32:
        values = [
            rng.choice((0.0, -0.5, float("nan"), float("-inf"), rng.uniform(-9, 9))) for _ in range(size)
        ]
    elif dtype == tables.DTYPE_BFLOAT16:
        values = [rng.randrange(2**16) for _ in range(size)]
    else:
        values = [rng.randrange(-(2**31), 2**31) for _ in range(size)]
    return np.array(values).astype(DTYPES[dtype]).tobytes()


def random_output(rng: random.Random) -> dict[str, Any]:
    """Return a random output with consistent batches, as servers send it."""
    names = rng.sample(("logprobs", "elementwise_loss", "ids"), rng.randrange(4))
    counted = rng.random() < 0.7 or not names
    batches = [_random_batch(rng, names, counted) for _ in range(rng.randrange(4))]
    return {
        "loss_fn_output_type": rng.choice(("a.b:ArrayRecord", "ArrayRecord", "", "x:y:Z")),
        "loss_fn_outputs": batches,
        "metrics": {
            name: rng.gauss(0, 1) for name in rng.sample(("loss:sum", "n:mean", "x"), rng.randrange(4))
        },
    }


def _random_batch(rng: random.Random, names: list[str], counted: bool) -> dict[str, Any]:
    count = rng.randrange(1, 5)
    return {
        "type_tag": rng.choice(("", "a.b:ArrayRecord")),
        "fields": {name: _random_column(rng, count) for name in names},
        "num_datums": count if counted else 0,
    }


def _random_column(rng: random.Random, count: int) -> dict[str, Any]:
    dtype, trailing = rng.choice((1, 2, 3, 4)), rng.choice(([], [], [2], [3, 1]))
    row = int(np.prod(trailing, dtype=int))
    rows = [rng.randrange(4) for _ in range(count)]
    itemsize = np.dtype(DTYPES[dtype]).itemsize
    offsets = np.cumsum([0, *(n * row * itemsize for n in rows)]).astype("<i8").tobytes()
    data = random_values(rng, dtype, sum(rows) * row)
    return {"data": data, "offsets": offsets, "dtype": dtype, "trailing_shape": trailing}


def random_response(rng: random.Random) -> dict[str, Any]:
    return {
        "sequences": [_random_sequence(rng) for _ in range(rng.randrange(4))],
        "prompt_logprobs": rng.choice((None, b"", random_values(rng, 1, 5))),
        "topk_prompt_logprobs": _random_topk(rng),
        "prompt_cache_hit_tokens": rng.choice((0, 5)),
        "target_prompt_logprobs": rng.choice((None, _random_wire_tensor(rng))),
        "prompt_alt_tokens": rng.choice(
            (None, {"tokens": _random_wire_tensor(rng), "logprobs": _random_wire_tensor(rng)})
        ),
    }


def _random_sequence(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((0, 1, 6))
    return {
        "stop_reason": rng.randrange(2),
        "tokens": random_values(rng, 3, size),
        "logprobs": rng.choice((None, b"", random_values(rng, 1, size))),
        "topk_sampled_logprobs": _random_topk(rng),
    }


def _random_topk(rng: random.Random) -> dict[str, Any] | None:
    if rng.random() < 0.4:
        return None
    length, k = rng.randrange(4), rng.randrange(4)
    ids = np.array([rng.randrange(3) for _ in range(length * k)], dtype="<i4")
    logprobs = np.array([rng.choice((-99999.0, -1.0)) for _ in range(length * k)], dtype="<f4")
    return {"token_ids": ids.tobytes(), "logprobs": logprobs.tobytes(), "k": k, "length": length}


def _random_wire_tensor(rng: random.Random) -> dict[str, Any]:
    # Without bfloat16, which the reference client reads as integers here. With a shape, because it fails
    # without.
    dtype = rng.choice((1, 2, 3))
    if rng.random() < 0.3:
        columns = sorted(rng.sample(range(6), 3))
        csr = {
            "values": random_values(rng, dtype, 3),
            "crow_indices": np.array([0, 2, 3], dtype="<i8").tobytes(),
            "col_indices": np.array([*columns[:2], columns[0]], dtype="<i8").tobytes(),
        }
        return {"dtype": dtype, "shape": [2, 6], "sparse_csr": csr}
    shape = rng.choice(([0], [4], [2, 3], [0, 2]))
    return {"dtype": dtype, "shape": shape, "dense": random_values(rng, dtype, int(np.prod(shape)))}


# For each kind of answer: its table, random content, its codec, the reference's reader, and what to compare.
OUTPUTS = (
    tables.FORWARD_BACKWARD_OUTPUT, random_output, decode_forward_backward_output,
    encode_forward_backward_output, deserialize_forward_backward_output, output_content,
)  # fmt: skip
SAMPLES = (
    tables.SAMPLE_RESPONSE, random_response, decode_sample_response, encode_sample_response,
    deserialize_sample_response, response_content,
)  # fmt: skip


@pytest.mark.parametrize(
    ("table", "draw", "decode", "encode", "reference", "content"),
    [OUTPUTS, SAMPLES],
    ids=["outputs", "samples"],
)
def test_answers_are_read_alike_and_those_of_our_server_side_too(
    table: Any, draw: Callable[[random.Random], Any], decode: Any, encode: Any, reference: Any, content: Any
) -> None:
    rng = random.Random(23)
    for _ in range(ROUNDS):
        body = write_message(table, draw(rng)).join()
        answer = decode(body)
        assert content(answer) == content(reference(body))
        assert content(reference(encode(answer).join())) == content(answer)


# ------------------------------------------------------------------------------------------ differences
