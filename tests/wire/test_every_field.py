"""Every public field of every type survives JSON, and protobuf where a message has it, in both directions.

The examples are made from the annotations, with no field at its default. So a field that is added to a type
and forgotten in a codec fails here, without a new test.
"""

from __future__ import annotations

import types as python_types
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import numpy as np
import pytest
from support.proto_cases import MESSAGES
from support.random_models import exported_models
from support.values import for_each

from tinker_sync import types
from tinker_sync.types import (
    Datum,
    ForwardBackwardInput,
    ForwardBackwardOutput,
    ForwardBackwardRequest,
    ModelInput,
    PromptProvenanceSpan,
    SampledProvenanceSpan,
    SampleResponse,
    TensorData,
)
from tinker_sync.types._structured import Structured, fields_of
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.proto import outputs, requests, samples, tables
from tinker_sync.wire.proto.codec import FieldRule, Message, read_message

MODELS = exported_models()

DENSE = TensorData([1.5, 2.5, 3.5, 4.5], "float32", [2, 2])
SPARSE = TensorData([1, 2], "int64", [2, 3], [0, 1, 2], [2, 0])
PNG = bytes.fromhex("89504e470d0a1a0a0000000d4948445200000002000000030802")

# Values that no annotation describes.
EXAMPLES: dict[Any, Any] = {
    TensorData: DENSE,
    bytes: PNG,
    str: "x",
    int: 7,
    float: 0.5,
    bool: True,
    Any: {"key": [1, None]},
    object: {"key": [1, None]},
    datetime: datetime(2026, 1, 31, 12, 30, tzinfo=timezone.utc),
    types.TopkLogprobs: types.TopkLogprobs(
        np.array([[1, 2], [3, 4]], np.int32), np.array([[-0.5, -1.5], [-0.25, -2.5]], np.float32)
    ),
}
FIELDS: dict[tuple[str, str], Any] = {
    ("EncodedTextChunk", "tokens"): [5, 6, 7],
    ("ImageAssetPointerChunk", "location"): "https://example.org/a.png",
    ("SamplingParams", "stop"): ["end"],
    ("SampledSequence", "stop_reason"): "length",  # the number of the other one is 0, which is not written
    ("SampledSequence", "tokens_np"): [5, 6],
    ("SampledSequence", "logprobs_np"): [-0.5, -0.25],
    ("SampleResponse", "prompt_logprobs_np"): [-0.5, -0.25],
    ("PromptAltTokens", "tokens"): TensorData([1, 2], "int64", [1, 2]),
    ("ForwardBackwardInput", "loss_fn_config"): {"clip": 0.25, "mode": "token"},
}


NOT_IN_JSON = {("Datum", "model_input_spans"), ("Datum", "loss_fn_input_spans")}
"""Fields that only protobuf carries; JSON refuses them."""


def example(annotation: Any) -> Any:
    """Return a value for an annotation, which is not None, empty, zero or false."""
    if annotation in EXAMPLES:
        return EXAMPLES[annotation]
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return inner[-1]
    if origin is list:
        return members(inner[0])
    if origin in (dict, Mapping):
        return {"key": example(inner[1])}
    if issubclass(annotation, Enum):
        return list(annotation)[-1]
    return example_of(annotation)


def members(annotation: Any) -> list[Any]:
    """Return a value for each member of a union, or for an annotation that is none."""
    union = get_origin(annotation) in (Union, python_types.UnionType)
    kinds = get_args(annotation) if union else (annotation,)
    return [example(kind) for kind in kinds if kind is not type(None)]


def example_of(cls: Any) -> Any:
    """Return an instance of which no field has its default, except tags."""
    if cls is TensorData:
        return DENSE
    given = {}
    for field in fields_of(cls):
        name, default = field.alias, field.default
        if not field.init or name.startswith("_") or (cls.__name__, name) in NOT_IN_JSON:
            continue
        default = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
        if cls.__tag__ and cls.__tag__[0] == name:
            given[name] = cls.__tag__[1]
        elif get_origin(field.type) is Literal and len(get_args(field.type)) == 1:
            given[name] = example(field.type)
        else:
            known = FIELDS.get((cls.__name__, name))
            values = members(field.type) if known is None else [known]
            values += [False] if default is True else []
            other = [value for value in values if not same(value, default)]
            assert other, f"{cls.__name__}.{name}: the example is the default"
            given[name] = other[0]
    return cls(**given)


def parts(value: Any) -> dict[str, Any]:
    """Return the public fields of a value, arrays as lists."""
    return {
        name.removesuffix("_np"): getattr(value, name.removesuffix("_np")) if name.endswith("_np") else item
        for name, item in value._fields_out().items()
    }


def same(one: Any, other: Any) -> bool:
    """Compare values by their public fields, without the comparisons of the types."""
    if isinstance(one, Structured):
        return type(one) is type(other) and same(parts(one), parts(other))
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other))
    if not isinstance(other, type(one)):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


# ------------------------------------------------------------------------------------------- JSON


@for_each("cls", [cls for cls in MODELS.values() if cls is not types.TopkLogprobs])  # only inside of samples
def test_every_field_goes_through_json_and_back(cls: Any) -> None:
    made = example_of(cls)
    again = wire_json.decode(wire_json.encode(made), cls)
    for name, value in parts(made).items():
        assert same(parts(again)[name], value), f"{cls.__name__}.{name}"


@pytest.mark.parametrize("tensor", [DENSE, SPARSE])
def test_tensors_go_through_json_and_back(tensor: TensorData) -> None:
    assert same(wire_json.decode(wire_json.encode(tensor), TensorData), tensor)


# ------------------------------------------------------------------------------------------- protobuf


def example_request() -> ForwardBackwardRequest:
    made: ForwardBackwardRequest = example_of(ForwardBackwardRequest)
    (datum,) = made.forward_backward_input.data
    # An image that is named by its address has no protobuf form.
    chunks = [each for each in datum.model_input.chunks if each.type != "image_asset_pointer"]
    inputs = {"dense": DENSE, "sparse": SPARSE, "whole": TensorData([1, 2], "int64")}
    spans = [example_of(PromptProvenanceSpan), example_of(SampledProvenanceSpan)]
    whole = Datum(ModelInput(chunks=chunks), inputs, spans, spans)
    return ForwardBackwardRequest(
        ForwardBackwardInput([whole], "cispo", {"clip": 0.25, "mode": "token"}), made.model_id, made.seq_id
    )


def test_every_field_of_a_training_request_goes_through_protobuf_and_back() -> None:
    made = example_request()
    for forward_only in (False, True):
        written = requests.encode_forward_backward_request(made, forward_only=forward_only)
        assert_same(requests.decode_forward_backward_request(b"".join(written)), (made, forward_only))


def test_every_field_of_training_outputs_goes_through_protobuf_and_back() -> None:
    made: ForwardBackwardOutput = example_of(ForwardBackwardOutput)
    written = outputs.encode_forward_backward_output(made)
    assert_same(outputs.decode_forward_backward_output(b"".join(written)), made)


def test_every_field_of_a_sample_goes_through_protobuf_and_back() -> None:
    made: SampleResponse = example_of(SampleResponse)
    made.sequences[0] = made.sequences[0].model_copy(update={"sequence_id": None})  # the promise has the ids
    written = samples.encode_sample_response(made)
    assert_same(samples.decode_sample_response(b"".join(written)), made)


def assert_same(again: Any, made: Any, place: str = "") -> None:
    if isinstance(made, Structured):
        assert type(again) is type(made), place
        again, made = parts(again), parts(made)
    if isinstance(made, dict):
        assert again.keys() == made.keys(), place
        for name, value in made.items():
            assert_same(again[name], value, f"{place}.{name}")
    elif isinstance(made, (list, tuple)) and made and isinstance(made[0], (Structured, dict)):
        for index, (one, other) in enumerate(zip(again, made, strict=True)):
            assert_same(one, other, f"{place}[{index}]")
    else:
        assert same(again, made), place


# Fields that the protocol has, and that no public field gives.
UNUSED = {
    ("ArrayRecord", "type_tag"),
    ("ImageChunk", "override_dimensions"),
    ("ImageDimensions", "width"),
    ("ImageDimensions", "height"),
}


def found_fields(table: Message, message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for field in table.fields:
        if field.name not in message:
            continue
        yield table.name, field.name
        inner, values = field.kind, [message[field.name]]
        if field.rule is FieldRule.MAP:
            assert isinstance(inner, Message)
            inner, values = inner.by_name["value"].kind, list(message[field.name].values())
        elif field.rule is FieldRule.REPEATED:
            values = message[field.name]
        if isinstance(inner, Message):
            for each in values:
                yield from found_fields(inner, each)


def test_every_field_of_the_protobuf_tables_is_written() -> None:
    sample, output = example_of(SampleResponse), example_of(ForwardBackwardOutput)
    request = requests.encode_forward_backward_request(example_request(), forward_only=True)
    found = {
        each
        for table, written in (
            (tables.FORWARD_BACKWARD_REQUEST, request),
            (tables.FORWARD_BACKWARD_OUTPUT, outputs.encode_forward_backward_output(output)),
            (tables.SAMPLE_RESPONSE, samples.encode_sample_response(sample)),
        )
        for each in found_fields(table, read_message(table, b"".join(written)))
    }
    assert {(table.name, field.name) for table in MESSAGES for field in table.fields} - found == UNUSED
