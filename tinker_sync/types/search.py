"""Searching sessions: what to look for, what was found, and the states a session can be in."""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

import attrs

from tinker_sync.types._checks import holds, in_range, with_time_zone
from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import ClientSessionFinishReasonType

# ---------------------------------------------------------------------------------- whose, in which state


@model
class OwnSearchOwner(Model):
    """Only the caller's sessions."""

    type: Literal["own"] = "own"


@model
class AccessibleSearchOwner(Model):
    """The sessions of everybody, as far as the caller may see them."""

    type: Literal["accessible"] = "accessible"


@model
class UserSearchOwner(Model):
    """The sessions of these users, 1 to 10 of them.

    >>> UserSearchOwner(owner_urns=[])
    Traceback (most recent call last):
        ...
    tinker_sync.errors.InvalidInputError: UserSearchOwner.owner_urns: expected 1 to 10 items, got 0
    """

    type: Literal["user"] = "user"
    owner_urns: list[str] = attrs.field(validator=holds(1, 10))


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner
"""Whose sessions to look through."""


@model
class ActiveSessionStatusQuery(Model):
    """Sessions that still run."""

    type: Literal["active"] = "active"


@model
class CancelledSessionStatusQuery(Model):
    """Sessions that were cancelled in the console."""

    type: Literal["cancelled"] = "cancelled"


@model
class FailedSessionStatusQuery(Model):
    """Sessions that one of their requests, runs or samplers made fail."""

    type: Literal["failed"] = "failed"


@model
class ClientFinishedSessionStatusQuery(Model):
    """Sessions whose program said it was done: in one of these ways, or in any when None.

    >>> ClientFinishedSessionStatusQuery(reasons=["errored", "interrupted"]).type
    'client_finished'
    """

    type: Literal["client_finished"] = "client_finished"
    reasons: list[ClientSessionFinishReasonType] | None = attrs.field(default=None, validator=holds(1))


SessionStatusQuery: TypeAlias = (
    ActiveSessionStatusQuery
    | CancelledSessionStatusQuery
    | FailedSessionStatusQuery
    | ClientFinishedSessionStatusQuery
)
"""One state to look for."""


# ------------------------------------------------------------------------------------------ the search


@model
class SessionSearchCursor(Model):
    """Where the next page begins: hand a response's `next_cursor` back as it is."""

    __response__ = True

    last_created_at: datetime = attrs.field(validator=with_time_zone)
    last_session_id: str


@model
class SessionSearchRequest(Model):
    """Look for sessions. All conditions must hold, but id and name: with both, either will do.

    Attributes:
        session_id: exactly this one.
        project_ids: in one of these projects; None is every project the caller may list.
        user_metadata: with these entries among others.
        display_name: with these words in the name, whatever their case.
        statuses: in one of these states; None is any.
        limit: sessions a page, 1 to 200.
        cursor: None for the first page.

    >>> request = SessionSearchRequest(display_name="night", statuses=[FailedSessionStatusQuery()])
    >>> request.owner, request.limit
    (OwnSearchOwner(type='own'), 50)
    """

    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = attrs.field(factory=dict)
    display_name: str | None = attrs.field(default=None, validator=holds(1))
    owner: SearchOwner = OwnSearchOwner()
    statuses: list[SessionStatusQuery] | None = attrs.field(default=None, validator=holds(1))
    limit: int = attrs.field(default=50, validator=in_range(ge=1, le=200))
    cursor: SessionSearchCursor | None = None


# ------------------------------------------------------------------------------------ what was found


@model
class SessionFailedRequestReason(Model):
    """A request made the session fail."""

    __response__ = True

    type: Literal["request"] = "request"
    request_id: str
    request_type: str


@model
class SessionFailedTrainingRunReason(Model):
    """A training run made the session fail."""

    __response__ = True

    type: Literal["training_run"] = "training_run"
    training_run_id: str


@model
class SessionFailedSamplingSessionReason(Model):
    """A sampling session made the session fail."""

    __response__ = True

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)
"""What made a session fail."""


@model
class SessionFailed(Model):
    """The session failed, by the user's fault or the service's."""

    __response__ = True

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


@model
class SessionCancelled(Model):
    """The session was cancelled in the console."""

    __response__ = True

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


@model
class ClientSessionFinishSuccess(Model):
    """The program came to its end."""

    __response__ = True

    type: Literal["success"] = "success"


@model
class ClientSessionFinishErrored(Model):
    """The program ended with an exception."""

    __response__ = True

    type: Literal["errored"] = "errored"


@model
class ClientSessionFinishInterrupted(Model):
    """Somebody stopped the program."""

    __response__ = True

    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
"""How a program said its session ended."""


@model
class ClientSessionFinished(Model):
    """The program that opened the session said it was done."""

    __response__ = True

    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


@model
class SessionActive(Model):
    """The session is in use."""

    __response__ = True

    type: Literal["active"] = "active"


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive
"""The state of a session; tell them apart by class or by `type`."""


@model
class SessionSummary(Model):
    """One session that was found. `status` is None when it neither ended nor is known to run.

    >>> found = SessionSummary(
    ...     session_id="s-1",
    ...     created_at="2026-01-31T12:00:00Z",
    ...     owner="user-1",
    ...     project_id="p-1",
    ...     status={"type": "client_finished", "reason": {"type": "success"}},
    ...     checkpoints_count=2,
    ... )
    >>> found.status.reason
    ClientSessionFinishSuccess(type='success')
    """

    __response__ = True

    session_id: str
    created_at: datetime
    owner: str
    project_id: str
    status: SessionStatus | None = None
    checkpoints_count: int
    display_name: str | None = None
    user_metadata: dict[str, str] | None = None
    checkpoint_storage_bytes: int | None = None


@model
class SessionSearchResponse(Model):
    """A page of sessions; `next_cursor` is None on the last one.

    >>> SessionSearchResponse(sessions=[]).next_cursor is None
    True
    """

    __response__ = True

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None
