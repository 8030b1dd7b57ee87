"""What is made of the response to a sample, once it is decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinker_sync._numpy import AnyArray, np
from tinker_sync.errors import UnsupportedByServerError
from tinker_sync.types.sampling import SampleRequest, SampleResponse


def named(response: SampleResponse, sequence_ids: Sequence[str] | None) -> SampleResponse:
    """The response with the ids its promise gave to its sequences, where the server gives any.

    >>> from tinker_sync.types.sampling import SampledSequence
    >>> named(SampleResponse([SampledSequence("stop")]), ["seq-1"]).sequences[0].sequence_id
    'seq-1'
    """
    if sequence_ids is None or len(sequence_ids) != len(response.sequences):
        return response
    pairs = zip(response.sequences, sequence_ids, strict=True)
    return response._with(sequences=[sequence._with(sequence_id=name) for sequence, name in pairs])


def check_response(request: SampleRequest, response: SampleResponse) -> SampleResponse:
    """The response with a place for each prompt token; refused where the server skipped what was asked.

    Raises:
        UnsupportedByServerError: something asked for is missing.
    """
    if request.prompt_alt_tokens_k > 0 and response.prompt_alt_tokens is None:
        raise UnsupportedByServerError(
            "the server ignored prompt_alt_tokens_k", feature="prompt_alt_tokens_k"
        )
    if response._prompt_logprobs is None:
        return response
    last_n = request.prompt_logprobs_last_n
    if last_n is not None and not _only_last(response.prompt_logprobs_np, last_n):
        raise UnsupportedByServerError(
            "the server ignored prompt_logprobs_last_n", feature="prompt_logprobs_last_n"
        )
    if len(response._prompt_logprobs) + 1 == request.prompt.known_length():
        # Some servers leave out the first token, which has no score.
        scored: AnyArray = np.insert(np.asarray(response._prompt_logprobs), 0, np.nan)
        return response.model_copy(update={"prompt_logprobs_np": scored})
    return response


def _only_last(scored: Any, last_n: int) -> bool:
    early = scored[: max(len(scored) - last_n, 0)]
    return bool((early != early).all())  # NaN, which equals nothing, stands where nothing was scored
