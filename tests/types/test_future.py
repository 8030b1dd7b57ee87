"""Promises, polls and completions."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, RequestErrorCategory


@pytest.mark.parametrize(
    ("given", "category"),
    [
        ("user", RequestErrorCategory.User),
        ("server", RequestErrorCategory.Server),
        (RequestErrorCategory.User, RequestErrorCategory.User),
        ("something new", RequestErrorCategory.Unknown),
        (None, RequestErrorCategory.Unknown),
    ],
)
def test_an_unknown_category_becomes_unknown(given: Any, category: RequestErrorCategory) -> None:
    failed = types.RequestFailedResponse.model_validate({"error": "e", "category": given})
    assert failed.category is category
    assert failed.model_dump(mode="json") == {"error": "e", "category": category.value}


def test_completions_are_recognized_by_their_state() -> None:
    reply = types.FuturesRetrieveResponse.model_validate(
        {
            "completions": [
                {"state": "finished", "request_id": "a", "response_payload_uncompressed_size": 5},
                {"state": "failed", "request_id": "b"},
            ],
            "cursor": 2,
        }
    )
    assert reply.completions == [
        types.FutureFinished(request_id="a", response_payload_uncompressed_size=5),
        types.FutureFailed(request_id="b"),
    ]
    with pytest.raises(
        InvalidInputError, match=r"\.completions\[1\]\.state: expected one of 'finished', 'failed'"
    ):
        types.FuturesRetrieveResponse(completions=[reply.completions[0], {"state": "lost"}], cursor=0)


def test_an_unknown_queue_state_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^TryAgainResponse\.queue_state: "):
        types.TryAgainResponse(request_id="r", queue_state="asleep")
