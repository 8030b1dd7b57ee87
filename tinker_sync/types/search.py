"""The searches for sessions and checkpoints: requests, results, and the states of a session.

Both searches are experimental: the service may change them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal, TypeAlias

import attrs

from tinker_sync.types._checks import holds, in_range, with_time_zone
from tinker_sync.types._model import Model, model
from tinker_sync.types.checkpoint import Checkpoint
from tinker_sync.types.scalars import CheckpointType, ClientSessionFinishReasonType

# -------------------------------------------------------------------------------------- owners and states


@model
class OwnSearchOwner(Model):
    """A search condition: the caller is the owner."""

    type: Literal["own"] = "own"


@model
class AccessibleSearchOwner(Model):
    """A search condition: the owner is any user whose objects the caller may see."""

    type: Literal["accessible"] = "accessible"


@model
class UserSearchOwner(Model):
    """A search condition: the owner is one of 1 to 10 named users.

    >>> UserSearchOwner(owner_urns=[])
    Traceback (most recent call last):
        ...
    tinker_sync.errors.InvalidInputError: UserSearchOwner.owner_urns: expected 1 to 10 items, got 0
    """

    type: Literal["user"] = "user"
    owner_urns: list[str] = attrs.field(validator=holds(1, 10))


SearchOwner: TypeAlias = OwnSearchOwner | AccessibleSearchOwner | UserSearchOwner
"""The condition of a search for the owner."""


@model
class ActiveSessionStatusQuery(Model):
    """A search condition: the session is active."""

    type: Literal["active"] = "active"


@model
class CancelledSessionStatusQuery(Model):
    """A search condition: the session was cancelled in the console."""

    type: Literal["cancelled"] = "cancelled"


@model
class FailedSessionStatusQuery(Model):
    """A search condition: the session failed because of a request, a run or a sampler."""

    type: Literal["failed"] = "failed"


@model
class ClientFinishedSessionStatusQuery(Model):
    """A search condition: the program finished the session, for one of `reasons`; None stands for any reason.

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
"""The condition of a search for the state of a session."""


# ------------------------------------------------------------------------------------------ the search


@model
class SessionSearchCursor(Model):
    """The position of the next page of sessions. Give a response's `next_cursor` to the next search."""

    __response__ = True

    last_created_at: datetime = attrs.field(validator=with_time_zone)
    last_session_id: str


@model
class SessionSearchRequest(Model):
    """A search for sessions that meet all given conditions.

    If both `session_id` and `display_name` are given, a session needs to match only one of them.

    Attributes:
        session_id: the id of the session.
        project_ids: the projects to search; None means all that the caller may list.
        user_metadata: entries that the session must have.
        display_name: words that the name must contain; case does not matter.
        owner: the owners of the sessions.
        statuses: the states to search for; None means any.
        limit: the size of a page, 1 to 200.
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


# -------------------------------------------------------------------------------------------- results


@model
class SessionFailedRequestReason(Model):
    """The cause of a failed session: a request."""

    __response__ = True

    type: Literal["request"] = "request"
    request_id: str
    request_type: str


@model
class SessionFailedTrainingRunReason(Model):
    """The cause of a failed session: a training run."""

    __response__ = True

    type: Literal["training_run"] = "training_run"
    training_run_id: str


@model
class SessionFailedSamplingSessionReason(Model):
    """The cause of a failed session: a sampling session."""

    __response__ = True

    type: Literal["sampling_session"] = "sampling_session"
    sampling_session_id: str


SessionFailedReason: TypeAlias = (
    SessionFailedRequestReason | SessionFailedTrainingRunReason | SessionFailedSamplingSessionReason
)
"""The cause of a session's failure."""


@model
class SessionFailed(Model):
    """The state of a session that failed through a fault of the user or of the service."""

    __response__ = True

    type: Literal["failed"] = "failed"
    category: Literal["user", "internal"]
    reason: SessionFailedReason
    message: str


@model
class SessionCancelled(Model):
    """The state of a session that was cancelled in the console."""

    __response__ = True

    type: Literal["cancelled"] = "cancelled"
    detail: str | None = None


@model
class ClientSessionFinishSuccess(Model):
    """The reason of a session's end: the program ended normally."""

    __response__ = True

    type: Literal["success"] = "success"


@model
class ClientSessionFinishErrored(Model):
    """The reason of a session's end: the program raised an exception."""

    __response__ = True

    type: Literal["errored"] = "errored"


@model
class ClientSessionFinishInterrupted(Model):
    """The reason of a session's end: the program was interrupted."""

    __response__ = True

    type: Literal["interrupted"] = "interrupted"


ClientSessionFinishReason: TypeAlias = (
    ClientSessionFinishSuccess | ClientSessionFinishErrored | ClientSessionFinishInterrupted
)
"""The reason for the end of a session, as the program reports it."""


@model
class ClientSessionFinished(Model):
    """The state of a session that its program has finished."""

    __response__ = True

    type: Literal["client_finished"] = "client_finished"
    reason: ClientSessionFinishReason
    detail: str | None = None


@model
class SessionActive(Model):
    """The state of a session that is in use."""

    __response__ = True

    type: Literal["active"] = "active"


SessionStatus: TypeAlias = SessionFailed | SessionCancelled | ClientSessionFinished | SessionActive
"""The state of a session; distinguish the kinds by class or by `type`."""


@model
class SessionSummary(Model):
    """One session in the result of a search. `status` is None if the state of the session is unknown.

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
    """A page of sessions; the last page has no `next_cursor`.

    >>> SessionSearchResponse(sessions=[]).next_cursor is None
    True
    """

    __response__ = True

    sessions: list[SessionSummary]
    next_cursor: SessionSearchCursor | None = None


@model
class CheckpointSearchCursor(Model):
    """The position of the next page of checkpoints. Give a response's `next_cursor` to the next search."""

    __response__ = True

    last_created_at: datetime = attrs.field(validator=with_time_zone)
    last_checkpoint_uuid: str


@model
class CheckpointSearchRequest(Model):
    """A search for checkpoints. All conditions must hold.

    Attributes:
        project_ids: the projects to search; None means all that the caller may list.
        user_metadata: entries that the checkpoint must have.
        checkpoint_type: the type to search for; None means any.
        owner: the owners of the checkpoints.
        base_models: the base models to search for; None means any, an empty list matches nothing.
        limit: the size of a page, 1 to 200.
        cursor: None for the first page.

    >>> CheckpointSearchRequest(checkpoint_type="sampler", base_models=["org/base"]).owner
    OwnSearchOwner(type='own')
    """

    project_ids: list[str] | None = None
    user_metadata: dict[str, str] = attrs.field(factory=dict)
    checkpoint_type: CheckpointType | None = None
    owner: SearchOwner = OwnSearchOwner()
    base_models: list[str] | None = None
    limit: int = attrs.field(default=50, validator=in_range(ge=1, le=200))
    cursor: CheckpointSearchCursor | None = None


@model
class CheckpointSearchResponse(Model):
    """A page of the checkpoints that match, the newest first. The last page has no `next_cursor`.

    >>> CheckpointSearchResponse(checkpoints=[]).next_cursor is None
    True
    """

    __response__ = True

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
