"""Limits, unions and states of a search for sessions."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from tinker_sync import types
from tinker_sync.errors import InvalidInputError
from tinker_sync.types import SessionSearchRequest


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"limit": 0}, "limit: expected 1 or more and at most 200, got 0"),
        ({"limit": 201}, "limit: expected 1 or more and at most 200, got 201"),
        ({"display_name": ""}, "display_name: expected 1 or more characters, got 0"),
        ({"statuses": []}, "statuses: expected 1 or more items, got 0"),
        (
            {"statuses": [{"type": "client_finished", "reasons": []}]},
            "statuses[0].reasons: expected 1 or more items, got 0",
        ),
        (
            {"owner": {"type": "user", "owner_urns": ["u"] * 11}},
            "owner.owner_urns: expected 1 to 10 items, got 11",
        ),
        (
            {"cursor": {"last_created_at": "2026-01-31T12:00:00", "last_session_id": "s"}},
            "cursor.last_created_at: expected a datetime with a time zone, got 2026-01-31 12:00:00",
        ),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        SessionSearchRequest(**arguments)
    assert str(caught.value) == f"SessionSearchRequest.{text}"


def test_a_search_is_dumped_as_declared() -> None:
    request = SessionSearchRequest(
        statuses=[types.ActiveSessionStatusQuery(), {"type": "client_finished", "reasons": ("errored",)}],
        cursor=types.SessionSearchCursor(
            last_created_at=datetime(2026, 1, 31, tzinfo=timezone.utc), last_session_id="s"
        ),
    )
    assert request.statuses == [
        types.ActiveSessionStatusQuery(),
        types.ClientFinishedSessionStatusQuery(reasons=["errored"]),
    ]
    assert request.model_dump(mode="json", exclude_none=True) == {
        "user_metadata": {},
        "owner": {"type": "own"},
        "statuses": [{"type": "active"}, {"type": "client_finished", "reasons": ["errored"]}],
        "limit": 50,
        "cursor": {"last_created_at": "2026-01-31T00:00:00Z", "last_session_id": "s"},
    }


SUMMARY = {
    "session_id": "s",
    "created_at": "2026-01-31T12:00:00Z",
    "owner": "u",
    "project_id": "p",
    "checkpoints_count": 0,
}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (None, None),
        (
            {
                "type": "failed",
                "category": "user",
                "message": "m",
                "reason": {"type": "sampling_session", "sampling_session_id": "x"},
            },
            types.SessionFailed(
                category="user",
                message="m",
                reason=types.SessionFailedSamplingSessionReason(sampling_session_id="x"),
            ),
        ),
        (
            {"type": "client_finished", "reason": {"type": "interrupted", "new": 1}},
            types.ClientSessionFinished(reason=types.ClientSessionFinishInterrupted()),
        ),
    ],
)
def test_a_state_is_recognized_by_its_type(status: Any, expected: Any) -> None:
    assert types.SessionSummary.model_validate({**SUMMARY, "status": status}).status == expected
