"""The poll for all samples of a sampling session at once."""

from __future__ import annotations

from typing import Literal, TypeAlias

import attrs

from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import RequestID


@model
class SamplingSessionFuturesTarget(Model):
    """The target of a poll: a sampling session, and this process's number among those that share it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


@model
class FuturesRetrieveRequest(Model):
    """A request for the samples that have ended since the poll that returned `prev_cursor`.

    Attributes:
        prev_cursor: the cursor of the last answer; 0 in the first request.
        timeout: the most seconds that the server may wait with its answer; None lets the server decide.
        retrieved_request_ids: the requests whose results were fetched since the last such request.

    >>> target = SamplingSessionFuturesTarget(sampling_session_id="s-1:sample:0")
    >>> FuturesRetrieveRequest(target=target).prev_cursor
    0
    """

    target: SamplingSessionFuturesTarget
    prev_cursor: int = 0
    timeout: float | None = None
    retrieved_request_ids: list[str] = attrs.field(factory=list)


@model
class FutureFinished(Model):
    """The notice that a request has succeeded, with the size of its result before compression."""

    __response__ = True

    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


@model
class FutureFailed(Model):
    """The notice that a request has failed. A poll for its result returns the reason."""

    __response__ = True

    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion: TypeAlias = FutureFinished | FutureFailed
"""The end of a request."""


@model
class FuturesRetrieveResponse(Model):
    """The requests of a sampling session that have ended, and the cursor for the next poll.

    >>> reply = FuturesRetrieveResponse(completions=[{"state": "failed", "request_id": "req-1"}], cursor=1)
    >>> reply.completions
    [FutureFailed(state='failed', request_id='req-1')]
    """

    __response__ = True

    completions: list[FutureCompletion]
    cursor: int
