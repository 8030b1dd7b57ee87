"""`SampleResponse` and `SamplingParams`: what sampling returned, and how to sample.

Any thread may use this.
"""

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
    SamplingParams,
    TopkLogprobs,
)
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._fault import Fault, decoding, encoding, refusals_of_types
from tinker_sync.wire.proto._reader import Plain, Readable, read_message
from tinker_sync.wire.proto._tensors import (
    FLOAT32,
    INT32,
    OWN_FLOAT32,
    OWN_INT32,
    payload,
    plain_tensor,
    raw_array,
    tensor_of,
)
from tinker_sync.wire.proto._writer import Buffers, check_size, write_message, write_plain

if TYPE_CHECKING:
    from tinker_sync.types._arrays import AnyArray
    from tinker_sync.types.scalars import StopReason

_STOP_REASONS: dict[int, StopReason] = {tables.STOP_REASON_STOP: "stop", tables.STOP_REASON_LENGTH: "length"}
_STOP_NUMBERS = {name: number for number, name in _STOP_REASONS.items()}

# ------------------------------------------------------------------------------------------ samples in


def decode_sample_response(data: Readable) -> SampleResponse:
    """The response in these bytes. Every array is a writable copy of its own.

    A list that is there but empty stays an empty array; None means it was not sent. The message does not name
    its sequences: `sequence_id` is None.

    Raises:
        WireError: the bytes are no such response; `path` names the field, as in
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
                sequences.append(_read_sequence(sequence))  # noqa: PERF401 -- its length tells the index
        except Fault as fault:
            raise fault.under(f"sequences[{len(sequences)}]") from None
        return SampleResponse(
            sequences,
            _floats(plain, "prompt_logprobs"),
            _read_topk(plain, "topk_prompt_logprobs"),
            _read_tensor(plain, "target_prompt_logprobs"),
            plain.get("prompt_cache_hit_tokens", 0),
            _read_alternatives(plain),
        )


def _read_sequence(plain: Plain) -> SampledSequence:
    number = plain.get("stop_reason", tables.STOP_REASON_STOP)
    reason = _STOP_REASONS.get(number)
    if reason is None:
        raise Fault(f"{number} is no known StopReason", "stop_reason")
    tokens = raw_array(plain, "tokens", INT32).astype(OWN_INT32)
    logprobs = _floats(plain, "logprobs")
    if logprobs is not None and logprobs.size not in (0, tokens.size):
        raise Fault(f"{logprobs.size} values for {tokens.size} tokens", "logprobs")
    return SampledSequence(reason, None, tokens, logprobs, _read_topk(plain, "topk_sampled_logprobs"))


def _floats(plain: Plain, name: str) -> AnyArray | None:
    return raw_array(plain, name, FLOAT32).astype(OWN_FLOAT32) if name in plain else None


def _read_topk(plain: Plain, name: str) -> TopkLogprobs | None:
    """Two matrices; None also for those without cells, which is how servers say that none was asked for."""
    if name not in plain:
        return None
    topk = plain[name]
    shape = topk.get("length", 0), topk.get("k", 0)
    try:
        ids = _matrix(raw_array(topk, "token_ids", INT32), shape, "token_ids")
        logprobs = _matrix(raw_array(topk, "logprobs", FLOAT32), shape, "logprobs")
    except Fault as fault:
        raise fault.under(name) from None
    return TopkLogprobs(ids.astype(OWN_INT32), logprobs.astype(OWN_FLOAT32)) if all(shape) else None


def _matrix(values: AnyArray, shape: tuple[int, int], name: str) -> AnyArray:
    length, k = shape
    if values.size != length * k:
        raise Fault(f"{values.size} values do not fill length {length} times k {k}", name)
    return values.reshape(shape) if values.size else values


def _read_tensor(plain: Plain, name: str) -> Any:
    if name not in plain:
        return None
    try:
        return tensor_of(plain[name])
    except Fault as fault:
        raise fault.under(name) from None


def _read_alternatives(plain: Plain) -> PromptAltTokens | None:
    if "prompt_alt_tokens" not in plain:
        return None
    # A tensor that is left out is one without a dtype, and refused as such.
    both = {"tokens": {}, "logprobs": {}, **plain["prompt_alt_tokens"]}
    try:
        return PromptAltTokens(_read_tensor(both, "tokens"), _read_tensor(both, "logprobs"))
    except Fault as fault:
        raise fault.under("prompt_alt_tokens") from None


# ------------------------------------------------------------------------------------------ samples out


def encode_sample_response(response: SampleResponse) -> Buffers:
    """The response as buffers; its arrays are views. What was given as lists is sent as well.

    Raises:
        InvalidInputError: something does not fit its field; the text names its place.

    >>> sequence = SampledSequence("length", None, np.array([5, 6], dtype=np.int32))
    >>> encode_sample_response(SampleResponse([sequence])).join().hex()
    '0a0c080112080500000006000000'
    """
    with encoding("SampleResponse"):
        targets, alternatives = response.target_prompt_logprobs, response.prompt_alt_tokens
        plain: Plain = {
            "sequences": [
                _plain_sequence(one, f"sequences[{i}]") for i, one in enumerate(response.sequences)
            ],
            "prompt_logprobs": _plain_floats(
                response.prompt_logprobs_np, response._prompt_logprobs_list, "prompt_logprobs"
            ),
            "topk_prompt_logprobs": _plain_topk(
                response.topk_prompt_logprobs_np, response._topk_prompt_logprobs_list, "topk_prompt_logprobs"
            ),
            "prompt_cache_hit_tokens": response.prompt_cache_hit_tokens,
            "target_prompt_logprobs": None if targets is None else plain_tensor(targets),
            "prompt_alt_tokens": None if alternatives is None else _plain_alternatives(alternatives),
        }
        out = write_plain(tables.SAMPLE_RESPONSE, plain)
        check_size(out.size)
    return out


def _plain_alternatives(alternatives: PromptAltTokens) -> Plain:
    return {"tokens": plain_tensor(alternatives.tokens), "logprobs": plain_tensor(alternatives.logprobs)}


def _plain_sequence(sequence: SampledSequence, where: str) -> Plain:
    tokens = sequence.tokens_np if sequence._tokens_list is None else sequence._tokens_list
    return {
        "stop_reason": _STOP_NUMBERS[sequence.stop_reason],
        "tokens": payload(tokens_as_int32(() if tokens is None else tokens, f"{where}.tokens"), INT32),
        "logprobs": _plain_floats(sequence.logprobs_np, sequence._logprobs_list, f"{where}.logprobs"),
        "topk_sampled_logprobs": _plain_topk(
            sequence.topk_logprobs_np, sequence._topk_logprobs_list, f"{where}.topk_logprobs"
        ),
    }


def _plain_floats(
    array: AnyArray | None, listed: Sequence[float | None] | None, where: str
) -> memoryview | None:
    if listed is not None:
        array = np.array([np.nan if value is None else value for value in listed], dtype=np.float64)
    return None if array is None else payload(to_float32(array, where), FLOAT32)


def _plain_topk(topk: TopkLogprobs | None, listed: Any, where: str) -> Plain | None:
    if listed is not None:
        topk = _topk_of_lists(listed)
    if topk is None:
        return None
    if topk.token_ids.ndim != 2 or topk.token_ids.shape != topk.logprobs.shape:
        shapes = f"{list(topk.token_ids.shape)} and {list(topk.logprobs.shape)}"
        raise Fault(f"token_ids and logprobs must be two matrices of one shape, got {shapes}", where)
    length, k = topk.token_ids.shape
    ids = tokens_as_int32(topk.token_ids.reshape(-1), f"{where}.token_ids")
    logprobs = to_float32(topk.logprobs, f"{where}.logprobs")
    return {
        "token_ids": payload(ids, INT32),
        "logprobs": payload(logprobs, FLOAT32),
        "k": k,
        "length": length,
    }


def _topk_of_lists(rows: Sequence[Sequence[tuple[int, float]] | None]) -> TopkLogprobs:
    """The matrices of the list form, short rows filled up with empty cells."""
    k = max((len(row or ()) for row in rows), default=0)
    cells = [[*(row or ()), *[(0, NO_LOGPROB)] * (k - len(row or ()))] for row in rows]
    shape = len(rows), k
    ids = np.array([token for row in cells for token, _ in row], dtype=np.int64)
    logprobs = np.array([logprob for row in cells for _, logprob in row], dtype=np.float64)
    return TopkLogprobs(ids.reshape(shape), logprobs.reshape(shape))


# ------------------------------------------------------------------------------------------ parameters


def encode_sampling_params(params: SamplingParams) -> Buffers:
    """The parameters as buffers. Temperature and top_p are rounded to float32; one stop text becomes a list.

    Raises:
        InvalidInputError: something does not fit its field; the text names it.

    >>> encode_sampling_params(SamplingParams(max_tokens=5, stop=[7])).join().hex()
    '08051d0000803f20ffffffffffffffffff012d0000803f3a030a0107'
    """
    stop = [params.stop] if isinstance(params.stop, str) else params.stop
    plain: Plain = {name: getattr(params, name) for name in _PARAMETERS}
    if stop is not None:
        is_text = all(isinstance(item, str) for item in stop)
        plain["stop_strs" if is_text else "stop_tokens"] = {"values": stop}
    return write_message(tables.SAMPLING_PARAMS, plain)


def decode_sampling_params(data: Readable) -> SamplingParams:
    """The parameters in these bytes; what is absent has its default. An empty list of stops stays one.

    Raises:
        WireError: the bytes are no such parameters; `path` names the field.

    >>> decode_sampling_params(bytes.fromhex("08053a030a0107")).stop
    [7]
    """
    plain = read_message(tables.SAMPLING_PARAMS, data)
    given: Plain = {name: plain[name] for name in _PARAMETERS if name in plain}
    for name in ("stop_strs", "stop_tokens"):
        if name in plain:
            given["stop"] = plain[name].get("values", [])
    with decoding("SamplingParams"), refusals_of_types(""):
        return SamplingParams(**given)


_PARAMETERS = ("max_tokens", "seed", "temperature", "top_k", "top_p")
