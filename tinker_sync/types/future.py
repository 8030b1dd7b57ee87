"""Promises of the server, and the requests that fetch their results."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

import attrs

from tinker_sync.errors import RequestErrorCategory
from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import ModelID, RequestID


@model
class UntypedAPIFuture(Model):
    """A promise: the server accepted the request and keeps its result under `request_id`.

    Attributes:
        sample_sequence_ids: the ids of the future sampled sequences, in the order of the response.

    >>> UntypedAPIFuture(request_id="req-1").model_id is None
    True
    """

    __response__ = True

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None


@model
class FutureRetrieveRequest(Model):
    """A request for a result; `allow_metadata_only` lets the server first send the size of a large one."""

    request_id: RequestID
    allow_metadata_only: bool = False


class QueueState(str, Enum):
    """The state of the queue in which a request waits. A state this package does not know is `UNKNOWN`.

    >>> QueueState("paused_capacity").paused, QueueState("something new")
    (True, <QueueState.UNKNOWN: 'unknown'>)
    """

    ACTIVE = "active"
    PAUSED_RATE_LIMIT = "paused_rate_limit"
    PAUSED_CAPACITY = "paused_capacity"
    UNKNOWN = "unknown"

    __str__ = str.__str__

    @classmethod
    def _missing_(cls, value: object) -> QueueState:  # noqa: ARG003  # the enum machinery gives it
        return cls.UNKNOWN

    @property
    def paused(self) -> bool:
        """True while the server holds the request back.

        >>> QueueState.ACTIVE.paused
        False
        """
        return self in (QueueState.PAUSED_RATE_LIMIT, QueueState.PAUSED_CAPACITY)


@model
class TryAgainResponse(Model):
    """The result is not ready; `queue_state` gives the reason."""

    __response__ = True

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]


@model
class RequestFailedResponse(Model):
    """The request failed. An unknown category becomes `Unknown`.

    >>> RequestFailedResponse(error="out of memory", category="something new").category
    <RequestErrorCategory.Unknown: 'unknown'>
    """

    __response__ = True

    error: str
    category: RequestErrorCategory


# --------------------------------------------------------------------- all samples of a session at once


@model
class SamplingSessionFuturesTarget(Model):
    """A sampling session, and the number of the process among those that share it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


@model
class FuturesRetrieveRequest(Model):
    """A request for the requests that have ended since a cursor.

    Attributes:
        timeout: the longest time the server may hold the request, in seconds; None leaves it to the server.
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
    """A request succeeded; the size is that of its result before compression."""

    __response__ = True

    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


@model
class FutureFailed(Model):
    """A request failed; its result holds the reason."""

    __response__ = True

    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion: TypeAlias = FutureFinished | FutureFailed
"""The end of a request."""


@model
class FuturesRetrieveResponse(Model):
    """The ended requests, and the cursor for the next poll.

    >>> reply = FuturesRetrieveResponse(completions=[{"state": "failed", "request_id": "req-1"}], cursor=1)
    >>> reply.completions
    [FutureFailed(state='failed', request_id='req-1')]
    """

    __response__ = True

    completions: list[FutureCompletion]
    cursor: int
