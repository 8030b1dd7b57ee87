"""Reports of errors, which contain no text of the user."""

from __future__ import annotations

import json

import attrs
import pytest

from tinker_sync import errors
from tinker_sync.telemetry.reports import describe, draft_failure, is_user_error, locate
from tinker_sync.wire import json as wire_json

KEY = "tml-planted-key-0123456789"
PROMPT = "planted prompt: 31, 41, 59"
REQUEST = errors.RequestInfo(
    method="POST", url="https://user:planted-pw@h/pre/api/v1/asample?x=planted", headers={"X-API-Key": KEY}
)


def chained(outer: Exception, inner: Exception) -> Exception:
    outer.__cause__ = inner
    return outer


def status(code: int) -> errors.APIStatusError:
    body = json.dumps({"detail": [{"input": PROMPT, "msg": f"no {KEY}"}]}).encode()
    return errors.APIStatusError.from_reply(
        code, {"X-Request-Id": "r-9", "Set-Cookie": "planted"}, body, request=REQUEST, attempts=3
    )


@pytest.mark.parametrize(
    ("error", "description"),
    [
        (status(500), "status 500, POST, /pre/api/v1/asample, request r-9, 3 attempts"),
        (errors.RequestFailedError(PROMPT, "r-7", "server"), "category server, request r-7"),
        (
            errors.DeadlineError(PROMPT, request_id="r-7", attempts=4, last_words=PROMPT),
            "request r-7, 4 attempts",
        ),
        (errors.InvalidInputError([PROMPT, KEY]), ""),
        (KeyError(PROMPT), ""),
        (attrs.evolve, ""),
    ],
)
def test_description_of_errors(error: object, description: str) -> None:
    assert describe(error) == description  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error",
    [
        status(500),
        status(422),
        chained(errors.TinkerError(f"{KEY} {PROMPT}"), status(400)),
        errors.APIConnectionError(f"cannot reach {REQUEST.url} with {KEY}", REQUEST),
        errors.RequestFailedError(f"{PROMPT} {KEY}", "r-1", "user"),
        errors.RequestFailedError(f"{PROMPT} {KEY}", "r-1", "server"),
        errors.InvalidInputError([f"data[0]: {PROMPT}", KEY]),
        chained(RuntimeError(PROMPT), KeyError(KEY)),
        ValueError(KEY, {"prompt": PROMPT}),
    ],
    ids=lambda error: type(error).__name__,
)
def test_reports_hide_headers_keys_and_prompts(error: Exception) -> None:
    secret, prompt = KEY, PROMPT  # local variables of a user's frame
    with pytest.raises(type(error)) as caught:
        raise error
    shown = repr(draft_failure(caught.value, 0.0))
    assert secret not in shown
    assert prompt not in shown
    assert "planted" not in shown
    assert __file__ not in shown


@pytest.mark.parametrize(
    ("error", "users"),
    [
        (status(400), True),
        (status(401), True),
        (status(408), False),
        (status(429), True),
        (status(500), False),
        (errors.RequestFailedError("m", "r", "user"), True),
        (errors.RequestFailedError("m", "r", "server"), False),
        (errors.InvalidInputError("m"), True),
        (errors.APIConnectionError(), False),
        (KeyError("a"), False),
        (chained(KeyError("a"), status(404)), True),
        (chained(KeyError("a"), chained(ValueError(), errors.InvalidInputError("m"))), True),
    ],
)
def test_user_errors_are_recognized(error: Exception, users: bool) -> None:
    assert is_user_error(error) is users


def test_events_of_both_kinds() -> None:
    failure = draft_failure(status(503), 12.5)
    assert (failure.event, failure.severity, failure.time_s) == ("UNHANDLED_EXCEPTION", "ERROR", 12.5)
    assert failure.fields["error_type"] == "InternalServerError"
    users = draft_failure(status(422), 12.5)
    assert (users.event, users.severity) == ("GENERIC_EVENT", "WARNING")
    assert users.fields["event_name"] == "user_error"
    assert users.fields["event_data"] == {
        "error_type": "UnprocessableEntityError",
        "message": "status 422, POST, /pre/api/v1/asample, request r-9, 3 attempts",
        "status_code": 422,
    }
    assert failure.key != users.key


def test_locations_are_of_this_package_only() -> None:
    try:
        wire_json.loads(b"{")
    except errors.TinkerError as caught:
        found = locate(caught)
    lines = found.splitlines()
    assert lines[0] == "WireError:"
    assert all(line.startswith("  tinker_sync.wire.json") for line in lines[1:2])
    assert "test_reports" not in found
    assert locate(KeyError("never raised")) == ""


def test_texts_and_chains_are_bounded() -> None:
    error = errors.APIStatusError("m", status_code=500, path="/" + "x" * 10_000)
    assert len(describe(error)) <= 2000
    first, second = KeyError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert is_user_error(first) is False
