"""Training runs, as the service lists them."""

from __future__ import annotations

from datetime import datetime

from tinker_sync._display import to_pandas
from tinker_sync.types._model import Model, model
from tinker_sync.types.checkpoint import Checkpoint, Cursor


@model
class TrainingRun(Model):
    """One training run and its latest checkpoints.

    Attributes:
        model_owner: the user who created it.
        corrupted: True if the server lost part of its state.
        lora_rank: None unless `is_lora`.
        last_request_time: the moment of its last use.

    >>> TrainingRun(
    ...     training_run_id="run-1",
    ...     base_model="org/base",
    ...     model_owner="user-1",
    ...     is_lora=True,
    ...     lora_rank=32,
    ...     last_request_time="2026-01-31T12:00:00Z",
    ... ).corrupted
    False
    """

    __response__ = True

    training_run_id: str
    base_model: str
    model_owner: str
    is_lora: bool
    corrupted: bool = False
    lora_rank: int | None = None
    last_request_time: datetime
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None
    user_metadata: dict[str, str] | None = None


@model
class TrainingRunsResponse(Model):
    """A page of training runs.

    >>> page = TrainingRunsResponse(training_runs=[], cursor={"offset": 0, "limit": 20, "total_count": 0})
    >>> page.cursor.total_count
    0
    """

    __response__ = True

    training_runs: list[TrainingRun]
    cursor: Cursor

    to_pandas = to_pandas
