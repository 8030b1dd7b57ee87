"""A 401 with a rejected token, and the one repetition of the request with a new token."""

from __future__ import annotations

from typing import Any

import pytest
from support.servers import AnsweringServer, Seen, answer
from support.wires import KEY, Keys, http_for, post

from tinker_sync._base.secret import Secret
from tinker_sync.errors import CredentialError
from tinker_sync.transport.tokens import rejects_token


@pytest.mark.parametrize("header", [None, "", '"', "error=", '\\"' * 3000, "e" * 100_000, ",=,=", 'error="'])
def test_nonsense_rejects_no_token(header: str | None) -> None:
    assert not rejects_token(header)


class Rotating(Keys):
    """A double of the source of credentials that renews a rejected key: "key-1", then "key-2" and so on."""

    def __init__(self) -> None:
        super().__init__("key-1")
        self.rejected: list[Secret] = []

    def renewed(self, rejected: Secret) -> Secret:
        self.rejected.append(rejected)
        self._key = Secret(f"key-{len(self.rejected) + 1}")
        return self._key


def refuses(*keys: str, challenge: str = 'Bearer error="invalid_token"') -> Any:
    """Return a function for `AnsweringServer` that answers 401 to requests with these keys, else 200."""

    def respond(seen: Seen) -> bytes:
        if seen.header("x-api-key") in keys:
            return answer(b"{}", status=401, headers={"WWW-Authenticate": challenge})
        return answer()

    return respond


@pytest.mark.parametrize(
    "challenge",
    [
        "Bearer error=invalid_token",
        'Bearer realm="x, error=none", ERROR = "Invalid_Token"',
        'Basic realm="a", Bearer scope="all", error="invalid_token", Digest nonce="b"',
        'Bearer error="invalid\\_token"',
    ],
)
def test_every_way_to_write_an_invalid_token_is_understood(challenge: str) -> None:
    with AnsweringServer(refuses("key-1", challenge=challenge)) as server:
        http = http_for(server, keys=Rotating())
        assert http.send(post()).status == 200
        http.close()


@pytest.mark.parametrize(
    "challenge",
    ["Bearer", "", 'Bearer error="insufficient_scope"', 'Bearer error_description="error=invalid_token"'],
)
def test_other_rejections_are_not_sent_again(challenge: str) -> None:
    keys = Rotating()
    with AnsweringServer(refuses("key-1", challenge=challenge)) as server:
        http = http_for(server, keys=keys)
        assert http.send(post()).status == 401
        http.close()
    assert (len(server.seen), keys.rejected) == (1, [])


def test_a_key_among_the_default_headers_is_not_renewed() -> None:
    keys = Rotating()
    with AnsweringServer(refuses("of the user")) as server:
        http = http_for(server, keys=keys, default_headers={"X-API-Key": "of the user"})
        assert http.send(post()).status == 401
        http.close()
    assert (len(server.seen), keys.rejected) == (1, [])


def test_a_token_rejected_behind_a_redirect_is_renewed_there() -> None:
    def respond(seen: Seen) -> bytes:
        if seen.target.endswith("/there"):
            return refuses("key-1")(seen)
        return answer(status=307, headers={"Location": "/there"})

    with AnsweringServer(respond) as server, http_for(server, keys=Rotating()) as http:
        assert http.send(post()).status == 200
    assert [seen.target.rpartition("/")[2] for seen in server.seen[1:]] == ["there", "there"]


def test_an_exchange_that_fails_is_raised_instead_of_the_rejection() -> None:
    class Failing(Keys):
        def renewed(self, rejected: Secret) -> Secret | None:
            raise CredentialError("no new one")

    with (
        AnsweringServer(refuses(KEY)) as server,
        http_for(server, keys=Failing()) as http,
        pytest.raises(CredentialError, match="no new one"),
    ):
        http.send(post())
