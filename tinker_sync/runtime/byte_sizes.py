"""The sizes of requests and results, and the split of data into chunks.

Sizes are the estimates to which the server's limits on chunks refer. They are computed from the contents of a
datum or a prompt, without encoding it. Field names, provenance spans and framing do not count. Any thread may
call these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tinker_sync.errors import InvalidInputError
from tinker_sync.transport.call import ANSWER_BYTES
from tinker_sync.types.model_input import (
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)

if TYPE_CHECKING:
    from tinker_sync.types.datum import Datum
    from tinker_sync.types.sampling import SampleRequest

# A token is an int32 in training requests, and decimal text in sampling requests.
_TRAINING_TOKEN_BYTES: Final = 4
_SAMPLING_TOKEN_BYTES: Final = 10


# A token or a log-probability takes some 30 bytes as JSON.
_RESULT_TOKEN_BYTES: Final = 100
# A pass gives a few numbers for each token. In a request the token takes 12 bytes and more.
_RESULT_FACTOR: Final = 64
# The length of a sample to which the request sets no limit.
_LONGEST_SAMPLE: Final = 1_000_000


class DataChunk(NamedTuple):
    """A chunk of a pass: the data of one request, in the order of the call, and their estimated size."""

    data: Sequence[Datum]
    size_bytes: int


def estimate_bytes(datum: Datum) -> int:
    """Return the estimated size of a datum in a training request.

    >>> from tinker_sync.types import Datum
    >>> datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]})
    >>> estimate_bytes(datum)  # 3 tokens of 4 bytes, 3 targets of 8, 3 weights of 4
    48
    """
    size_bytes = 0
    for chunk in datum.model_input.chunks:
        size_bytes += _chunk_bytes(chunk, _TRAINING_TOKEN_BYTES)
    for tensor in datum.loss_fn_inputs.values():
        size_bytes += tensor._numpy.nbytes if tensor._crow is None else tensor.nbytes
    return size_bytes


def estimate_prompt_bytes(prompt: ModelInput) -> int:
    """Return the estimated size of a prompt in a sampling request. A text token counts as 10 bytes.

    >>> estimate_prompt_bytes(ModelInput.from_ints([1, 2, 3]))
    30
    """
    size_bytes = 0
    for chunk in prompt.chunks:
        size_bytes += _chunk_bytes(chunk, _SAMPLING_TOKEN_BYTES)
    return size_bytes


def _chunk_bytes(chunk: ModelInputChunk, token_bytes: int) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return token_bytes * chunk.length
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    if isinstance(chunk, DmelChunk):
        return len(chunk.dmel)
    return len(chunk.location)


def split(data: Sequence[Datum], *, max_bytes: int, max_count: int) -> list[DataChunk]:
    """Split data into chunks of at most `max_bytes` (estimated) and `max_count` data each, in order.

    A datum larger than `max_bytes` gets a chunk of its own.

    Raises:
        InvalidInputError: there is no data.

    >>> from tinker_sync.types import Datum
    >>> datum = Datum(ModelInput.from_ints([1, 2]))
    >>> [len(chunk.data) for chunk in split([datum] * 5, max_bytes=1000, max_count=2)]
    [2, 2, 1]
    """
    if not data:
        raise InvalidInputError("data: expected at least one datum, got none")
    chunks = []
    begin = size_bytes = 0
    for index, datum in enumerate(data):
        datum_bytes = estimate_bytes(datum)
        count = index - begin
        if count and (size_bytes + datum_bytes > max_bytes or count >= max_count):
            chunks.append(DataChunk(data[begin:index], size_bytes))
            begin, size_bytes = index, 0
        size_bytes += datum_bytes
    chunks.append(DataChunk(data[begin:], size_bytes))
    return chunks


def most_sample_bytes(request: SampleRequest, prompt_bytes: int) -> int:
    """Return an upper bound for the size of a sampling request's result.

    >>> from tinker_sync.types import SampleRequest, SamplingParams
    >>> prompt, settings = ModelInput.from_ints([1]), SamplingParams(max_tokens=5)
    >>> most_sample_bytes(SampleRequest(prompt=prompt, sampling_params=settings), 10) // 2**20
    8
    """
    longest = request.sampling_params.max_tokens
    sampled = request.num_samples * (_LONGEST_SAMPLE if longest is None else longest)
    most_bytes = ANSWER_BYTES + sampled * _RESULT_TOKEN_BYTES * (1 + request.topk_sample_logprobs)
    scores = 1 + request.topk_prompt_logprobs + request.prompt_alt_tokens_k
    most_bytes += prompt_bytes // _SAMPLING_TOKEN_BYTES * _RESULT_TOKEN_BYTES * scores
    if request.target_prompt_logprobs is not None:
        most_bytes += request.target_prompt_logprobs.nbytes * _RESULT_FACTOR
    return most_bytes


def most_pass_bytes(chunk_bytes: int) -> int:
    """Return an upper bound for the size of a chunk's result; for other training calls, `chunk_bytes` is 0.

    >>> most_pass_bytes(0) // 2**20
    8
    """
    return ANSWER_BYTES + chunk_bytes * _RESULT_FACTOR
