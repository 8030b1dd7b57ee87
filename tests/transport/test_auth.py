"""The credential of each call, for all sources of credentials, at the vendor's hosts and at others."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from support.clock import FakeClock

from tinker_sync.config import CredentialsFile, Secret, Settings, StoredKey
from tinker_sync.errors import CredentialError
from tinker_sync.transport.auth import KeyRing, choose_source, static_key
from tinker_sync.transport.credential_command import CredentialCommand
from tinker_sync.transport.tokens import Grant

OTHER = "http://localhost:8000"
JWT = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ1In0.planted"
COMMAND = "COMMAND"


def settings(
    tmp_path: Path, *, arg: str = "", env: str = "", cmd: str = "", stored: str = "", url: str = ""
) -> Settings:
    file = CredentialsFile(tmp_path / "credentials.json")
    if stored:
        file.add("k", StoredKey(key=Secret(stored), name="n"), make_default=True)
    environ = {"TINKER_API_KEY": env, "TINKER_CREDENTIAL_CMD": cmd, "TINKER_BASE_URL": url}
    return Settings.resolve(api_key=arg, environ=environ, credentials_file=file)


def outcome(found: Any) -> str | None:
    if isinstance(found, CredentialCommand):
        return COMMAND
    return found.reveal() if found else None


# ------------------------------------------------------------------------ long-lived credentials

PREFIX, REQUIRED, MISSING = "must start with 'tml-'", "requires dynamic credentials", "there is no API key"

LONG_LIVED = [
    # The given credentials, the result if the server does not enforce the command, and the result if it does.
    ({"arg": JWT}, JWT, JWT),  # step 1
    ({"env": JWT}, JWT, JWT),
    ({"arg": JWT, "cmd": "c"}, JWT, JWT),
    ({"arg": "tml-a", "env": JWT}, "tml-a", REQUIRED),  # the argument goes first, of any kind
    ({"arg": "tml-a", "cmd": "c"}, "tml-a", COMMAND),  # steps 2 and 3
    ({"env": "tml-e", "cmd": "c"}, "tml-e", COMMAND),
    ({"arg": "tml-a", "env": "tml-e"}, "tml-a", REQUIRED),
    ({"env": "tml-e", "stored": "tml-s"}, "tml-e", REQUIRED),
    ({"arg": "sk-a"}, PREFIX, REQUIRED),  # step 3b
    ({"env": "sk-e"}, PREFIX, REQUIRED),
    ({"arg": "sk-a", "cmd": "c"}, COMMAND, COMMAND),
    ({"env": "sk-e", "cmd": "c"}, COMMAND, COMMAND),
    ({"arg": "sk-a", "stored": "tml-s"}, PREFIX, REQUIRED),  # never falls through to the stored key
    ({"arg": "sk-a", "cmd": "c", "stored": "tml-s"}, COMMAND, COMMAND),
    ({"cmd": "c"}, COMMAND, COMMAND),  # step 4
    ({"cmd": "c", "stored": "tml-s"}, COMMAND, COMMAND),
    ({"stored": "tml-s"}, "tml-s", REQUIRED),  # step 5
    ({"stored": "sk-s"}, PREFIX, REQUIRED),
    ({"stored": JWT}, JWT, JWT),
    ({}, MISSING, REQUIRED),  # step 6
]


@pytest.mark.parametrize(("given", "free", "enforced"), LONG_LIVED)
@pytest.mark.parametrize("enforce_cmd", [False, True])
def test_long_lived(
    tmp_path: Path, given: dict[str, str], free: str, enforced: str, enforce_cmd: bool
) -> None:
    expected = enforced if enforce_cmd else free
    found = settings(tmp_path, **given)
    if expected in (PREFIX, REQUIRED, MISSING):
        with pytest.raises(CredentialError, match=expected):
            choose_source(found, enforce_cmd=enforce_cmd)
    else:
        assert outcome(choose_source(found, enforce_cmd=enforce_cmd)) == expected


@pytest.mark.parametrize(
    ("given", "free"),
    [
        ({"arg": "sk-a"}, "sk-a"),
        ({"env": "sk-e", "cmd": "c"}, "sk-e"),
        ({"arg": "tml-a"}, "tml-a"),
        ({"stored": "anything"}, "anything"),
        ({"cmd": "c"}, COMMAND),
        ({}, None),
    ],
)
def test_long_lived_at_other_hosts(tmp_path: Path, given: dict[str, str], free: str | None) -> None:
    assert outcome(choose_source(settings(tmp_path, url=OTHER, **given), enforce_cmd=False)) == free


# ------------------------------------------------------------------------- ordinary calls


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"arg": "tml-a", "env": "tml-e", "stored": "tml-s"}, "tml-a"),
        ({"env": "tml-e", "stored": "tml-s"}, "tml-e"),
        ({"env": "tml-e", "cmd": "c"}, "tml-e"),
        ({"stored": "tml-s"}, "tml-s"),
        ({"arg": JWT}, JWT),
        ({"arg": "sk-a"}, PREFIX),
        ({"arg": "sk-a", "cmd": "c"}, PREFIX),
        ({"stored": "sk-s"}, PREFIX),
        ({"cmd": "c"}, "static API key only, so TINKER_CREDENTIAL_CMD does not help"),
        ({"cmd": "c", "stored": "tml-s"}, "static API key only, so TINKER_CREDENTIAL_CMD does not help"),
        ({}, MISSING),
    ],
)
def test_ordinary_without_exchange(tmp_path: Path, given: dict[str, str], expected: str) -> None:
    found = settings(tmp_path, **given)
    ring = KeyRing(found)
    if expected.startswith(("tml-", "eyJ")):
        assert static_key(found) == Secret(expected)
        assert ring.credential() == expected
        return
    for ask in (lambda: static_key(found), ring.credential):
        with pytest.raises(CredentialError, match=expected):
            ask()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"arg": "sk-a"}, "sk-a"),
        ({"env": "sk-e", "cmd": "echo printed"}, "sk-e"),
        ({"stored": "x"}, "x"),
        ({}, ""),
    ],
)
def test_ordinary_at_other_hosts(tmp_path: Path, given: dict[str, str], expected: str) -> None:
    ring = KeyRing(settings(tmp_path, url=OTHER, **given))
    assert (ring.credential(), ring.for_exchange()) == (expected, expected)
    ring.check()
    assert ring.next_refresh_in_s() is None


def test_at_other_hosts_the_commands_output_is_the_credential(tmp_path: Path) -> None:
    count = tmp_path / "count"
    clock = FakeClock()
    ring = KeyRing(
        settings(tmp_path, url=OTHER, cmd=f"echo x >> {count}; echo key-$(wc -l < {count})"), clock=clock
    )
    assert [ring.credential() for _ in range(3)] == ["key-1"] * 3
    assert Secret("key-1") in ring.secrets
    clock.advance(60)
    assert ring.credential() == "key-2"
    pause_s = ring.next_refresh_in_s()
    assert pause_s is not None
    assert 27 <= pause_s <= 33


def test_a_rotated_key_is_fetched_anew_from_the_command(tmp_path: Path) -> None:
    count = tmp_path / "count"
    ring = KeyRing(
        settings(tmp_path, url=OTHER, cmd=f"echo x >> {count}; echo key-$(wc -l < {count})"),
        clock=FakeClock(),
    )
    assert ring.renewed(Secret(ring.credential())) == Secret("key-2")
    assert ring.credential() == "key-2"


def test_a_given_key_cannot_be_renewed(tmp_path: Path) -> None:
    """After the rejection of a key that the user gave, `renewed` returns None."""
    ring = KeyRing(settings(tmp_path, arg="tml-a"), clock=FakeClock())
    assert ring.renewed(Secret(ring.credential())) is None


@pytest.mark.parametrize("claims", [{}, {"exp": 1.0}], ids=["without exp", "over by the local clock"])
def test_a_key_that_is_a_jwt_is_for_the_server_to_judge(tmp_path: Path, claims: dict[str, Any]) -> None:
    body = base64.urlsafe_b64encode(json.dumps(claims).encode()).decode()
    key = f"eyJ.{body}.signature"
    ring = KeyRing(settings(tmp_path, arg=key), clock=FakeClock())
    ring.check()
    assert ring.credential() == key
    assert ring.for_exchange() == key


# ------------------------------------------------------------------------------------ with an exchange


def token(number: int, clock: FakeClock, **claims: Any) -> Secret:
    body = json.dumps({"exp": clock.time() + 1000, "iat": clock.time(), **claims}).encode()
    return Secret(f"eyJ.{base64.urlsafe_b64encode(body).decode()}.{number}")


class Server:
    """A double of the token exchange that records the credential exchanged for each token."""

    def __init__(self, ring: KeyRing, clock: FakeClock, **claims: Any) -> None:
        self.ring, self.clock, self.claims = ring, clock, claims
        self.seen: list[str] = []

    def __call__(self) -> Grant:
        self.seen.append(self.ring.for_exchange())
        return Grant(token(len(self.seen), self.clock, **self.claims), self.clock.time())


def exchanged(
    found: Settings, *, enforce_cmd: bool = False, **claims: Any
) -> tuple[KeyRing, Server, FakeClock]:
    clock = FakeClock()
    ring = KeyRing(found, clock=clock)
    server = Server(ring, clock, **claims)
    ring.use_exchange(server, enforce_cmd=enforce_cmd)
    return ring, server, clock


@pytest.mark.parametrize(
    ("given", "enforce_cmd", "bought_with"),
    [
        ({"arg": "tml-a", "cmd": "echo printed"}, False, "tml-a"),
        ({"arg": "tml-a", "cmd": "echo printed"}, True, "printed"),
        ({"arg": JWT, "cmd": "echo printed"}, True, JWT),
        ({"cmd": "echo printed", "stored": "tml-s"}, False, "printed"),
        ({"stored": "tml-s"}, False, "tml-s"),
        ({"stored": JWT}, True, JWT),
        ({"arg": "sk-a", "cmd": "echo printed"}, False, "printed"),
    ],
)
def test_the_credential_exchanged_for_a_token(
    tmp_path: Path, given: dict[str, str], enforce_cmd: bool, bought_with: str
) -> None:
    ring, server, _ = exchanged(settings(tmp_path, **given), enforce_cmd=enforce_cmd)
    credential = ring.credential()
    assert server.seen == [bought_with]
    assert credential.endswith(".1")
    assert ring.credential() == credential
    assert server.seen == [bought_with]


def test_no_command_where_one_is_enforced(tmp_path: Path) -> None:
    ring, server, _ = exchanged(settings(tmp_path, arg="tml-a"), enforce_cmd=True)
    for ask in (ring.credential, ring.for_exchange, ring.check):
        with pytest.raises(CredentialError, match=REQUIRED):
            ask()
    assert server.seen == []


def test_the_command_runs_for_each_token(tmp_path: Path) -> None:
    count = tmp_path / "count"
    ring, server, clock = exchanged(settings(tmp_path, cmd=f"echo x >> {count}; echo key-$(wc -l < {count})"))
    ring.credential()
    clock.advance(950)
    ring.credential()
    assert server.seen == ["key-1", "key-2"]


def test_check_runs_no_command(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    KeyRing(settings(tmp_path, cmd=f"touch {ran}")).check()
    assert not ran.exists()
    with pytest.raises(CredentialError, match=MISSING):
        KeyRing(settings(tmp_path)).check()


def test_what_calls_bring_along_is_secret_too_within_bounds(tmp_path: Path) -> None:
    ring = KeyRing(settings(tmp_path, arg="tml-a"))
    ring.keep(Secret("first"))
    for number in range(150):
        ring.keep(Secret(f"token-{number}"))
        ring.keep(Secret("again"))
    assert len(ring.secrets) == 101
    assert {Secret("tml-a"), Secret("again"), Secret("token-149")} <= set(ring.secrets)
    assert Secret("first") not in ring.secrets


def test_identity(tmp_path: Path) -> None:
    ring, server, _ = exchanged(settings(tmp_path, arg="tml-a"), sub="tml:user:1", org_id="o")
    identity = ring.identity()
    assert identity is not None
    assert (identity["sub"], identity["org_id"], len(server.seen)) == ("tml:user:1", "o", 1)

    def given(**claims: Any) -> KeyRing:
        return KeyRing(settings(tmp_path, arg=token(1, FakeClock(), **claims).reveal()))

    passport = given(iss="passport-prod", sub="u").identity()
    assert passport is not None
    assert passport["sub"] == "u"
    assert given(iss="someone-else", sub="u").identity() is None
    assert given(sub="u").identity() is None
    assert KeyRing(settings(tmp_path, arg="tml-a")).identity() is None
