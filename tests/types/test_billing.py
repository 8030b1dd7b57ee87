"""Kinds of usage are recognized by their type, or by their fields without one."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_sync import types
from tinker_sync.errors import InvalidInputError

EVENT = {"bucket_start": "2026-01-30T00:00:00Z", "bucket_end": "2026-01-30T01:00:00Z"}


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ({"type": "training", "token_count": 5}, types.TrainingBillingEvent(token_count=5)),
        (
            {"type": "sampling_sample", "token_count": 5, "new": 1},
            types.SamplingSampleBillingEvent(token_count=5),
        ),
        ({"type": "checkpoint", "count": 2}, types.CheckpointBillingEvent(count=2)),
        ({"type": "storage", "gigabyte_hours": 1}, types.StorageBillingEvent(gigabyte_hours=1.0)),
        ({"cached": True, "token_count": 5}, types.SamplingPrefillBillingEvent(cached=True, token_count=5)),
        ({"cached": "perhaps", "token_count": 5}, types.TrainingBillingEvent(token_count=5)),
        ({"gigabyte_hours": 1}, types.StorageBillingEvent(gigabyte_hours=1.0)),
    ],
)
def test_kinds_of_usage_are_recognized(used: dict[str, Any], expected: Any) -> None:
    assert types.BillingUsageEvent(**EVENT, event_info=used).event_info == expected


def test_a_bad_event_is_named_by_its_index() -> None:
    good = {**EVENT, "event_info": {"type": "checkpoint", "count": 2}}
    broken = {**EVENT, "event_info": {"type": "checkpoint", "count": "many"}}
    with pytest.raises(
        InvalidInputError,
        match=r"^BillingUsageResponse\.data\[1\]\.event_info\.count: expected a whole number",
    ):
        types.BillingUsageResponse.model_validate({"data": [good, broken]})
