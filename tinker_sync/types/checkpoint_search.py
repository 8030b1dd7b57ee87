"""Searching checkpoints: what to look for, and what was found. Experimental: the service may change it."""

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
    """Where the next page begins: hand a response's `next_cursor` back as it is."""

    __response__ = True

    last_created_at: datetime = attrs.field(validator=with_time_zone)
    last_checkpoint_uuid: str


@model
class CheckpointSearchRequest(Model):
    """Look for checkpoints. All conditions must hold.

    Attributes:
        project_ids: in one of these projects; None is every project the caller may list.
        user_metadata: with these entries among others.
        checkpoint_type: of this type; None is any.
        owner: whose.
        base_models: of one of these models; None is any, and an empty list none.
        limit: checkpoints a page, 1 to 200.
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
    """A page of the checkpoints that match, the newest first. `next_cursor` is None on the last one.

    >>> CheckpointSearchResponse(checkpoints=[]).next_cursor is None
    True
    """

    __response__ = True

    checkpoints: list[Checkpoint]
    next_cursor: CheckpointSearchCursor | None = None
