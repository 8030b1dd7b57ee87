"""Types are encoded to JSON, and bad values are refused, by each back end."""

from __future__ import annotations

import enum
import json
import math
import sys
from collections import OrderedDict, namedtuple
from datetime import datetime, timedelta, timezone
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from support.json_cases import BACKENDS, Codec
from support.values import for_each

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.wire.json import HAS_ORJSON, MAX_DEPTH, STANDARD_LIBRARY, dumps, encode

NOON = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)


def session(**metadata: Any) -> types.CreateSessionRequest:
    return types.CreateSessionRequest(tags=[], user_metadata=metadata, sdk_version="1")


def metadata_of(codec: Codec, **metadata: Any) -> str:
    """Return the JSON text that free-form values have within an encoded request."""
    text = codec.encode(session(**metadata)).decode()
    return text.partition('"user_metadata":')[2].partition(',"sdk_version"')[0]


def problems_of(value: Any, codec: Codec) -> tuple[str, ...]:
    with pytest.raises(InvalidInputError) as caught:
        codec.dumps(value)
    assert caught.value.__context__ is None
    return caught.value.problems


# ---------------------------------------------------------------------------------------------- which fields
def test_a_sample_request_is_these_bytes(codec: Codec) -> None:
    request = types.SampleRequest(
        num_samples=2,
        prompt=types.ModelInput.from_ints([1, 2, 3]),
        sampling_params=types.SamplingParams(max_tokens=4, seed=1, stop=["a"]),
        sampling_session_id="s:sample:0",
        seq_id=0,
        prompt_logprobs=False,
        record_stability_info=False,
    )
    assert codec.encode(request) == (
        b'{"num_samples":2,"prompt":{"chunks":[{"tokens":[1,2,3],"type":"encoded_text"}]},'
        b'"sampling_params":{"max_tokens":4,"seed":1,"stop":["a"],"temperature":1.0,"top_k":-1,"top_p":1.0},'
        b'"sampling_session_id":"s:sample:0","seq_id":0,"prompt_logprobs":false,"topk_prompt_logprobs":0,'
        b'"topk_sample_logprobs":0,"prompt_alt_tokens_k":0,"record_stability_info":false,"type":"sample"}'
    )


def test_a_training_request_is_these_bytes(codec: Codec) -> None:
    prompt = types.ModelInput.from_ints(np.arange(2))
    datum = types.Datum(prompt, {"target_tokens": [7, 8], "weights": [0, 1]})
    request = types.ForwardBackwardRequest(types.ForwardBackwardInput([datum], "cross_entropy"), "model-1", 3)
    assert codec.encode(request) == (
        b'{"forward_backward_input":{"data":[{"model_input":{"chunks":[{"tokens":[0,1],"type":"encoded_text"}]},'
        b'"loss_fn_inputs":{"target_tokens":{"data":[7,8],"dtype":"int64","shape":[2]},'
        b'"weights":{"data":[0.0,1.0],"dtype":"float32","shape":[2]}}}],"loss_fn":"cross_entropy"},'
        b'"model_id":"model-1","seq_id":3}'
    )


def test_every_kind_of_chunk(codec: Codec) -> None:
    prompt = types.ModelInput(
        chunks=[
            types.ImageChunk(data=b"\x00\xff", format="png", expected_tokens=2),
            types.ImageAssetPointerChunk(format="jpeg", location="asset://1"),
            types.DmelChunk(dmel=b"\x01"),
        ]
    )
    assert codec.encode(prompt) == (
        b'{"chunks":[{"data":"AP8=","format":"png","expected_tokens":2,"type":"image"},'
        b'{"format":"jpeg","location":"asset://1","type":"image_asset_pointer"},'
        b'{"dmel":"AQ==","type":"dmel"}]}'
    )


def test_none_is_absent_in_declared_fields_only(codec: Codec) -> None:
    assert metadata_of(codec, a=None, b=[None, {"c": None}]) == '{"a":null,"b":[null,{"c":null}]}'
    assert b"project_id" not in codec.encode(session())
    node = types.CustomLossNode(op="output", name="o", target="output", args=[{"slice": [None, 1, None]}])
    assert b'"args":[{"slice":[null,1,null]}]' in codec.encode(node)
    family = types.OptimizerConfigBase(type="new", dropped=None, kept=[None])
    assert codec.encode(family) == b'{"type":"new","kept":[null]}'


def test_optimizer_settings_travel_under_the_name_of_their_kind(codec: Codec) -> None:
    adam = types.OptimStepRequest(optimizer_params=types.AdamParams(), model_id="m")
    other = types.OptimStepRequest(adam_params={"type": "new", "rate": 1}, model_id="m")
    assert json.loads(codec.encode(adam))["adam_params"]["beta1"] == 0.9
    assert json.loads(codec.encode(other)) == {
        "model_id": "m",
        "type": "optim_step",
        "optimizer_params": {"type": "new", "rate": 1},
    }


def test_provenance_is_not_dropped_silently(codec: Codec) -> None:
    run = types.SampledProvenanceSpan(sequence_id="seq-1", length=1)
    datum = types.Datum(types.ModelInput.from_ints([1]), {"target_tokens": [2]}).with_provenance([run], [run])
    assert problems_of({"data": [datum]}, codec) == (
        "$.data[0]: has provenance spans, which only protobuf bodies carry",
    )


class OwnDatum(types.Datum):
    """A subclass of a model, like those that scripts define."""

    __slots__ = ()


def test_a_subclass_is_written_as_its_base_and_refused_like_it(codec: Codec) -> None:
    prompt = types.ModelInput.from_ints([1])
    datum = OwnDatum(prompt, {"target_tokens": [2]})
    assert codec.dumps([datum]) == dumps([types.Datum(prompt, {"target_tokens": [2]})])
    run = types.SampledProvenanceSpan(sequence_id="seq-1", length=1)
    request = types.ForwardBackwardInput([datum.with_provenance([run], [run])], "ppo")
    assert problems_of(request, codec)[0].startswith("$.data[0]: has provenance spans")


# ------------------------------------------------------------------------------------------------- values
class Colour(enum.Enum):
    RED = "red"
    DEEP = 1


class Word(str):
    def __str__(self) -> str:
        return "something else"


class Number(int):
    def __repr__(self) -> str:
        return "something else"


class Real(float):
    def __repr__(self) -> str:
        return "something else"


Pair = namedtuple("Pair", "first second")

WRITTEN = [
    (1.0, "1.0"),
    (-0.0, "-0.0"),
    (True, "true"),
    (np.int64(-3), "-3"),
    (np.uint64(2**64 - 1), "18446744073709551615"),
    (np.float32(0.1), "0.10000000149011612"),
    (np.float64(0.1), "0.1"),
    (np.longdouble(0.5), "0.5"),
    (np.bool_(True), "true"),
    (np.str_("a"), '"a"'),
    (np.array(3.5), "3.5"),
    (np.zeros((2, 0)), "[[],[]]"),
    (np.array([[1, 2], [3, 4]]).T, "[[1,3],[2,4]]"),
    (np.array([True, False]), "[true,false]"),
    (np.array([1, 2], dtype=">i2"), "[1,2]"),
    (np.array([0.5, 1], dtype=">f4"), "[0.5,1.0]"),
    (np.array([0.5], dtype=np.float16), "[0.5]"),
    (np.arange(6)[::2], "[0,2,4]"),
    (range(3), "[0,1,2]"),
    ((1, (2, None)), "[1,[2,null]]"),
    (Pair(1, "b"), '[1,"b"]'),
    (OrderedDict(a=1), '{"a":1}'),
    (MappingProxyType({"a": 1}), '{"a":1}'),
    (Word("w"), '"w"'),
    (Number(7), "7"),
    (Real(0.5), "0.5"),
    (Colour.RED, '"red"'),
    ([Colour.DEEP], "[1]"),
    (types.RequestErrorCategory.User, '"user"'),
    (NOON, '"2026-01-31T12:00:00Z"'),
    (NOON.replace(tzinfo=None, microsecond=5), '"2026-01-31T12:00:00.000005"'),
    (NOON.astimezone(timezone(timedelta(hours=5, minutes=30))), '"2026-01-31T17:30:00+05:30"'),
    (NOON.date(), '"2026-01-31"'),
    (b"caf\xc3\xa9", '"café"'),
    (types.UserSearchOwner(owner_urns=["u"]), '{"type":"user","owner_urns":["u"]}'),
    (2**64, "18446744073709551616"),
    (-(2**200), str(-(2**200))),
    ([1, 2**64], "[1,18446744073709551616]"),
    ([1, 2.5, None, "a", True], '[1,2.5,null,"a",true]'),
]  # fmt: skip


@for_each(("value", "text"), WRITTEN)
def test_values_are_written_as_what_they_are(value: Any, text: str, codec: Codec) -> None:
    assert metadata_of(codec, a=value) == f'{{"a":{text}}}'
    assert metadata_of(codec, a=[value]) == f'{{"a":[{text}]}}'


KEYS = [
    (True, "true"),
    (False, "false"),
    (None, "null"),
    (1, "1"),
    (-(2**70), str(-(2**70))),
    (1.5, "1.5"),
    (1e22, "1e+22"),
    (Word("w"), "w"),
    (Number(7), "7"),
    (np.int32(4), "4"),
    (np.float64(0.25), "0.25"),
    (Colour.RED, "red"),
]


@for_each(("key", "text"), KEYS)
def test_keys_are_what_the_standard_library_makes_of_them(key: Any, text: str, codec: Codec) -> None:
    assert codec.dumps({"a": {key: 1}}) == f'{{"a":{{"{text}":1}}}}'.encode()
    if type(key) in (bool, type(None), int, float):
        assert json.dumps({key: 1}) == f'{{"{text}": 1}}'


def test_keys_that_would_become_the_same(codec: Codec) -> None:
    assert problems_of({"a": {1: "x", "1": "y"}}, codec) == ("$.a: two keys are both written '1'",)


class Sneaky:
    def __repr__(self) -> str:
        return "Sneaky()"  # without an address, which differs in each process


REFUSED = [
    (math.nan, "expected a number that JSON has, got nan (float)"),
    (-math.inf, "expected a number that JSON has, got -inf (float)"),
    (np.float32("nan"), "expected a number that JSON has, got nan (float)"),
    ({1, 2}, "expected something JSON has"),
    (frozenset(), "expected something JSON has"),
    (Sneaky(), "expected something JSON has"),
    (1j, "expected something JSON has"),
    (iter([1]), "expected something JSON has"),
    (timedelta(1), "expected something JSON has"),
    (Sneaky, "expected something JSON has"),
    (np.array([1j]), "expected numbers, got array([1], complex128) (ndarray)"),
    (np.array(["a"]), "expected numbers"),
    (np.datetime64("2026-01-01"), "expected something JSON has"),
    (b"\xff", "expected text; these bytes are not UTF-8, got <1 bytes> (bytes)"),
    ("\ud800", "holds half of a surrogate pair"),
    ("a\udfffb", "holds half of a surrogate pair"),
    (Word("\ud800"), "holds half of a surrogate pair"),
]


@for_each(("value", "reason"), REFUSED)
def test_values_that_json_lacks_are_refused_with_a_path(value: Any, reason: str, codec: Codec) -> None:
    (problem,) = problems_of(session(a={"b c": [0, value]}), codec)
    assert problem.startswith(f"$.user_metadata.a['b c'][1]: {reason}")


@pytest.mark.parametrize("key", [math.nan, math.inf, (1, 2), b"a", Sneaky(), np.float32(1)], ids=repr)
def test_keys_that_are_no_names(key: Any, codec: Codec) -> None:
    (problem,) = problems_of({"a": {key: 1}}, codec)
    assert problem.startswith("$.a: expected keys that are text or numbers, got")


def test_a_key_with_half_a_character(codec: Codec) -> None:
    assert problems_of({"a": {"\ud800": 1}}, codec) == (
        "$.a: holds half of a surrogate pair, which no text on the wire can",
    )


def test_the_place_of_a_number_in_long_lists_and_arrays(codec: Codec) -> None:
    expected = "expected a number that JSON has"
    reals = [0.5] * 5000
    reals[4321] = math.nan
    assert problems_of({"a": reals}, codec) == (f"$.a[4321]: {expected}, got nan (float)",)
    cells = np.zeros((3, 4), dtype=np.float32)
    cells[2, 1] = np.inf
    assert problems_of({"a": cells}, codec) == (f"$.a[2][1]: {expected}, got inf (float)",)
    step = types.OptimStepRequest(adam_params=types.AdamParams(learning_rate=math.inf), model_id="m")
    assert problems_of(step, codec)[0].startswith("$.adam_params.learning_rate: expected a number")


def test_all_problems_are_listed_up_to_a_bound(codec: Codec) -> None:
    problems = problems_of({"a": math.nan, "b": [{1}, {2}]}, codec)
    assert [problem.partition(":")[0] for problem in problems] == ["$.a", "$.b[0]", "$.b[1]"]
    assert problems[2].endswith("got {2} (set)")
    assert len(problems_of({"a": [math.nan] * 100_000}, codec)) == 20


def test_masked_cells_have_no_value_to_send(codec: Codec) -> None:
    masked = np.ma.MaskedArray([1, 2, 3], mask=[False, False, True])
    (problem,) = problems_of({"a": masked}, codec)
    assert problem == "$.a[2]: is masked; call .filled(...) to choose the value to send"


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


def test_depth_is_bounded(codec: Codec) -> None:
    assert codec.dumps(nested(MAX_DEPTH)).count(b"[") == MAX_DEPTH // 2
    for depth in (MAX_DEPTH + 1, 300, 100_000):
        (problem,) = problems_of(nested(depth), codec)
        assert problem.endswith(f"more than {MAX_DEPTH} deep")


def test_a_value_within_itself_is_refused(codec: Codec) -> None:
    circle: dict[str, Any] = {}
    circle["a"] = [circle]
    assert problems_of(circle, codec)[0].endswith("deep")


def test_every_character(codec: Codec) -> None:
    text = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert json.loads(codec.dumps([text])) == [text]


# ------------------------------------------------------------------------------------------------- arrays


def prompt_request(tokens: Any) -> types.SampleRequest:
    prompt = types.ModelInput.from_ints(tokens)
    return types.SampleRequest(prompt=prompt, sampling_params=types.SamplingParams())


def calls_of_tolist(codec: Codec, request: types.SampleRequest) -> int:
    """Encode a request, and return the number of arrays that are converted to lists meanwhile."""
    calls = []

    def watch(_frame: Any, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ == "tolist":
            calls.append(function)

    sys.setprofile(watch)
    try:
        codec.encode(request)
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.skipif(not HAS_ORJSON, reason="the standard library writes lists only")
@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_an_array_prompt_never_becomes_a_list(kind: Any) -> None:
    request = prompt_request(np.arange(100_000, 132_768, dtype=kind))
    assert calls_of_tolist(Codec(BACKENDS[1]), request) == 0
    assert calls_of_tolist(Codec(STANDARD_LIBRARY), request) == 1  # the count includes real calls

    encoded = encode(request, backend=BACKENDS[1])
    assert json.loads(encoded)["prompt"]["chunks"][0]["tokens"] == list(range(100_000, 132_768))


# -------------------------------------------------------------------------------------------------- secrets
