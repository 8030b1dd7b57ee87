"""The codecs read and write the bytes of the reference client's protobuf classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.each import for_each
from support.proto_random import MESSAGES, comparable

from tinker_sync import types
from tinker_sync.wire.proto.codec import read_message, write_message
from tinker_sync.wire.proto.requests import decode_forward_backward_request, encode_forward_backward_request
from tinker_sync.wire.proto.samples import decode_sample_response, encode_sample_response

GOLDEN = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in GOLDEN.glob("*.hex"))
TABLES = {table.name: table for table in MESSAGES}


def golden_bytes(name: str) -> bytes:
    return bytes.fromhex((GOLDEN / f"{name}.hex").read_text())


def golden_content(name: str) -> tuple[Any, Any]:
    described = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"), object_hook=_bytes_of_hex)
    return TABLES[described["message"]], described["content"]


def _bytes_of_hex(value: dict[str, Any]) -> Any:
    return bytes.fromhex(value["hex"]) if value.keys() == {"hex"} else value


def test_golden_files_cover_every_top_level_message() -> None:
    kinds = {golden_content(name)[0].name for name in NAMES}
    assert kinds == {"ForwardBackwardRequest", "ForwardBackwardOutput", "SampleResponse"}


@for_each("name", NAMES)
def test_golden_bytes_are_read(name: str) -> None:
    table, content = golden_content(name)
    assert comparable(read_message(table, golden_bytes(name))) == comparable(content)


@for_each("name", NAMES)
def test_golden_bytes_are_written(name: str) -> None:
    table, content = golden_content(name)
    assert write_message(table, content).join().hex() == golden_bytes(name).hex()


@for_each("buffer", [bytearray, memoryview, lambda data: memoryview(bytearray(data))])
@for_each("name", NAMES)
def test_golden_bytes_are_read_from_every_kind_of_buffer(name: str, buffer: Any) -> None:
    table, content = golden_content(name)
    assert comparable(read_message(table, buffer(golden_bytes(name)))) == comparable(content)


def simple_request() -> types.ForwardBackwardRequest:
    datum = types.Datum(
        types.ModelInput.from_ints([1, 200, 300]),
        {"target_tokens": np.array([200, 300, -1]), "weights": np.array([1, 0.5, 0], dtype=np.float32)},
    )
    return types.ForwardBackwardRequest(types.ForwardBackwardInput([datum], "cross_entropy"), "model_ab", 1)


def test_a_request_is_encoded_to_the_golden_bytes() -> None:
    assert encode_forward_backward_request(simple_request()).join() == golden_bytes("request_simple")


@pytest.mark.parametrize("name", ["request_simple", "request_full", "request_empty"])
def test_requests_round_trip(name: str) -> None:
    request, forward_only = decode_forward_backward_request(golden_bytes(name))
    again = encode_forward_backward_request(request, forward_only=forward_only).join()
    assert again == golden_bytes(name)


def test_a_response_is_decoded_and_encoded() -> None:
    sequence = types.SampledSequence(
        "length", None, np.array([5, 6], dtype=np.int32), np.array([-1, -2], dtype=np.float32)
    )
    response = types.SampleResponse(
        [sequence], np.array([np.nan, -0.5], dtype=np.float32), prompt_cache_hit_tokens=1
    )
    assert decode_sample_response(golden_bytes("samples_simple")) == response
    assert encode_sample_response(response).join() == golden_bytes("samples_simple")


def test_a_full_response_is_decoded_to_types() -> None:
    response = decode_sample_response(golden_bytes("samples_full"))
    first, second = response.sequences
    assert first.tokens == [-1, 2**31 - 1]
    assert first.logprobs == []  # present but empty
    assert (second.tokens, second.logprobs) == ([], None)
    assert second.topk_logprobs == [[(3, -1.0), (4, -2.0)], [(5, -3.0)]]
    assert response.prompt_logprobs == []
    assert response.topk_prompt_logprobs_np is None
    assert response.prompt_cache_hit_tokens == -1
    assert response.target_prompt_logprobs.is_sparse
    assert response.target_prompt_logprobs.tolist() == [[0, 0, 0, 0], [0, 1.0, 0, -0.25]]  # from bfloat16
    assert response.prompt_alt_tokens.tokens.dtype == "int64"
    assert response.prompt_alt_tokens.logprobs.tolist() == [[-1, -2], [-3, -4]]
