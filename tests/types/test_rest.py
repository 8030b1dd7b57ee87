"""Checkpoint paths are parsed, and reprs hide signed addresses."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, RequestErrorCategory
from tinker_sync.types import (
    Checkpoint,
    ExternalWeightsUrlsResponse,
    ParsedCheckpointTinkerPath,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
    SessionSearchRequest,
)
from tinker_sync.types._moment import from_unix_time, parse_moment


@pytest.mark.parametrize(
    ("path", "run", "kind", "checkpoint"),
    [
        ("tinker://run-1/weights/a", "run-1", "training", "weights/a"),
        ("tinker://s:train:0/sampler_weights/b c", "s:train:0", "sampler", "sampler_weights/b c"),
        ("tinker://r/external_weights/é", "r", "external", "external_weights/é"),
        ("tinker://r/weights/...", "r", "training", "weights/..."),
    ],
)
def test_a_path_is_parsed(path: str, run: str, kind: str, checkpoint: str) -> None:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed.tinker_path == path
    assert (parsed.training_run_id, parsed.checkpoint_type, parsed.checkpoint_id) == (run, kind, checkpoint)


@pytest.mark.parametrize(
    "path",
    [
        "", "run/weights/a", "tinker:/run/weights/a", "Tinker://run/weights/a", " tinker://run/weights/a",
        "tinker://run/weights", "tinker://run/weights/a/b", "tinker://run/other/a",
        "tinker://run/Weights/a", "tinker:///weights/a", "tinker://run/weights/", "tinker://../weights/a",
        "tinker://run/weights/..", "tinker://run/weights/.",
    ],
)  # fmt: skip
def test_a_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert str(caught.value) == (
        f"{path!r}: expected tinker://RUN/FOLDER/NAME, "
        "where FOLDER is one of weights, sampler_weights, external_weights"
    )


def test_reprs_show_the_host_of_signed_addresses_only() -> None:
    urls = {
        "a": "https://user:pass-777@files.example:8443/secret-777/a?X-Amz-Signature=sig-777#frag-777",
        "b": "https://[broken-777",
        "c": "sig-777",
    }
    response = ExternalWeightsUrlsResponse(urls=urls, expires="2026-01-31T12:00:00Z")
    assert "777" not in repr(response)
    assert "'a': 'https://files.example/…'" in repr(response)
    assert response.urls == urls
    assert response.model_dump()["urls"] == urls


def test_an_unknown_kind_of_checkpoint_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^Checkpoint\.checkpoint_type: .*'training'"):
        Checkpoint(checkpoint_id="a", checkpoint_type="weights", time=0, tinker_path="a")


@pytest.mark.parametrize(("system", "name"), [("posix", "s:a:0_weights_a"), ("nt", "s_a_0_weights_a")])
def test_a_download_gets_a_directory_that_the_system_can_make(
    monkeypatch: pytest.MonkeyPatch, system: str, name: str
) -> None:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path("tinker://s:a:0/weights/a")
    with monkeypatch.context() as patch:
        patch.setattr("os.name", system)
        found = parsed.directory_name
    assert found == name


# --------------- Console addresses of saved weights, and access tokens hidden from reprs and errors
@pytest.mark.parametrize("cls", [SaveWeightsResponse, SaveWeightsForSamplerResponse])
def test_console_addresses_quote_both_parts(cls: type[Any]) -> None:
    saved = cls(path="tinker://s:train:0/weights/a b?")
    base = "https://tinker.thinkingmachines.ai/checkpoints/"
    assert saved.get_console_url() == base + "s%3Atrain%3A0/weights%2Fa%20b%3F"
    with pytest.raises(InvalidInputError, match="FOLDER"):
        cls(path="elsewhere").get_console_url()


def test_playground_addresses_quote_the_path() -> None:
    saved = SaveWeightsForSamplerResponse(path="tinker://r/sampler_weights/a&b")
    base = "https://tinker.thinkingmachines.ai/playground?mode=checkpoint&checkpoint="
    assert saved.get_playground_url() == base + "tinker%3A%2F%2Fr%2Fsampler_weights%2Fa%26b"


# ---------------------- Kinds of usage are recognized by their type, or by their fields without one
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
        match=r"^BillingUsageResponse\.data\[1\]\.event_info\.count: ",
    ):
        types.BillingUsageResponse.model_validate({"data": [good, broken]})


# ----------------------------------------------- Limits, unions and states of a search for sessions
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


# ------------------------------------------------------------------ Promises, polls and completions
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
    with pytest.raises(InvalidInputError, match=r"\.completions\[1\]\.state: .*'failed'"):
        types.FuturesRetrieveResponse(completions=[reply.completions[0], {"state": "lost"}], cursor=0)


def test_an_unknown_queue_state_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^TryAgainResponse\.queue_state: "):
        types.TryAgainResponse(request_id="r", queue_state="asleep")


# ------------------------------- Moments are parsed and formatted exactly, the same on every Python
NOON = datetime(2026, 1, 31, 12, 0)  # noqa: DTZ001  # naive on purpose
UTC = timezone.utc


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-31T12:00:00Z", NOON.replace(tzinfo=UTC)),
        ("2026-01-31t12:00:00z", NOON.replace(tzinfo=UTC)),
        ("2026-01-31 12:00Z", NOON.replace(tzinfo=UTC)),
        (" 2026-01-31T12:00:00Z\n", NOON.replace(tzinfo=UTC)),
        ("2026-01-31T12:00:00-00:00", NOON.replace(tzinfo=UTC)),
        ("2026-01-31T12:00:00+05:30", NOON.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        ("2026-01-31T12:00:00-0530", NOON.replace(tzinfo=timezone(-timedelta(hours=5, minutes=30)))),
        ("2026-01-31T12:00:00\u221205:30", NOON.replace(tzinfo=timezone(-timedelta(hours=5, minutes=30)))),
        ("2026-01-31T12:00:00.5Z", NOON.replace(microsecond=500_000, tzinfo=UTC)),
        ("2026-01-31T12:00:00,000001Z", NOON.replace(microsecond=1, tzinfo=UTC)),
        ("2026-01-31T12:00:00.123456789Z", NOON.replace(microsecond=123_456, tzinfo=UTC)),
        ("2026-01-31T12:00:00", NOON),
        ("2026-01-31", NOON.replace(hour=0)),
        ("2026-01-31_12:00:00+0530", NOON.replace(tzinfo=timezone(timedelta(hours=5, minutes=30)))),
        ("20000000000", datetime(2603, 10, 11, 11, 33, 20, tzinfo=UTC)),
        ("20000000001", datetime(1970, 8, 20, 11, 33, 20, 1000, tzinfo=UTC)),
        ("1700000000", datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
        ("1700000000.5", datetime(2023, 11, 14, 22, 13, 20, 500_000, tzinfo=UTC)),
        ("-20000000001", datetime(1969, 5, 14, 12, 26, 39, 999_000, tzinfo=UTC)),
        ("-5", datetime(1969, 12, 31, 23, 59, 55, tzinfo=UTC)),
    ],
)
def test_text_is_parsed(text: str, moment: datetime) -> None:
    parsed = parse_moment(text)
    assert parsed == moment
    assert parsed.utcoffset() == moment.utcoffset()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "-",
        "nan",
        "2026-13-01",
        "inf",
        "1e9",
        "2026-02-30",
        "2026-1-31",
        "26-01-31",
        "2026-01-31T",
        "2026-01-31T12",
        "2026-01-31T24:00:00Z",
        "2026-01-31T12:60:00Z",
        "2026-01-31T23:59:60Z",
        "2026-01-31T12:00:00.Z",
        "2026-01-31T12:00:00+24:00",
        "2026-01-31T12:00:00+01:60",
        "2026-01-31T12:00:00+5:30",
        "2026-01-31T12:00:00Zulu",
        "2026-01-31T12:00:00Z2026-01-31T12:00:00Z",
        "\u0662\u0660\u0662\u0666-01-31",
        "2026-01-31T12:00:00Z" + "x" * 100_000,
    ],
)
def test_other_text_is_refused_with_a_short_message(text: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_moment(text)
    assert len(str(caught.value)) < 200


@given(st.datetimes(datetime(1970, 1, 1), datetime(2500, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_unix_times_in_seconds_are_parsed(moment: datetime) -> None:
    assert abs(from_unix_time(moment.timestamp()) - moment) < timedelta(milliseconds=1)


@given(st.datetimes(datetime(1971, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)))  # noqa: DTZ001
def test_unix_times_in_milliseconds_are_parsed(moment: datetime) -> None:
    assert abs(from_unix_time(moment.timestamp() * 1000) - moment) < timedelta(milliseconds=1)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1e300, 1e18])
def test_numbers_beyond_the_calendar_are_refused(number: float) -> None:
    with pytest.raises((ValueError, OverflowError)):
        from_unix_time(number)
