"""The split of the data of a training call into requests, by size and by count. Pure; any thread.

Sizes are the estimates to which the server's limits on chunks refer. They are computed from the contents of a
datum, without encoding it. Keys, spans and framing do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tinker_sync.errors import InvalidInputError
from tinker_sync.types.model_input import (
    DmelChunk,
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    ModelInputChunk,
)

if TYPE_CHECKING:
    from tinker_sync.types.datum import Datum

# A token is an int32 in training requests, and decimal text in sampling requests.
_TRAINING_TOKEN_BYTES: Final = 4
_SAMPLING_TOKEN_BYTES: Final = 10


class DataChunk(NamedTuple):
    """The data of one request, in the order of the call, and their estimated size."""

    data: Sequence[Datum]
    size_bytes: int


def estimate_bytes(datum: Datum) -> int:
    """Return the estimated size of a datum in a training request.

    >>> from tinker_sync.types import Datum
    >>> datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [0, 1, 1]})
    >>> estimate_bytes(datum)  # 3 tokens of 4 bytes, 3 targets of 8, 3 weights of 4
    48
    """
    size_bytes = sum([_chunk_bytes(chunk, _TRAINING_TOKEN_BYTES) for chunk in datum.model_input.chunks])
    return size_bytes + sum([tensor.nbytes for tensor in datum.loss_fn_inputs.values()])


def estimate_prompt_bytes(prompt: ModelInput) -> int:
    """Return the estimated size of a prompt in a sampling request.

    >>> estimate_prompt_bytes(ModelInput.from_ints([1, 2, 3]))
    30
    """
    return sum(_chunk_bytes(chunk, _SAMPLING_TOKEN_BYTES) for chunk in prompt.chunks)


def _chunk_bytes(chunk: ModelInputChunk, token_bytes: int) -> int:
    if isinstance(chunk, EncodedTextChunk):
        return token_bytes * len(chunk.tokens)
    if isinstance(chunk, ImageChunk):
        return len(chunk.data)
    if isinstance(chunk, DmelChunk):
        return len(chunk.dmel)
    return len(chunk.location)


def split(data: Sequence[Datum], *, max_bytes: int, max_count: int) -> list[DataChunk]:
    """Split data into chunks of at most `max_bytes` (estimated) and `max_count` each, in order.

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
