"""Keys, tokens and signed addresses."""

from __future__ import annotations

import base64
import json

import pytest
from support.clock import FakeClock

from tinker_sync.local.server.state import Signer

KEY = "tml-a-key"


def claims(token: str) -> dict[str, object]:
    payload = token.split(".")[1]
    made: dict[str, object] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return made


def test_only_the_whole_key_is_accepted() -> None:
    signer = Signer(KEY, FakeClock())
    assert signer.knows(KEY)
    for wrong in ("", "tml-", KEY + "x", KEY.upper(), "eyJ.x.y", "ä", "..", "a.b"):
        assert not signer.knows(wrong)


def test_a_token_lives_as_long_as_it_says() -> None:
    clock = FakeClock()
    signer = Signer(KEY, clock)
    token = signer.token(100)
    assert token.startswith("eyJ")
    said = claims(token)
    assert said["exp"] == said["iat"] + 100  # type: ignore[operator]
    assert str(said["iss"]).startswith("passport-")
    assert signer.knows(token)
    clock.advance(101)
    assert not signer.knows(token)


def test_a_token_cannot_be_changed_nor_made_elsewhere() -> None:
    clock = FakeClock()
    signer = Signer(KEY, clock)
    head, payload, mac = signer.token(100).split(".")
    longer = {**claims(f"{head}.{payload}.{mac}"), "exp": 10**12}
    forged = base64.urlsafe_b64encode(json.dumps(longer).encode()).decode().rstrip("=")
    assert not signer.knows(f"{head}.{forged}.{mac}")
    assert not signer.knows(f"{head}.{payload}.")
    assert not Signer(KEY, clock).knows(f"{head}.{payload}.{mac}")  # of another server with the same key


def test_an_address_is_for_one_file_and_a_while() -> None:
    clock = FakeClock()
    signer = Signer(KEY, clock, seed=1)
    query, expires = signer.query("/a/b", 60)
    given = dict(part.split("=") for part in query.split("&"))
    assert given["expires"] == str(expires)
    assert signer.allows("/a/b", given["expires"], given["signature"])
    assert not signer.allows("/a/c", given["expires"], given["signature"])
    assert not signer.allows("/a/b", str(expires + 1), given["signature"])
    assert not signer.allows("/a/b", "soon", given["signature"])
    clock.advance(61)
    assert not signer.allows("/a/b", given["expires"], given["signature"])


@pytest.mark.parametrize("seed", [None, 3])
def test_seeded_signatures_repeat_and_others_do_not(seed: int | None) -> None:
    clock = FakeClock()
    one, two = (Signer(KEY, clock, seed=seed).query("/a", 60)[0] for _ in range(2))
    assert (one == two) is (seed is not None)
