"""The codec of `SampleResponse`. Pure functions; any thread may use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tinker_sync.types._arrays import to_float32, tokens_as_int32
from tinker_sync.types.sampling import (
    NO_LOGPROB,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TopkLogprobs,
)
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._fault import FieldFault, decoding, encoding
from tinker_sync.wire.proto._reader import Plain, Readable, read_message
from tinker_sync.wire.proto._tensors import (
    FLOAT32,
    INT32,
    OWN_FLOAT32,
    OWN_INT32,
    payload,
    read_tensor,
    tensor_to_plain,
    view_array,
)
from tinker_sync.wire.proto._writer import Buffers, check_size, write_plain

if TYPE_CHECKING:
    from tinker_sync.types._arrays import AnyArray
    from tinker_sync.types.scalars import StopReason

_STOP_REASONS: dict[int, StopReason] = {tables.STOP_REASON_STOP: "stop", tables.STOP_REASON_LENGTH: "length"}
_STOP_NUMBERS = {name: number for number, name in _STOP_REASONS.items()}

# ------------------------------------------------------------------------------------------ samples in


def decode_sample_response(data: Readable) -> SampleResponse:
    """Decode a response. Every array is a separate, writable copy.

    A present but empty list becomes an empty array, an absent list None. The message has no sequence
    ids, so `sequence_id` stays unset.

    Raises:
        WireError: the bytes are not a valid response; `path` names the field, as in
            ``sequences[2].topk_sampled_logprobs.token_ids``.

    >>> response = decode_sample_response(bytes.fromhex("0a0c080112080500000006000000"))
    >>> response.sequences[0].tokens, response.sequences[0].logprobs
    ([5, 6], None)
    """
    plain = read_message(tables.SAMPLE_RESPONSE, data)
    sequences: list[SampledSequence] = []
    with decoding("SampleResponse"):
        try:
            for sequence in plain.get("sequences", ()):
                sequences.append(_read_sequence(sequence))  # noqa: PERF401 -- the except clause uses its length
        except FieldFault as fault:
            raise fault.under(f"sequences[{len(sequences)}]") from None
        return SampleResponse(
            sequences,
            _read_floats(plain, "prompt_logprobs"),
            _read_topk(plain, "topk_prompt_logprobs"),
            _read_tensor(plain, "target_prompt_logprobs"),
            plain.get("prompt_cache_hit_tokens", 0),
            _read_alternatives(plain),
        )


def _read_sequence(plain: Plain) -> SampledSequence:
    number = plain.get("stop_reason", tables.STOP_REASON_STOP)
    reason = _STOP_REASONS.get(number)
    if reason is None:
        raise FieldFault(f"{number} is not a known StopReason", "stop_reason")
    tokens = view_array(plain, "tokens", INT32).astype(OWN_INT32)
    logprobs = _read_floats(plain, "logprobs")
    if logprobs is not None and logprobs.size not in (0, tokens.size):
        raise FieldFault(f"{logprobs.size} values for {tokens.size} tokens", "logprobs")
    return SampledSequence(reason, None, tokens, logprobs, _read_topk(plain, "topk_sampled_logprobs"))


def _read_floats(plain: Plain, name: str) -> AnyArray | None:
    return view_array(plain, name, FLOAT32).astype(OWN_FLOAT32) if name in plain else None


def _read_topk(plain: Plain, name: str) -> TopkLogprobs | None:
    """Read two matrices; return None for empty ones, which servers send when they were not requested."""
    if name not in plain:
        return None
    topk = plain[name]
    shape = topk.get("length", 0), topk.get("k", 0)
    try:
        ids = _reshape(view_array(topk, "token_ids", INT32), shape, "token_ids")
        logprobs = _reshape(view_array(topk, "logprobs", FLOAT32), shape, "logprobs")
    except FieldFault as fault:
        raise fault.under(name) from None
    return TopkLogprobs(ids.astype(OWN_INT32), logprobs.astype(OWN_FLOAT32)) if all(shape) else None


def _reshape(values: AnyArray, shape: tuple[int, int], name: str) -> AnyArray:
    length, k = shape
    if values.size != length * k:
        raise FieldFault(f"{values.size} values do not fill length {length} times k {k}", name)
    return values.reshape(shape) if values.size else values


def _read_tensor(plain: Plain, name: str) -> Any:
    if name not in plain:
        return None
    try:
        return read_tensor(plain[name])
    except FieldFault as fault:
        raise fault.under(name) from None


def _read_alternatives(plain: Plain) -> PromptAltTokens | None:
    if "prompt_alt_tokens" not in plain:
        return None
    # An absent tensor counts as one without a dtype, which is refused.
    both = {"tokens": {}, "logprobs": {}, **plain["prompt_alt_tokens"]}
    try:
        return PromptAltTokens(_read_tensor(both, "tokens"), _read_tensor(both, "logprobs"))
    except FieldFault as fault:
        raise fault.under("prompt_alt_tokens") from None


# ------------------------------------------------------------------------------------------ samples out


def encode_sample_response(response: SampleResponse) -> Buffers:
    """Encode a response, given as arrays or as lists; the pieces are views of its arrays.

    Raises:
        InvalidInputError: a value does not fit its field; the message names the path.

    >>> sequence = SampledSequence("length", None, np.array([5, 6], dtype=np.int32))
    >>> encode_sample_response(SampleResponse([sequence])).join().hex()
    '0a0c080112080500000006000000'
    """
    with encoding("SampleResponse"):
        targets, alternatives = response.target_prompt_logprobs, response.prompt_alt_tokens
        plain: Plain = {
            "sequences": [
                _sequence_to_plain(one, f"sequences[{i}]") for i, one in enumerate(response.sequences)
            ],
            "prompt_logprobs": _floats_to_plain(
                response.prompt_logprobs_np, response._prompt_logprobs_list, "prompt_logprobs"
            ),
            "topk_prompt_logprobs": _topk_to_plain(
                response.topk_prompt_logprobs_np, response._topk_prompt_logprobs_list, "topk_prompt_logprobs"
            ),
            "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
            "target_prompt_logprobs": None if targets is None else tensor_to_plain(targets),
            "prompt_alt_tokens": None if alternatives is None else _alternatives_to_plain(alternatives),
        }
        out = write_plain(tables.SAMPLE_RESPONSE, plain)
        check_size(out.size)
    return out


def _alternatives_to_plain(alternatives: PromptAltTokens) -> Plain:
    return {
        "tokens": tensor_to_plain(alternatives.tokens),
        "logprobs": tensor_to_plain(alternatives.logprobs),
    }


def _sequence_to_plain(sequence: SampledSequence, where: str) -> Plain:
    tokens = sequence.tokens_np if sequence._tokens_list is None else sequence._tokens_list
    return {
        "stop_reason": _STOP_NUMBERS[sequence.stop_reason],
        "tokens": payload(tokens_as_int32(() if tokens is None else tokens, f"{where}.tokens"), INT32),
        "logprobs": _floats_to_plain(sequence.logprobs_np, sequence._logprobs_list, f"{where}.logprobs"),
        "topk_sampled_logprobs": _topk_to_plain(
            sequence.topk_logprobs_np, sequence._topk_logprobs_list, f"{where}.topk_logprobs"
        ),
    }


def _floats_to_plain(
    array: AnyArray | None, listed: Sequence[float | None] | None, where: str
) -> memoryview | None:
    if listed is not None:
        array = np.array([np.nan if value is None else value for value in listed], dtype=np.float64)
    return None if array is None else payload(to_float32(array, where), FLOAT32)


def _topk_to_plain(topk: TopkLogprobs | None, listed: Any, where: str) -> Plain | None:
    if listed is not None:
        topk = _topk_from_lists(listed)
    if topk is None:
        return None
    if topk.token_ids.ndim != 2 or topk.token_ids.shape != topk.logprobs.shape:
        shapes = f"{list(topk.token_ids.shape)} and {list(topk.logprobs.shape)}"
        raise FieldFault(f"token_ids and logprobs must be two matrices of one shape, got {shapes}", where)
    length, k = topk.token_ids.shape
    ids = tokens_as_int32(topk.token_ids.reshape(-1), f"{where}.token_ids")
    logprobs = to_float32(topk.logprobs, f"{where}.logprobs")
    return {
        "token_ids": payload(ids, INT32),
        "logprobs": payload(logprobs, FLOAT32),
        "k": k,
        "length": length,
    }


def _topk_from_lists(rows: Sequence[Sequence[tuple[int, float]] | None]) -> TopkLogprobs:
    """Convert the list form to matrices; pad short rows with empty cells."""
    k = max((len(row or ()) for row in rows), default=0)
    cells = [[*(row or ()), *[(0, NO_LOGPROB)] * (k - len(row or ()))] for row in rows]
    shape = len(rows), k
    ids = np.array([token for row in cells for token, _ in row], dtype=np.int64)
    logprobs = np.array([logprob for row in cells for _, logprob in row], dtype=np.float64)
    return TopkLogprobs(ids.reshape(shape), logprobs.reshape(shape))
