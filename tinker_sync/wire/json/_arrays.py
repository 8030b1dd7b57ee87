"""The JSON form of tensors and samples: lists of numbers become arrays, and arrays lists, in one step.

Tensors and samples make up nearly all bytes of a body. In answers, null stands for NaN or an infinity, which
JSON does not have: many servers write null for them.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from tinker_sync._base.numpy import AnyArray, BoolArray, Int32Array, np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import plain_array, to_float32, to_int32, tokens_as_int32, wire_array
from tinker_sync.types._structured import Unfit
from tinker_sync.wire.json._unfit import at

if TYPE_CHECKING:
    from tinker_sync.types import SampledSequence, SampleResponse, TensorData, TopkLogprobs

# ------------------------------------------------------------------------------------------------- writing


def array_out(array: AnyArray, *, nulls: bool) -> Any:
    """Return an array as all JSON writers accept it: contiguous, native, of integers, booleans or float64.

    A float32 array is converted to float64, so that all writers write the same digits. With `nulls`, an array
    with NaN or infinities becomes a list with None in their place; otherwise they are refused. An array
    without dimensions becomes a number, and an empty one a list.
    """
    array = plain_array(array, "")
    if array.dtype.kind == "f":
        array = array.astype(np.float64, copy=False)
        odd = ~np.isfinite(array)
        if odd.any():
            return _with_nulls(array) if nulls else _refuse_odd_number(array, odd)
    elif array.dtype.kind not in "biu":
        raise Unfit("expected numbers", array)
    if array.ndim == 0 or array.size == 0:
        return array.tolist()
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("="))


def _with_nulls(array: AnyArray) -> Any:
    boxed = array.astype(object)
    boxed[~np.isfinite(array)] = None
    return boxed.tolist()


def _refuse_odd_number(array: AnyArray, odd: BoolArray) -> Any:
    index = np.unravel_index(int(np.argmax(odd)), odd.shape)
    steps = tuple(int(step) for step in index)
    raise Unfit("expected a number that JSON has", float(array[index]), steps)


def tensor_out(tensor: TensorData) -> dict[str, Any]:
    """Return the JSON fields of a tensor, with its values as a flat array."""
    return {
        "data": tensor._numpy.reshape(-1),
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "sparse_crow_indices": tensor._crow,
        "sparse_col_indices": tensor._col,
    }


def sampled_sequence_out(sequence: SampledSequence) -> dict[str, Any]:
    """Return the JSON fields of a sampled sequence, with its matrices as lists."""
    tokens, logprobs = sequence.tokens_np, sequence.logprobs_np
    return {
        "stop_reason": sequence.stop_reason,
        "sequence_id": sequence.sequence_id,
        "tokens": sequence.tokens if tokens is None else tokens,
        "logprobs": sequence.logprobs if logprobs is None else logprobs,
        "topk_logprobs": sequence.topk_logprobs,
    }


def sample_response_out(response: SampleResponse) -> dict[str, Any]:
    logprobs = response.prompt_logprobs_np
    return {
        "sequences": response.sequences,
        "prompt_logprobs": response.prompt_logprobs if logprobs is None else logprobs,
        "topk_prompt_logprobs": response.topk_prompt_logprobs,
        "target_prompt_logprobs": response.target_prompt_logprobs,
        "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
        "prompt_alt_tokens": response.prompt_alt_tokens,
        "type": "sample",
    }


# ------------------------------------------------------------------------------------------------- reading


def numbers_in(given: Any, dtype: Literal["int64", "float32"]) -> AnyArray:
    """Return a flat list of numbers as an array. For float32, a null in the list becomes NaN."""
    if not isinstance(given, list):
        raise Unfit("expected a list of numbers", given)
    floats = _floats(given) if dtype == "float32" else None
    array = wire_array(given if floats is None else floats, "", dtype)
    if array.ndim != 1:
        raise Unfit("expected a flat list of numbers, got lists in it")
    return array


def _floats(given: list[Any]) -> AnyArray | None:
    """Return the numbers as a float64 array, with NaN for a None; None if an item cannot be a float."""
    try:
        return np.array(given, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None


def float32_in(given: Any) -> AnyArray:
    """Return a flat list of numbers and nulls as a float32 array; a null becomes NaN."""
    return numbers_in(given, "float32")


def tokens_in(given: Any) -> Int32Array:
    if not isinstance(given, list):
        raise Unfit("expected a list of token ids", given)
    return tokens_as_int32(given, "")


def topk_in(given: Any) -> TopkLogprobs:
    """Return the likeliest tokens of each position as two padded matrices: token ids and log-probabilities.

    `given` has, for each position, a list of [token id, log-probability] pairs, or null.
    """
    if not isinstance(given, list):
        raise Unfit("expected a list of positions", given)
    from tinker_sync.types.sampling import NO_LOGPROB, TopkLogprobs

    rows = [at(index, _row, row) for index, row in enumerate(given)]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    # Positions without pairs keep their rows, so there is at least one column.
    width = max(1, int(lengths.max())) if rows else 0
    token_ids = np.zeros((len(rows), width), dtype=np.int32)
    logprobs = np.full((len(rows), width), NO_LOGPROB, dtype=np.float32)
    filled = np.arange(width) < lengths[:, np.newaxis]
    if filled.any():
        token_ids[filled], logprobs[filled] = _columns(rows)
    return TopkLogprobs(token_ids, logprobs)


def _row(row: Any) -> list[Any]:
    if row is not None and not isinstance(row, list):
        raise Unfit("expected a list of [token id, log-probability] pairs, or null", row)
    return row or []


def _columns(rows: list[list[Any]]) -> tuple[AnyArray, AnyArray]:
    """Return the token ids and the log-probabilities of all pairs as two arrays."""
    pairs = _floats(list(chain.from_iterable(rows)))
    if pairs is not None and pairs.ndim == 2 and pairs.shape[1] == 2:
        with suppress(InvalidInputError):
            return to_int32(pairs[:, 0], ""), to_float32(pairs[:, 1], "")
    # Check the pairs one by one, to find the place of the error. A pair that is valid alone cannot have
    # failed above.
    for index, row in enumerate(rows):
        for position, pair in enumerate(row):
            at(index, partial(at, position, _pair), pair)
    raise Unfit("expected pairs of a token id and a log-probability")


def _pair(pair: Any) -> None:
    if not isinstance(pair, list) or len(pair) != 2:
        raise Unfit("expected a pair of a token id and a log-probability", pair)
    tokens_in(pair[:1])
    float32_in([0.0, pair[1]])  # at index 1, which the error names
