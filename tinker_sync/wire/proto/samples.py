"""The codec of `SampleResponse`. Pure functions; any thread may use them."""

from __future__ import annotations

import sys
from array import array as c_array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinker_sync._base.lazy import LazyModule
from tinker_sync._base.numpy import np
from tinker_sync.errors import InvalidInputError
from tinker_sync.types._arrays import to_float32, tokens_as_int32
from tinker_sync.types.sampling import (
    NO_LOGPROB,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TopkLogprobs,
    _Views,
)
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto.codec import (
    Buffers,
    FieldFault,
    Plain,
    Readable,
    check_size,
    read_message,
    undecodable,
    unencodable,
    write_plain,
)

if TYPE_CHECKING:
    from tinker_sync._base.numpy import AnyArray
    from tinker_sync.types.scalars import StopReason
    from tinker_sync.wire.proto import _tensors
else:  # it needs numpy, and most responses need neither
    _tensors = LazyModule("tinker_sync.wire.proto._tensors")

_STOP_REASONS: dict[int, StopReason] = {tables.STOP_REASON_STOP: "stop", tables.STOP_REASON_LENGTH: "length"}
_STOP_NUMBERS = {name: number for number, name in _STOP_REASONS.items()}

# ------------------------------------------------------------------------------------------ samples in

# Decoded values fit their fields. So each result is a copy of one of these with its own values, and no
# converter runs.
_SEQUENCE, _RESPONSE = SampledSequence("stop"), SampleResponse([])
_USUAL = {"sequences", "prompt_cache_hit_tokens"}
"""The fields of most responses."""


def decode_sample_response(data: Readable) -> SampleResponse:
    """Decode a response. Tokens and log-probabilities stay packed until a list or an array is read.

    All arrays are writable, and none uses the memory of `data`. Absent log-probabilities become None, and a
    present but empty list of them stays empty. The message has no sequence ids, so `sequence_id` stays None.

    Raises:
        WireError: the bytes are not a valid response; `path` names the field, as in
            ``sequences[2].topk_sampled_logprobs.token_ids``.

    >>> response = decode_sample_response(bytes.fromhex("0a0c080112080500000006000000"))
    >>> response.sequences[0].tokens, response.sequences[0].logprobs
    ([5, 6], None)
    """
    plain = read_message(tables.SAMPLE_RESPONSE, data)
    sequences: list[SampledSequence] = []
    try:
        try:
            for sequence in plain.get("sequences", ()):
                sequences.append(_read_sequence(sequence))  # noqa: PERF401 -- the except clause uses its length
        except FieldFault as fault:
            raise fault.under(f"sequences[{len(sequences)}]") from None
        return _RESPONSE._with(
            sequences=sequences,
            prompt_cache_hit_tokens=plain.get("prompt_cache_hit_tokens", 0),
            _views=_Views(),
            **(_read_scores(plain) if not plain.keys() <= _USUAL else {}),
        )
    except (FieldFault, InvalidInputError) as error:
        raise undecodable("SampleResponse", error) from None


def _read_scores(plain: Plain) -> Plain:
    """Return the fields of a response that have scores of the prompt."""
    return {
        "_prompt_logprobs": _read_packed(plain, "prompt_logprobs", "f"),
        "topk_prompt_logprobs_np": _read_topk(plain, "topk_prompt_logprobs"),
        "target_prompt_logprobs": _read_tensor(plain, "target_prompt_logprobs"),
        "prompt_alt_tokens": _read_alternatives(plain),
    }


def _read_sequence(plain: Plain) -> SampledSequence:
    number = plain.get("stop_reason", tables.STOP_REASON_STOP)
    reason = _STOP_REASONS.get(number)
    if reason is None:
        raise FieldFault(f"{number} is not a known StopReason", "stop_reason")
    tokens = _read_packed({"tokens": b"", **plain}, "tokens", "i")
    logprobs = _read_packed(plain, "logprobs", "f")
    if logprobs and len(logprobs) != len(tokens):
        raise FieldFault(f"{len(logprobs)} values for {len(tokens)} tokens", "logprobs")
    topk = _read_topk(plain, "topk_sampled_logprobs") if "topk_sampled_logprobs" in plain else None
    return _SEQUENCE._with(
        stop_reason=reason, _tokens=tokens, _logprobs=logprobs, topk_logprobs_np=topk, _views=_Views()
    )


def _read_packed(plain: Plain, name: str, code: str) -> Any:
    """Return the four-byte numbers of a `bytes` field as an array of the standard library; None if absent."""
    if name not in plain:
        return None
    octets = plain[name]
    if len(octets) % 4:
        raise FieldFault(f"{len(octets)} bytes are not a whole number of 4-byte values", name)
    packed = c_array(code)
    packed.frombytes(octets)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def _read_topk(plain: Plain, name: str) -> TopkLogprobs | None:
    """Read the likeliest tokens as two matrices; None if they are absent or empty.

    Servers send empty matrices if the request asks for none.
    """
    if name not in plain:
        return None
    topk = plain[name]
    shape = topk.get("length", 0), topk.get("k", 0)
    try:
        ids = _reshape(_tensors.view_array(topk, "token_ids", _tensors.INT32), shape, "token_ids")
        logprobs = _reshape(_tensors.view_array(topk, "logprobs", _tensors.FLOAT32), shape, "logprobs")
    except FieldFault as fault:
        raise fault.under(name) from None
    if not all(shape):
        return None
    return TopkLogprobs(ids.astype(_tensors.OWN_INT32), logprobs.astype(_tensors.OWN_FLOAT32))


def _reshape(values: AnyArray, shape: tuple[int, int], name: str) -> AnyArray:
    length, k = shape
    if values.size != length * k:
        raise FieldFault(f"{values.size} values do not fill length {length} times k {k}", name)
    return values.reshape(shape) if values.size else values


def _read_tensor(plain: Plain, name: str) -> Any:
    if name not in plain:
        return None
    try:
        return _tensors.read_tensor(plain[name])
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
    """Encode a response whose numbers are arrays or lists. Sequence ids are not part of the message.

    The pieces of the result are views of the arrays where possible: join or send them before the arrays
    change.

    Raises:
        InvalidInputError: a value does not fit its field; the message names the path.

    >>> sequence = SampledSequence("length", None, np.array([5, 6], dtype=np.int32))
    >>> encode_sample_response(SampleResponse([sequence])).join().hex()
    '0a0c080112080500000006000000'
    """
    targets, alternatives = response.target_prompt_logprobs, response.prompt_alt_tokens
    try:
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
            "target_prompt_logprobs": None if targets is None else _tensors.tensor_to_plain(targets),
            "prompt_alt_tokens": None if alternatives is None else _alternatives_to_plain(alternatives),
        }
        out = write_plain(tables.SAMPLE_RESPONSE, plain)
        check_size(out.size)
    except FieldFault as fault:
        raise unencodable("SampleResponse", fault) from None
    return out


def _alternatives_to_plain(alternatives: PromptAltTokens) -> Plain:
    return {
        "tokens": _tensors.tensor_to_plain(alternatives.tokens),
        "logprobs": _tensors.tensor_to_plain(alternatives.logprobs),
    }


def _sequence_to_plain(sequence: SampledSequence, where: str) -> Plain:
    given = sequence.tokens_np if sequence._tokens_list is None else sequence._tokens_list
    tokens = tokens_as_int32(() if given is None else given, f"{where}.tokens")
    return {
        "stop_reason": _STOP_NUMBERS[sequence.stop_reason],
        "tokens": _tensors.payload(tokens, _tensors.INT32),
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
    return None if array is None else _tensors.payload(to_float32(array, where), _tensors.FLOAT32)


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
        "token_ids": _tensors.payload(ids, _tensors.INT32),
        "logprobs": _tensors.payload(logprobs, _tensors.FLOAT32),
        "k": k,
        "length": length,
    }


def _topk_from_lists(rows: Sequence[Sequence[tuple[int, float]] | None]) -> TopkLogprobs:
    """Convert lists of pairs to two matrices; pad short rows with empty cells."""
    k = max((len(row or ()) for row in rows), default=0)
    cells = [[*(row or ()), *[(0, NO_LOGPROB)] * (k - len(row or ()))] for row in rows]
    shape = len(rows), k
    ids = np.array([token for row in cells for token, _ in row], dtype=np.int64)
    logprobs = np.array([logprob for row in cells for _, logprob in row], dtype=np.float64)
    return TopkLogprobs(ids.reshape(shape), logprobs.reshape(shape))
