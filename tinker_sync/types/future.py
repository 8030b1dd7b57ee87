"""Promises of the server, the poll for the result of a promise, and the answers that have no result."""

from __future__ import annotations

from enum import Enum
from typing import Literal

from tinker_sync.errors import RequestErrorCategory
from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import ModelID, RequestID


@model
class UntypedAPIFuture(Model):
    """A promise: the server has accepted a request, and polls for `request_id` will return its result.

    Attributes:
        sample_sequence_ids: the ids of the future sampled sequences, in the order of the response; None if
            the server gives no ids.

    >>> UntypedAPIFuture(request_id="req-1").model_id is None
    True
    """

    __response__ = True

    request_id: RequestID
    model_id: ModelID | None = None
    sample_sequence_ids: list[str] | None = None


@model
class FutureRetrieveRequest(Model):
    """A poll for the result of one promise.

    With `allow_metadata_only`, the server may answer with the size of a large result in place of the result.
    """

    request_id: RequestID
    allow_metadata_only: bool = False


class QueueState(str, Enum):
    """The state of the queue in which a request waits. A state that this package does not know is `UNKNOWN`.

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
        """True for the states in which the server holds requests back.

        >>> QueueState.ACTIVE.paused
        False
        """
        return self in (QueueState.PAUSED_RATE_LIMIT, QueueState.PAUSED_CAPACITY)


@model
class TryAgainResponse(Model):
    """The answer to a poll for a result that is not ready, with the state of the queue."""

    __response__ = True

    type: Literal["try_again"] = "try_again"
    request_id: str
    queue_state: Literal["active", "paused_capacity", "paused_rate_limit"]


@model
class RequestFailedResponse(Model):
    """The answer to a poll for a request that has failed. An unknown category becomes `Unknown`.

    >>> RequestFailedResponse(error="out of memory", category="something new").category
    <RequestErrorCategory.Unknown: 'unknown'>
    """

    __response__ = True

    error: str
    category: RequestErrorCategory
