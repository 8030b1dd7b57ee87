"""Frozen records that the store returns. Moments are in UTC."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final, Literal

from attrs import frozen

from tinker_sync.local.engine.lora import LoraSettings

CheckpointKind = Literal["training", "sampler", "external"]
UsageKind = Literal["training", "prefill", "prefill_cached", "sample", "checkpoint", "storage"]
FOLDERS: Final[Mapping[CheckpointKind, str]] = {
    "training": "weights",
    "sampler": "sampler_weights",
    "external": "external_weights",
}
"""The folder of each kind in `tinker://` paths."""
DEFAULT_PROJECT: Final = "default"
"""The project under which the server shows, lists and finds what is in no project."""


@frozen(kw_only=True)
class SessionRow:
    """The record of a session.

    Attributes:
        status: the status in the protocol's form, such as `{"type": "active"}`.
        seen_at: the moment of its last heartbeat, or of its end; before these, of its beginning.
        checkpoints_count, checkpoints_bytes: the present checkpoints of all its runs.
    """

    session_id: str
    created_at: datetime
    seen_at: datetime
    tags: tuple[str, ...]
    user_metadata: dict[str, Any] | None
    sdk_version: str | None
    project_id: str | None
    display_name: str | None
    status: dict[str, Any]
    checkpoints_count: int
    checkpoints_bytes: int


@frozen(kw_only=True)
class CheckpointRow:
    """The record of a checkpoint.

    >>> from datetime import timezone
    >>> when = datetime(2026, 1, 31, tzinfo=timezone.utc)
    >>> row = CheckpointRow(run_id="r-1", kind="sampler", name="final", created_at=when, size_bytes=9)
    >>> row.checkpoint_id, row.tinker_path
    ('sampler_weights/final', 'tinker://r-1/sampler_weights/final')
    """

    run_id: str
    kind: CheckpointKind
    name: str
    created_at: datetime
    size_bytes: int
    expires_at: datetime | None = None
    published: bool = False
    user_metadata: dict[str, Any] | None = None
    project_id: str | None = None
    base_model: str = ""
    number: int = 0
    """The number of the save: a checkpoint that replaces another of its name has a higher number."""

    @property
    def checkpoint_id(self) -> str:
        """The id within the run: the folder of the kind, and the name."""
        return f"{FOLDERS[self.kind]}/{self.name}"

    @property
    def tinker_path(self) -> str:
        """The checkpoint's path for clients."""
        return f"tinker://{self.run_id}/{self.checkpoint_id}"


@frozen(kw_only=True)
class RunRow:
    """The record of a training run.

    Attributes:
        corrupted: True when the run cannot be continued.
        seen_at: the moment of its last request to train, save or load; before that, of its beginning.
        last_checkpoint, last_sampler_checkpoint: the newest checkpoint of the kind `training` or `sampler`;
            None if all are deleted or expired.
    """

    run_id: str
    session_id: str
    model_seq_id: int
    base_model: str
    lora: LoraSettings
    optimizer_config: dict[str, Any]
    user_metadata: dict[str, Any] | None
    project_id: str | None
    created_at: datetime
    seen_at: datetime
    corrupted: bool
    last_checkpoint: CheckpointRow | None
    last_sampler_checkpoint: CheckpointRow | None


@frozen(kw_only=True)
class SamplerRow:
    """The record of a sampler.

    Attributes:
        model_path: the path of the adapter's checkpoint; `unsaved:` and the id of the run for weights that no
            checkpoint contains; None for the base model itself.
        checkpoint: the number of the save that `model_path` named when the sampler was added, if known.
    """

    sampler_id: str
    session_id: str
    base_model: str
    model_path: str | None
    checkpoint: int | None
    created_at: datetime


@frozen(kw_only=True)
class HourlyUsageRow:
    """The usage of one kind in one hour, of one session or project.

    Attributes:
        amount: a number of tokens; for `checkpoint` a number of saves; for `storage` gigabyte hours.
        session_id, base_model: None for storage.
    """

    bucket_start: datetime
    kind: UsageKind
    amount: float
    session_id: str | None = None
    project_id: str | None = None
    base_model: str | None = None


@frozen(kw_only=True)
class StorageRow:
    """The number and the total size of the checkpoints that one project has now."""

    project_id: str | None
    checkpoint_count: int
    size_bytes: int


@frozen(kw_only=True)
class AuditRow:
    """The record of an event in the audit log."""

    at: datetime
    event: str
    detail: dict[str, Any]
