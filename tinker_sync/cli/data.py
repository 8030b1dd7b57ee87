"""Models of the API as data to print: to the letter what the reference client prints of them."""

from __future__ import annotations

from typing import Any


def plain(model: Any) -> dict[str, Any]:
    """The fields of a model, but for what newer servers say of a checkpoint and the reference does not print.

    >>> from tinker_sync.types import Checkpoint
    >>> named = {"checkpoint_id": "weights/a", "tinker_path": "tinker://run/weights/a"}
    >>> named |= {"checkpoint_type": "training", "time": "2026-01-31", "base_model": "org/base"}
    >>> shown = plain(Checkpoint(**named))
    >>> "base_model" in shown, shown["size_bytes"] is None
    (False, True)
    """
    data: dict[str, Any] = model.model_dump()
    for each in (data, *data.values()):
        if isinstance(each, dict) and "checkpoint_id" in each:
            each.pop("base_model", None)
    return data
