"""JSON answers are decoded to types, and bad ones are refused with their path, by each back end."""

from __future__ import annotations

import json
import math
import os
import random
import re
import zlib
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.json_cases import BACKENDS, Codec, answer_kinds, mangled, random_answer, spoiled
from support.values import for_each

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.types import _convert
from tinker_sync.types._model import Model
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.json import MAX_DEPTH, STANDARD_LIBRARY, NotExact, decode, encode, loads, model_of
from tinker_sync.wire.json._reader import make_converter

SUMMARY = {
    "session_id": "s-1",
    "created_at": "2026-01-31T12:00:00Z",
    "owner": "o",
    "project_id": "p",
    "checkpoints_count": 2,
}


def refusal(data: bytes | str | dict[str, Any], cls: Any, codec: Codec) -> WireError:
    if isinstance(data, dict):
        data = json.dumps(data)
    with pytest.raises(WireError) as caught:
        codec.decode(data.encode() if isinstance(data, str) else data, cls)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return caught.value


# ------------------------------------------------------------------------------------------------- fields
def test_unknown_fields_are_ignored_at_every_depth(codec: Codec) -> None:
    body = {
        "sessions": [
            {
                **SUMMARY,
                "new": [1],
                "status": {
                    "type": "failed",
                    "new": {},
                    "category": "user",
                    "message": "m",
                    "reason": {"type": "training_run", "training_run_id": "r", "new": None},
                },
            }
        ],
        "new": "x",
    }
    (summary,) = codec.decode(json.dumps(body).encode(), types.SessionSearchResponse).sessions
    assert summary.status == types.SessionFailed(
        category="user", message="m", reason=types.SessionFailedTrainingRunReason(training_run_id="r")
    )
    assert summary.created_at == datetime(2026, 1, 31, 12, tzinfo=timezone.utc)


def test_unknown_fields_of_a_request_are_refused(codec: Codec) -> None:
    prompt = {"chunks": [{"tokens": [1], "type": "encoded_text", "typo": 1}], "typo": 2}
    error = refusal({"prompt": prompt, "sampling_params": {"typo": 4}, "typo": 3}, types.SampleRequest, codec)
    assert str(error) == (
        "$.typo: SampleRequest has no such field; also $.prompt.typo: ModelInput has no such field; "
        "also $.prompt.chunks[0].typo: EncodedTextChunk has no such field; "
        "also $.sampling_params.typo: SamplingParams has no such field"
    )
    tensor = {"data": [1], "dtype": "int64", "typo": 1}
    assert refusal(tensor, types.TensorData, codec).path == "$.typo"


def test_unknown_fields_of_a_request_can_be_ignored_and_reported() -> None:
    reported: list[tuple[str, set[str]]] = []
    converter = make_converter(
        answers=False, unknown=lambda cls, names: reported.append((cls.__name__, names))
    )
    tensor = {"data": [1], "dtype": "int64", "a": 0}
    datum = {"model_input": {"chunks": [{"type": "encoded_text", "tokens": [1], "b": 0}]}, "c": 0}
    data = [{**datum, "loss_fn_inputs": {"target_tokens": tensor}}]
    tree = {"forward_backward_input": {"data": data, "loss_fn": "ppo"}, "model_id": "m", "d": 0, "e": 0}
    request = converter.structure(tree, types.ForwardBackwardRequest)
    assert request.forward_backward_input.data[0].loss_fn_inputs["target_tokens"].data == [1]
    assert sorted(reported) == [
        ("Datum", {"c"}),
        ("EncodedTextChunk", {"b"}),
        ("ForwardBackwardRequest", {"d", "e"}),
        ("TensorData", {"a"}),
    ]
    for settings, cls in (({"beta1": 0.5}, "AdamParams"), ({"type": "dimuon", "learning_rate": 1}, None)):
        reported.clear()
        tree = {"model_id": "m", "adam_params": {**settings, "f": 0}}
        params = converter.structure(tree, types.OptimStepRequest).optim_params
        # A family without a class of its own keeps all fields.
        assert reported == ([(cls, {"f"})] if cls else [])
        assert type(params) is (types.AdamParams if cls else types.OptimParamsBase)


def test_values_of_an_answer_are_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value that the decoder has converted is not converted again by the constructor of its model."""
    monkeypatch.setattr(_convert, "_converter", None)
    rng = random.Random(5)
    read = 0
    for cls in answer_kinds().values():
        for tree in (random_answer(rng, cls) for _ in range(30) if cls is not types.SamplingParams):
            try:
                decode(json.dumps(tree, default=str).encode(), cls)
            except WireError:  # numbers of more than 64 bits
                continue
            read += 1
    assert read > 500


def test_null_stands_for_a_default_and_absent_for_none(codec: Codec) -> None:
    config = codec.decode(b'{"pjwt_auth_enabled":null,"fwdbwd_max_chunk_len":7}', types.ClientConfigResponse)
    assert config == types.ClientConfigResponse(fwdbwd_max_chunk_len=7)
    request = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="1")
    assert codec.decode(encode(request), types.CreateSessionRequest) == request
    assert refusal('{"request_id":null}', types.UntypedAPIFuture, codec).path == "$.request_id"


@pytest.mark.parametrize("name", ["optim_params", "adam_params", "optimizer_params"])
def test_optimizer_settings_come_under_any_name(name: str, codec: Codec) -> None:
    adam = codec.decode(f'{{"model_id":"m","{name}":{{"beta1":0.5}}}}'.encode(), types.OptimStepRequest)
    assert adam.optim_params == types.AdamParams(beta1=0.5)
    error = refusal('{"model_id":"m"}', types.OptimStepRequest, codec)
    assert "exactly one of optim_params, adam_params and optimizer_params" in str(error)
    error = refusal(f'{{"model_id":"m","{name}":{{"type":1}}}}', types.OptimStepRequest, codec)
    assert error.path.startswith(("$.optim_params", "$.adam_params", "$.optimizer_params"))


# ------------------------------------------------------------------------------------------ what is refused
def test_the_path_of_a_bad_value(codec: Codec) -> None:
    good = {"stop_reason": "stop", "tokens": [1], "logprobs": [-0.5]}
    error = refusal({"sequences": [good, good, {**good, "stop_reason": "foo"}]}, types.SampleResponse, codec)
    assert error.path == "$.sequences[2].stop_reason"
    assert str(error) == "$.sequences[2].stop_reason: expected one of 'length', 'stop', got 'foo' (str)"


def test_several_problems_in_one_error(codec: Codec) -> None:
    error = refusal({"offset": [], "limit": {"a": 1}, "new": 1}, types.Cursor, codec)
    assert str(error) == (
        "$.offset: expected a whole number, got a list of 0; "
        "also $.limit: expected a whole number, got an object of 1 fields; also $.total_count: is missing"
    )
    error = refusal({"sessions": [None] * 100}, types.ListSessionsResponse, codec)
    assert str(error).startswith("$.sessions[0]: expected text, got null; also $.sessions[1]")
    assert str(error).endswith("; and 16 more")


TAGGED = [
    (
        types.ModelInput,
        {"chunks": [{"type": "video"}]},
        "$.chunks[0].type",
        "'encoded_text', 'image_asset_pointer'",
    ),
    (
        types.FuturesRetrieveResponse,
        {"completions": [{"state": "lost", "request_id": "r"}], "cursor": 1},
        "$.completions[0].state",
        "'finished', 'failed'",
    ),
    (
        types.SessionSearchRequest,
        {"owner": {"type": "nobody"}},
        "$.owner.type",
        "'own', 'accessible', 'user'",
    ),
    (types.SessionSummary, {**SUMMARY, "status": {"type": "odd"}}, "$.status.type", "'failed', 'cancelled'"),
    (
        types.TelemetrySendRequest,
        {
            "events": [{"event": "ODD"}],
            "platform": "",
            "sdk_version": "",
            "session_id": "",
            "process_uuid": "",
        },
        "$.events[0].event",
        "'SESSION_START', 'SESSION_END'",
    ),
    (
        types.BillingUsageEvent,
        {"bucket_start": 0, "bucket_end": 0, "event_info": {"type": "tips"}},
        "$.event_info.type",
        "'training', 'sampling_prefill'",
    ),
]


@pytest.mark.parametrize(("cls", "body", "path", "known"), TAGGED, ids=[row[2] for row in TAGGED])
def test_the_tag_selects_a_union_member(cls: Any, body: Any, path: str, known: str, codec: Codec) -> None:
    error = refusal(body, cls, codec)
    assert error.path == path
    assert f"expected one of {known}" in str(error)


@pytest.mark.parametrize("body", ["[]", "null", "1", '"text"', "true"])
def test_an_answer_that_is_no_object_is_refused(body: str, codec: Codec) -> None:
    error = refusal(body, types.Cursor, codec)
    assert error.path == "$"
    assert str(error).startswith("$: expected an object, got ")


NO_JSON = [
    (b"", "$: expected JSON, got an empty body"),
    (b" \r\n\t", "$: expected JSON, got only white space"),
    (b"\xef\xbb\xbf{}", "$: expected JSON, got a byte order mark in front of it"),
    ("{}".encode("utf-16"), "$: is not UTF-8: byte 0 is 0xff"),
    (b'{"a":"\xc3\x28"}', "$: is not UTF-8: byte 6 is 0xc3"),
    (b'"\xed\xa0\x80"', "$: is not UTF-8: byte 1 is 0xed"),
    (b"<html>no</html>", "$: is not JSON: Expecting value at character 0 ('<html>no</html>')"),
    (b'{"a":1', "$: is not JSON: "),
    (b'{"a":1}}', "$: is not JSON: Extra data at character 7 ('{\"a\":1}}')"),
    (b'{"a":1,}', "$: is not JSON: "),
    (b"{'a':1}", "$: is not JSON: "),
    (b"[1,]", "$: is not JSON: "),
    (b"01", "$: is not JSON: Extra data"),
    (b"1.", "$: is not JSON: Extra data"),
    (b"+1", "$: is not JSON: Expecting value"),
    (b"0x1", "$: is not JSON: Extra data"),
    (b'"\n"', "$: is not JSON: Invalid control character"),
    (b'"\\x"', "$: is not JSON: Invalid \\escape"),
    (b'"\\u12"', "$: is not JSON: Invalid \\uXXXX escape"),
    (b"nan", "$: is not JSON: Expecting value"),
    (b"\x0b1", "$: is not JSON: Expecting value"),
    (b"1" * 50_000 + b"x", "$: is not JSON: Extra data at character 50000 ('…'11111111111111111111x'')"),
]


@for_each(("data", "text"), NO_JSON)
def test_bytes_that_are_no_json(data: bytes, text: str, codec: Codec) -> None:
    error = refusal(data, types.Cursor, codec)
    assert str(error).startswith(text.removesuffix("('…'11111111111111111111x'')"))
    assert len(str(error)) < 200


def test_the_excerpt_of_a_text_shows_no_part_of_a_key(codec: Codec) -> None:
    for gap in range(40):
        body = b'{"note": "the key is tml-a-secret-key-of-a-user"' + b" " * gap + b"}}"
        assert not re.search("secret|key-of|user", str(refusal(body, types.Cursor, codec)))


def test_depth_is_bounded(codec: Codec) -> None:
    def body(depth: int, inner: str) -> bytes:
        return b"[" * depth + inner.encode() + b"]" * depth

    # Brackets inside texts do not count, in every form of the text.
    for inner in ('"' + "[" * 500 + '"', r'"\"[[[["', r'"\\"', r'"\\\"{"', '"' + '\\"[' * 300 + '"', '"",""'):
        assert codec.loads(body(MAX_DEPTH, inner))
        with pytest.raises(WireError, match="more than 100 deep"):
            codec.loads(body(MAX_DEPTH + 1, inner))
    # A text that ends in a backslash does not hide the brackets after it.
    with pytest.raises(WireError, match="more than 100 deep"):
        codec.loads(rb'["\\",' + body(MAX_DEPTH, "1") + rb',"\\"]')
    wide = json.dumps([[[1, 2]] * 1000, {"a": [{"b": "]"}]}] * 50).encode()
    assert len(codec.loads(wide)) == 100


# ------------------------------------------------------------------------------------------------- values
LAX = [
    ("5", 5),
    ('"5"', 5),
    ("5.0", 5),
    ('"5.0"', 5),
    ("true", 1),
    ("-9223372036854775808", -(2**63)),
    ("18446744073709551615", 2**64 - 1),
]


@pytest.mark.parametrize(("text", "value"), LAX)
def test_numbers_are_read_as_the_reference_reads_them(text: str, value: int, codec: Codec) -> None:
    body = f'{{"model_name":null,"max_context_length":{text}}}'.encode()
    model = codec.decode(body, types.SupportedModel)
    assert model.max_context_length == value
    assert type(model.max_context_length) is int


@pytest.mark.parametrize("text", ["5.5", '"x"', '""', "1e30", "18446744073709551616", "NaN", "1e999", "[]"])
def test_what_is_no_whole_number_is_not_made_one(text: str, codec: Codec) -> None:
    error = refusal(f'{{"max_context_length":{text}}}', types.SupportedModel, codec)
    assert error.path == "$.max_context_length"
    assert "expected a whole number, got" in str(error)


def test_floats_and_flags(codec: Codec) -> None:
    body = b'{"metrics":{"a":1,"b":"2.5","c":NaN,"d":-Infinity,"e":1e999,"f":null,"g":true}}'
    metrics = codec.decode(body, types.OptimStepResponse).metrics
    assert [metrics[name] for name in "abdeg"] == [1.0, 2.5, -math.inf, math.inf, 1.0]
    assert math.isnan(metrics["c"])
    assert math.isnan(metrics["f"])
    assert {type(value) for value in metrics.values()} == {float}
    flags = codec.decode(b'{"trainable":"yes","sampleable":0}', types.SupportedModel)
    assert (flags.trainable, flags.sampleable) == (True, False)


WHOLE = [
    "0",
    "-0",
    str(2**63),
    str(2**64 - 1),
    str(-(2**63)),
    str(2**64),
    str(-(2**63) - 1),
    "9" * 400,
    "9" * 5000,
]


@pytest.mark.parametrize("text", WHOLE, ids=lambda text: text[:25])
def test_whole_numbers_of_64_bits_are_exact_and_larger_ones_floats(text: str, codec: Codec) -> None:
    (read,) = codec.loads(f"[{text}]".encode())
    value = int(text) if len(text) < 100 else None
    if value is not None and -(2**63) <= value < 2**64:
        assert (type(read), read) == (int, value)
    else:
        assert (type(read), read) == (float, float(text))


JSON_TEXT = st.text(alphabet='[]{}":,\\ntrue0123456789.eE+-NaN u00d8\u00e9', max_size=40)


@given(
    st.one_of(
        st.binary(max_size=40), JSON_TEXT.map(str.encode), st.floats().map(lambda x: json.dumps([x]).encode())
    )
)
def test_both_back_ends_agree_on_any_bytes(data: bytes) -> None:
    outcomes = set()
    for backend in BACKENDS:
        try:
            outcomes.add(repr(loads(data, backend=backend)))
        except WireError as error:
            outcomes.add(f"refused: {error}")
    assert len(outcomes) == 1


# ------------------------------------------------------------------------------------------------- secrets


# ------------------------------------------------------------------------------------------------- shapes


def test_every_model_can_be_read() -> None:
    """The decoder has a hook for every model, and so for the types of all fields."""
    for answers in (True, False):
        converter = make_converter(answers=answers)
        for name in types.__all__:
            cls = getattr(types, name)
            if isinstance(cls, type) and issubclass(cls, Model) and cls is not types.TopkLogprobs:
                converter.get_structure_hook(cls)
    assert np.array_equal(types.TopkLogprobs([[1]], [[0.5]]).token_ids, [[1]])


# -------------- Values that need no conversion skip the converters of cattrs, with the same results
ROUNDS = 20


def outcome(convert: Any, *arguments: Any) -> Any:
    """Return the result of a conversion, or the class of its error."""
    try:
        return convert(*arguments)
    except NotExact:
        raise
    except Exception as error:  # noqa: BLE001  # compared below
        return type(error)


def test_answers_are_read_as_the_converters_read_them() -> None:
    rng, exact = random.Random(2), 0
    read = make_converter(answers=True).structure
    for cls in answer_kinds().values():
        for _ in range(ROUNDS):
            tree = random_answer(rng, cls)
            for each in (tree, {**tree, "new": 1}, spoiled(rng, tree)):
                try:
                    short = model_of(each, cls)
                except NotExact:
                    continue
                exact += 1
                assert short == outcome(read, each, cls), (cls, each)
    assert exact > 500


def test_none_stands_for_absent_in_declared_fields_alone() -> None:
    request = types.CreateSessionRequest(tags=[], user_metadata={"a": None}, sdk_version="1")
    assert wire_json.to_plain(request)["user_metadata"] == {"a": None}
    assert "project_id" not in wire_json.to_plain(request)
    assert wire_json.to_plain({"a": None}) == {"a": None}


def test_a_list_within_itself_is_refused_as_too_deep() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(InvalidInputError, match="more than 100 deep"):
        wire_json.to_plain(endless)


# ------------ Damaged answers of every kind: only `WireError`, and the same one from both back ends
FUZZ_ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "50"))

ANSWERS = {name: cls for name, cls in answer_kinds().items() if name != "SamplingParams"}


def outcome_of_reading(data: bytes, cls: type[Any], backend: Any) -> str:
    """Decode an answer, and return the result or the refusal as text, because NaN does not equal itself."""
    refusal = None
    try:
        decoded = decode(data, cls, backend=backend)
    except WireError as error:
        refusal = error
    if refusal is not None:
        assert refusal.path.startswith("$")
        assert len(str(refusal)) < 10_000
        assert refusal.__cause__ is None
        assert refusal.__context__ is None
        return f"refused: {refusal}"
    try:
        return encode(decoded, backend=STANDARD_LIBRARY).decode()
    except InvalidInputError:  # half a surrogate pair can be decoded, but not encoded
        return repr(decoded)


@for_each("name", sorted(ANSWERS))
def test_any_bytes_are_an_answer_or_a_wire_error(name: str) -> None:
    rng, cls = random.Random(zlib.crc32(name.encode())), ANSWERS[name]
    refused = 0
    for _ in range(FUZZ_ROUNDS):
        tree = random_answer(rng, cls)
        data = json.dumps(spoiled(rng, tree), default=str).encode("utf-8", "surrogatepass")
        if rng.random() < 0.5:
            data = mangled(rng, data)
        outcomes = {outcome_of_reading(data, cls, backend) for backend in BACKENDS}
        assert len(outcomes) == 1, data
        refused += outcomes.pop().startswith("refused")
    assert 0 < refused < FUZZ_ROUNDS


@pytest.mark.parametrize("bomb", [b"[" * 2_000_000, b'{"a":' * 500_000, b"[" * 900_000 + b"]" * 900_000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_depth_bombs_are_refused(bomb: bytes, backend: Any) -> None:
    with pytest.raises(WireError, match=f"more than {MAX_DEPTH} deep"):
        decode(bomb, ANSWERS["AuditLogResponse"], backend=backend)
