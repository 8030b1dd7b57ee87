"""The search for checkpoints. Experimental: the service may change it."""

from __future__ import annotations

from datetime import datetime

import attrs

from tinker_sync.types._checks import in_range, with_time_zone
from tinker_sync.types._model import Model, model
from tinker_sync.types.checkpoint import Checkpoint
from tinker_sync.types.scalars import CheckpointType
from tinker_sync.types.search import OwnSearchOwner, SearchOwner


@model
class CheckpointSearchCursor(Model):
    """The position of the next page: pass a response's `next_cursor` back unchanged."""

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
