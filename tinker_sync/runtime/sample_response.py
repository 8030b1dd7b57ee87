"""Checks of a sample's response against its request. The functions are pure; any thread may call them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_sync._numpy import np
from tinker_sync.errors import UnsupportedByServerError, WireError
from tinker_sync.types.sampling import SampledSequence, SampleRequest, SampleResponse, TopkLogprobs


def named(response: SampleResponse, sequence_ids: Sequence[str] | None) -> SampleResponse:
    """Add the sequence ids of its promise, which older servers do not send, to a new response; return it.

    Raises:
        WireError: the promise has a different number of ids.

    >>> from tinker_sync.types.sampling import SampledSequence
    >>> named(SampleResponse([SampledSequence("stop")]), ["seq-1"]).sequences[0].sequence_id
    'seq-1'
    """
    if not sequence_ids:
        return response
    if len(sequence_ids) != len(response.sequences):
        raise WireError(
            f"the promise has {len(sequence_ids)} ids for {len(response.sequences)} sequences",
            "sample_sequence_ids",
        )
    for sequence, name in zip(response.sequences, sequence_ids, strict=True):
        sequence._fill("sequence_id", name)
    return response


def check_response(request: SampleRequest, response: SampleResponse) -> SampleResponse:
    """Check a response against its request, and return it.

    If the server leaves out the entry of the first prompt token, the returned response has it.

    Raises:
        UnsupportedByServerError: a part that the request asks for is missing.
        WireError: the response has a different number of sequences or scores than the request asks for.
    """
    sequences = response.sequences
    if len(sequences) != request.num_samples:
        raise WireError(f"expected {request.num_samples}, got {len(sequences)}", "sequences")
    for index, sequence in enumerate(sequences):
        if sequence._logprobs is not None or request.topk_sample_logprobs:
            _check_sequence(sequence, index, request.topk_sample_logprobs)
    asks_for_prompt = (
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.prompt_alt_tokens_k
        or request.target_prompt_logprobs is not None
    )
    if asks_for_prompt:
        _check_prompt(request, response)
    return _with_first_score(request, response)


def _check_sequence(sequence: SampledSequence, index: int, topk: int) -> None:
    count, logprobs = sequence.length, sequence._logprobs
    # Some servers send an empty list if they computed no scores.
    if logprobs is not None and len(logprobs) not in (0, count):
        _refuse_size(f"sequences[{index}].logprobs", count, len(logprobs))
    if topk and count:
        if sequence.topk_logprobs_np is None:
            raise _ignored("topk_sample_logprobs")
        _check_rows(f"sequences[{index}].topk_logprobs", sequence.topk_logprobs_np, {count})


def _check_prompt(request: SampleRequest, response: SampleResponse) -> None:
    scored, last_n = response._prompt_logprobs, request.prompt_logprobs_last_n
    length = request.prompt.known_length()
    # A prompt of one token has no scores, because a first token has none.
    scorable = length != 1
    if request.prompt_logprobs and scored is None and scorable:
        raise _ignored("prompt_logprobs")
    if request.topk_prompt_logprobs and response.topk_prompt_logprobs_np is None and scorable:
        raise _ignored("topk_prompt_logprobs")
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise _ignored("prompt_alt_tokens_k")
    if request.target_prompt_logprobs is not None and response.target_prompt_logprobs is None:
        raise _ignored("target_prompt_logprobs")
    if last_n is not None and scored is not None and not _only_last(np.asarray(scored), last_n):
        raise _ignored("prompt_logprobs_last_n")
    if length is not None:
        _check_lengths(request, response, length)


def _check_lengths(request: SampleRequest, response: SampleResponse, length: int) -> None:
    # Some servers leave out the entry of the first token, which has no score.
    expected = {length, length - 1}
    if request.prompt_logprobs_last_n is not None:
        expected.add(request.prompt_logprobs_last_n)
    scored, topk = response._prompt_logprobs, response.topk_prompt_logprobs_np
    if scored is not None and len(scored) not in expected:
        _refuse_size("prompt_logprobs", length, len(scored))
    if topk is not None:
        _check_rows("topk_prompt_logprobs", topk, expected)
    targets, asked = response.target_prompt_logprobs, request.target_prompt_logprobs
    if targets is not None and asked is not None and targets._effective_shape != asked._effective_shape:
        raise WireError(
            f"expected the shape {asked._effective_shape}, got {targets._effective_shape}",
            "target_prompt_logprobs",
        )
    alternatives, width = response.prompt_alt_tokens, request.prompt_alt_tokens_k
    if alternatives is not None and width:
        for name in ("tokens", "logprobs"):
            size = getattr(alternatives, name)._numpy.size
            if size != (length - 1) * width:
                _refuse_size(f"prompt_alt_tokens.{name}", (length - 1) * width, size)


def _check_rows(path: str, topk: TopkLogprobs, expected: set[int]) -> None:
    rows = len(topk.token_ids)
    if rows not in expected:
        _refuse_size(path, max(expected), rows)


def _refuse_size(path: str, expected: int, got: int) -> None:
    raise WireError(f"expected {expected} values, got {got}", path)


def _ignored(feature: str) -> UnsupportedByServerError:
    return UnsupportedByServerError(f"the server ignored {feature}", feature=feature)


def _with_first_score(request: SampleRequest, response: SampleResponse) -> SampleResponse:
    """Add an entry for the first token, which has no score, if the server leaves it out."""
    scored, length = response._prompt_logprobs, request.prompt.known_length()
    if scored is None and request.prompt_logprobs and length == 1:
        scored = np.empty(0, dtype=np.float32)
    if scored is not None and len(scored) + 1 == length:
        return response.model_copy(update={"prompt_logprobs_np": np.insert(np.asarray(scored), 0, np.nan)})
    return response


def _only_last(scored: Any, last_n: int) -> bool:
    early = scored[: max(len(scored) - last_n, 0)]
    return bool((early != early).all())  # a token without a score has NaN, which differs from itself
