"""The public functions that check if there is a key, and if the service accepts it."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from support.servers import AnsweringServer, Seen, answer

from tinker_sync import errors
from tinker_sync.auth import get_tinker_token, raise_if_tinker_not_accessible, tinker_has_credentials
from tinker_sync.config import CredentialsFile, Secret, StoredKey

JWT = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ1In0.planted"
OTHER = "http://localhost:8000"


@pytest.mark.parametrize(
    ("environ", "stored", "token", "has"),
    [
        ({}, "", None, False),
        ({"TINKER_API_KEY": "tml-e"}, "", "tml-e", True),
        ({"TINKER_API_KEY": "tml-e"}, "tml-s", "tml-e", True),
        ({"TINKER_API_KEY": JWT}, "", JWT, True),
        ({"TINKER_API_KEY": ""}, "tml-s", "tml-s", True),
        ({"TINKER_API_KEY": "sk-e"}, "tml-s", None, False),
        ({"TINKER_API_KEY": "sk-e", "TINKER_CREDENTIAL_CMD": "c"}, "tml-s", None, True),
        ({"TINKER_CREDENTIAL_CMD": "c"}, "", None, True),
        ({"TINKER_CREDENTIAL_CMD": "c"}, "tml-s", "tml-s", True),
        ({}, "tml-s", "tml-s", True),
        ({}, "sk-s", None, False),
        ({"TINKER_BASE_URL": OTHER}, "", None, False),
        ({"TINKER_BASE_URL": OTHER, "TINKER_API_KEY": "sk-e"}, "", "sk-e", True),
        ({"TINKER_BASE_URL": "nonsense", "TINKER_API_KEY": "tml-e"}, "", None, False),
    ],
)
def test_credentials_are_found_in_the_environment_and_the_file(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], stored: str, token: str | None, has: bool
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if stored:
        CredentialsFile().add("k", StoredKey(key=Secret(stored), name="n"), make_default=True)
    assert get_tinker_token() == token
    assert tinker_has_credentials() is has


def test_a_broken_credentials_file_is_no_credential() -> None:
    path = CredentialsFile().path
    path.parent.mkdir()
    path.write_text("{")
    assert get_tinker_token() is None
    assert tinker_has_credentials() is False


def test_no_command_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", f"touch {ran}")
    assert tinker_has_credentials()
    assert get_tinker_token() is None
    assert not ran.exists()


# ---- requests to the service


def as_json(tree: Any, status: int = 200) -> bytes:
    return answer(json.dumps(tree).encode(), status=status, headers={"Content-Type": "application/json"})


RUNS = "/api/v1/training_runs?limit=1"
CONFIG, TOKEN, CAPABILITIES = "/api/v1/client/config", "/api/v1/auth/token", "/api/v1/get_server_capabilities"

GOOD: dict[str, bytes] = {
    CONFIG: as_json({"pjwt_auth_enabled": False}),
    TOKEN: as_json({"jwt": JWT}),
    CAPABILITIES: as_json({"supported_models": []}),
}


def ask(monkeypatch: pytest.MonkeyPatch, **replace: bytes) -> list[Seen]:
    """Check the key at a server, and return the requests that the server got.

    Its answers are valid, except for those that `replace` gives.
    """
    table = {**GOOD, **{globals()[name]: reply for name, reply in replace.items()}}
    missing = as_json({"detail": "Not Found"}, 404)
    with AnsweringServer(lambda seen: table.get(seen.target, missing)) as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        raise_if_tinker_not_accessible()
        assert server.seen[-1].target == RUNS  # the only one of these calls that needs a key at open servers
        return server.seen[:-1]


def test_a_usual_service_gets_two_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-e")
    seen = ask(monkeypatch)
    assert [(s.method, s.target, s.header("x-api-key")) for s in seen] == [
        ("POST", CONFIG, "tml-e"),
        ("GET", CAPABILITIES, "tml-e"),
    ]
    assert json.loads(seen[0].body) == {"sdk_version": "0.38.0"}


def test_a_service_that_wants_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-e")
    seen = ask(monkeypatch, CONFIG=as_json({"pjwt_auth_enabled": True}))
    assert [(s.target, s.header("x-api-key")) for s in seen] == [
        (CONFIG, "tml-e"),
        (TOKEN, "tml-e"),
        (CAPABILITIES, JWT),
    ]


def test_a_service_that_wants_the_commands_credential(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-e")
    monkeypatch.setenv("TINKER_CREDENTIAL_CMD", "echo printed")
    config = {"pjwt_auth_enabled": True, "credential_default_source": "credential_cmd"}
    seen = ask(monkeypatch, CONFIG=as_json(config))
    assert [(s.target, s.header("x-api-key")) for s in seen] == [
        (CONFIG, "tml-e"),
        (TOKEN, "printed"),
        (CAPABILITIES, JWT),
    ]


@pytest.mark.parametrize("status", [404, 405, 501])
def test_older_servers_have_no_config(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    seen = ask(monkeypatch, CONFIG=as_json({"detail": "Not Found"}, status))
    assert [(s.target, s.header("x-api-key")) for s in seen] == [(CONFIG, None), (CAPABILITIES, None)]


@pytest.mark.parametrize("call", ["CONFIG", "TOKEN", "CAPABILITIES"])
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (401, errors.AuthenticationError),
        (402, errors.BillingError),
        (403, errors.PermissionDeniedError),
        (429, errors.RateLimitError),
        (500, errors.InternalServerError),
        (503, errors.InternalServerError),
    ],
)
def test_refusals_are_raised_at_once_and_typed(
    monkeypatch: pytest.MonkeyPatch, call: str, status: int, error: type[errors.APIStatusError]
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-e")
    replace = {"CONFIG": as_json({"pjwt_auth_enabled": True}), call: as_json({"detail": "no"}, status)}
    with pytest.raises(error) as caught:
        ask(monkeypatch, **replace)
    assert (caught.value.path, caught.value.message, caught.value.attempts) == (globals()[call], "no", 1)


@pytest.mark.parametrize("body", [b"hello", b"[]", b"", b"[" * 100_000])
def test_an_invalid_config_is_an_error(monkeypatch: pytest.MonkeyPatch, body: bytes) -> None:
    with pytest.raises(errors.APIResponseValidationError, match="client_config"):
        ask(monkeypatch, CONFIG=answer(body))


def test_an_unreachable_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{free.getsockname()[1]}")
        with pytest.raises(errors.APIConnectionError):
            raise_if_tinker_not_accessible()


def test_without_a_key_no_request_is_sent() -> None:
    # This is the vendor's address, so a request would fail the test.
    with pytest.raises(errors.CredentialError, match="API key"):
        raise_if_tinker_not_accessible()


def test_an_unexpected_exception_is_a_tinker_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("odd tml-planted-key-0123456789")

    monkeypatch.setattr("tinker_sync.runtime.client.Http", broken)
    monkeypatch.setenv("TINKER_API_KEY", "tml-e")
    with pytest.raises(errors.TinkerError, match=r"RuntimeError: odd \*\*\*"):
        raise_if_tinker_not_accessible()
