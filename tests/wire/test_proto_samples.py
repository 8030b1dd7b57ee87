"""The codec of sample responses keeps presence and refuses inconsistent messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.types import PromptAltTokens, SampledSequence, SampleResponse, TensorData, TopkLogprobs
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import write_message
from tinker_sync.wire.proto.samples import decode_sample_response, encode_sample_response


def decoded(**plain: Any) -> SampleResponse:
    return decode_sample_response(write_message(tables.SAMPLE_RESPONSE, plain).join())


def fault(**plain: Any) -> WireError:
    with pytest.raises(WireError) as caught:
        decoded(**plain)
    return caught.value


def again(response: SampleResponse) -> SampleResponse:
    return decode_sample_response(encode_sample_response(response).join())


def topk(length: int, k: int, cells: int | None = None) -> dict[str, Any]:
    cells = length * k if cells is None else cells
    return {"token_ids": bytes(4 * cells), "logprobs": bytes(4 * cells), "k": k, "length": length}


# ------------------------------------------------------------------------------------------ decoding
def test_presence_of_logprobs_is_kept() -> None:
    absent, empty = decoded(sequences=[{"tokens": bytes(8)}, {"tokens": bytes(8), "logprobs": b""}]).sequences
    assert absent.logprobs_np is None
    assert empty.logprobs_np is not None
    assert empty.logprobs == []
    assert decoded().prompt_logprobs_np is None
    assert decoded(prompt_logprobs=b"").prompt_logprobs == []


def test_arrays_are_writable_and_separate() -> None:
    response = decoded(
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
    found = decoded(target_prompt_logprobs=tensor).target_prompt_logprobs
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
