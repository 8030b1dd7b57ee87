"""Promises: what the server answers at once, and how the result is fetched later."""

from __future__ import annotations

from enum import Enum
from typing import Literal, TypeAlias

import attrs

from tinker_sync.errors import RequestErrorCategory
from tinker_sync.types._model import Model, model
from tinker_sync.types.model import CreateModelResponse, UnloadModelResponse
from tinker_sync.types.optim import OptimStepResponse
from tinker_sync.types.scalars import ModelID, RequestID
from tinker_sync.types.training import ForwardBackwardOutput
from tinker_sync.types.weights import (
    LoadWeightsResponse,
    SaveWeightsExternalResponse,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)


@model
class UntypedAPIFuture(Model):
    """The server took the request; its result is to be had under `request_id`.

    Attributes:
        sample_sequence_ids: the ids the sampled sequences will have, in the order of the response.

    >>> UntypedAPIFuture(request_id="req-1").model_id is None
    True
    """

    __response__ = True

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None


@model
class FutureRetrieveRequest(Model):
    """Ask for a result; `allow_metadata_only` lets the server tell the size of a large one first."""

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
    """The server has no result yet; `queue_state` gives the reason."""

    __response__ = True

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]


@model
class RequestFailedResponse(Model):
    """The request failed. A category this package does not know is `Unknown`.

    >>> RequestFailedResponse(error="out of memory", category="something new").category
    <RequestErrorCategory.Unknown: 'unknown'>
    """

    __response__ = True

    error: str
    category: RequestErrorCategory


FutureRetrieveResponse: TypeAlias = (
    TryAgainResponse
    | ForwardBackwardOutput
    | OptimStepResponse
    | SaveWeightsResponse
    | LoadWeightsResponse
    | SaveWeightsForSamplerResponse
    | SaveWeightsExternalResponse
    | CreateModelResponse
    | UnloadModelResponse
    | RequestFailedResponse
)
"""All that may come back for a training request."""


# --------------------------------------------------------------------- all samples of a session at once


@model
class SamplingSessionFuturesTarget(Model):
    """Whose results to ask for: a sampling session, and which of the processes that share it."""

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str
    cloned_sampler_id: int = 0


@model
class FuturesRetrieveRequest(Model):
    """Ask which requests have come to an end since a cursor.

    Attributes:
        timeout: how long the server may hold the question open, in seconds; None leaves it to the server.
        retrieved_request_ids: those whose results were fetched since the last question.

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
    """A request came to a good end; the size is that of its result before compression."""

    __response__ = True

    state: Literal["finished"] = "finished"
    request_id: RequestID
    response_payload_uncompressed_size: int | None = None


@model
class FutureFailed(Model):
    """A request failed; fetching its result tells why."""

    __response__ = True

    state: Literal["failed"] = "failed"
    request_id: RequestID


FutureCompletion: TypeAlias = FutureFinished | FutureFailed
"""How a request ended."""


@model
class FuturesRetrieveResponse(Model):
    """The requests that came to an end, and the cursor for the next question.

    >>> reply = FuturesRetrieveResponse(completions=[{"state": "failed", "request_id": "req-1"}], cursor=1)
    >>> reply.completions
    [FutureFailed(state='failed', request_id='req-1')]
    """

    __response__ = True

    completions: list[FutureCompletion]
    cursor: int
