"""The codecs read and write the bytes of the reference client's protobuf classes."""

from __future__ import annotations

import json
import os
import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.proto_cases import MESSAGES, comparable, hostile, mutated, random_message
from support.values import for_each

from tinker_sync import types
from tinker_sync.errors import WireError
from tinker_sync.types import TensorData
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import Message, read_message, write_message
from tinker_sync.wire.proto.outputs import (
    MAX_EMPTY_RECORDS,
    decode_forward_backward_output,
    encode_forward_backward_output,
)
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


# ---- Decoders answer damaged and hostile bytes with `WireError` or a value, in bounded memory and time
BATCH = 5_000
ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "500"))

MEMORY_FLOOR = 32_768
"""The memory of a decoder and its error, without the message."""
MEMORY_FACTOR = 250
"""Bytes per byte of input: an empty submessage takes two bytes, its object a few hundred."""
EMPTY_RECORDS = MAX_EMPTY_RECORDS * 80
"""The memory of records that take no bytes in the message."""


def floats(*shape: int) -> np.ndarray:
    return np.linspace(-3, 0, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def requests() -> list[bytes]:
    run = types.SampledProvenanceSpan(sequence_id="s", offset=1, length=2)
    rich = types.Datum(
        types.ModelInput(
            chunks=[
                types.EncodedTextChunk(tokens=range(20)),
                types.ImageChunk(data=b"x" * 9, format="png", expected_tokens=4),
                types.DmelChunk(dmel=b"\0\1\5"),
            ]
        ),
        {
            "target_tokens": TensorData([5, 6], "int64", [2, 9], [0, 1, 2], [3, 8]),
            "weights": floats(3, 4),
            "scalar": np.array(3),
        },
        [types.PromptProvenanceSpan(sequence_id="p", length=1), run],
        [run],
    )
    plain = types.Datum(
        types.ModelInput.from_ints(range(64)), {"target_tokens": range(64), "weights": floats(64)}
    )
    bodies = [
        types.ForwardBackwardInput([plain, rich, plain], "ppo", {"a": 1.0, "b": "text"}),
        types.ForwardBackwardInput([], "x"),
    ]
    return [
        encode_forward_backward_request(types.ForwardBackwardRequest(body, "model", 3)).join()
        for body in bodies
    ]


def outputs() -> list[bytes]:
    def record(rows: int, k: int) -> dict[str, TensorData]:
        ids = np.arange(rows * k).reshape(rows, k)
        return {"logprobs": TensorData.from_numpy(floats(rows)), "ids": TensorData.from_numpy(ids)}

    records = [record(3, 2), record(5, 2), record(0, 2), record(2, 7), {}, {}]
    made = [
        types.ForwardBackwardOutput("m:ArrayRecord", records, {"loss:sum": 1.5}),
        types.ForwardBackwardOutput("", [], {}),
    ]
    half = {"data": bytes(12), "offsets": np.array([0, 4, 12]).tobytes(), "dtype": tables.DTYPE_BFLOAT16}
    narrow = {**half, "dtype": tables.DTYPE_INT32, "trailing_shape": [1]}
    batch = {"fields": {"half": half, "narrow": narrow}, "num_datums": 2}
    widened = write_message(tables.FORWARD_BACKWARD_OUTPUT, {"loss_fn_outputs": [batch]}).join()
    return [widened, *(encode_forward_backward_output(output).join() for output in made)]


def samples() -> list[bytes]:
    top = types.TopkLogprobs(np.arange(12, dtype=np.int32).reshape(6, 2), floats(6, 2))
    sequence = types.SampledSequence("length", None, np.arange(6, dtype=np.int32), floats(6), top)
    alternatives = types.PromptAltTokens(
        TensorData(range(6), "int64", [3, 2]), TensorData(range(6), "float32", [3, 2])
    )
    sparse = TensorData([1.0, 2.0], "float32", [2, 9], [0, 1, 2], [3, 8])
    full = types.SampleResponse([sequence] * 3, floats(7), top, sparse, 5, alternatives)
    return [encode_sample_response(full).join(), encode_sample_response(types.SampleResponse([])).join()]


DECODERS: dict[str, tuple[Message, Callable[[Any], object], Callable[[], list[bytes]]]] = {
    "requests": (tables.FORWARD_BACKWARD_REQUEST, decode_forward_backward_request, requests),
    "outputs": (tables.FORWARD_BACKWARD_OUTPUT, decode_forward_backward_output, outputs),
    "samples": (tables.SAMPLE_RESPONSE, decode_sample_response, samples),
}


@pytest.mark.parametrize("first", range(0, ROUNDS, BATCH))
@pytest.mark.parametrize("name", DECODERS)
def test_damaged_bytes_raise_wire_errors_only(name: str, first: int) -> None:
    table, decode, make_seeds = DECODERS[name]
    rng, rounds = random.Random(f"{name} {first}"), min(BATCH, ROUNDS - first)
    seeds = make_seeds()
    plain_seeds = [read_message(table, seed) for seed in seeds]
    plain_seeds = [_owned(plain) for plain in plain_seeds]
    others = [write_message(table, random_message(rng, table)).join() for _ in range(100)]
    accepted, slowest, dearest = 0, 0.0, 0.0
    tracemalloc.start()
    try:
        for _ in range(rounds):
            data = _input(rng, table, seeds, plain_seeds, others)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            started = time.process_time()
            accepted += _accepts(decode, data)
            slowest = max(slowest, time.process_time() - started)
            grown = tracemalloc.get_traced_memory()[1] - before
            limit = MEMORY_FLOOR + MEMORY_FACTOR * len(data) + (EMPTY_RECORDS if name == "outputs" else 0)
            assert grown < limit, (grown, len(data), data.hex())
            dearest = max(dearest, grown)
    finally:
        tracemalloc.stop()
    cost = f"slowest {slowest * 1e3:.1f} ms, peak {dearest / 1e6:.2f} MB"
    print(f"{name}: {rounds} inputs, {accepted} accepted, {cost}")  # noqa: T201 -- for long runs
    assert slowest < 1.0
    assert rounds // 50 < accepted < rounds  # both outcomes occur


def test_arrays_in_the_memory_of_damaged_messages_are_those_of_copies() -> None:
    table, _, make_seeds = DECODERS["outputs"]
    rng, seeds = random.Random("shared"), make_seeds()
    plain_seeds = [_owned(read_message(table, seed)) for seed in seeds]
    outcomes = []
    for _ in range(min(ROUNDS, BATCH)):
        data = _input(rng, table, seeds, plain_seeds, seeds)
        try:
            copied: object = decode_forward_backward_output(data)
        except WireError as error:
            copied = str(error)
        try:
            kept: object = decode_forward_backward_output(bytearray(data))
        except WireError as error:
            kept = str(error)
        assert kept == copied, data.hex()
        outcomes.append(isinstance(copied, str))
    assert set(outcomes) == {True, False}


def _owned(value: Any) -> Any:
    """Return a copy of a plain message, with bytes in place of views."""
    if isinstance(value, dict):
        return {key: _owned(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_owned(item) for item in value]
    return bytes(value) if isinstance(value, memoryview) else value


def _input(
    rng: random.Random,
    table: Message,
    seeds: list[bytes],
    plain_seeds: list[dict[str, Any]],
    others: list[bytes],
) -> bytes:
    kind = rng.random()
    if kind < 0.4:
        return mutated(rng, rng.choice(seeds), seeds + others)
    data = write_message(table, hostile(rng, table, rng.choice(plain_seeds))).join()
    return data if kind < 0.8 else mutated(rng, data, seeds + others)


def _accepts(decode: Callable[[Any], object], data: bytes) -> bool:
    """Return True if the decoder accepts the bytes; errors other than `WireError` fail the test."""
    try:
        decode(data)
    except WireError:
        return False
    return True
