"""Checks of keys and tokens, and signed addresses, which need no key."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
from typing import Any, Final

from tinker_sync._base.clock import Clock
from tinker_sync.local.store.store import USER, USER_EMAIL

ORGANIZATION: Final = "local"
_HEADER: Final = {"alg": "HS256", "typ": "JWT"}


class Signer:
    """The key of a server: it checks keys, and makes and checks tokens and signatures. Thread-safe.

    Args:
        key: the key of the clients.
        clock: decides what has expired.
        seed: makes signatures repeatable, for tests; None: each `Signer` draws a secret, so its tokens and
            signatures end with it.
    """

    def __init__(self, key: str, clock: Clock, *, seed: int | None = None) -> None:
        self._key = key.encode()
        self._clock = clock
        salt = secrets.token_bytes(32) if seed is None else f"seed {seed}".encode()
        self._secret = hmac.new(self._key, salt, hashlib.sha256).digest()

    def knows(self, credential: str) -> bool:
        """Return True for the key, and for a token made by `token` that has not expired."""
        if hmac.compare_digest(credential.encode("utf-8", "replace"), self._key):
            return True
        claims = self._claims(credential)
        return claims is not None and claims.get("exp", 0) > self._clock.time()

    def token(self, life_s: float) -> str:
        """Return a token that a client may send in place of the key for `life_s` seconds."""
        now = int(self._clock.time())
        claims = {
            "iss": "passport-local",
            "sub": USER,
            "org_id": ORGANIZATION,
            "email": USER_EMAIL,
            "iat": now,
            "exp": int(now + life_s),
        }
        signed = f"{_packed(_HEADER)}.{_packed(claims)}"
        return f"{signed}.{self._mac(signed)}"

    def _claims(self, token: str) -> dict[str, Any] | None:
        signed, _, mac = token.rpartition(".")
        if not signed or not hmac.compare_digest(mac.encode("utf-8", "replace"), self._mac(signed).encode()):
            return None
        payload = signed.partition(".")[2]
        claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return claims

    def _mac(self, text: str) -> str:
        digest = hmac.new(self._secret, text.encode("utf-8", "replace"), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")

    def query(self, path: str, life_s: float) -> tuple[str, int]:
        """Return a query that signs a path, and the moment at which it expires, in seconds since 1970."""
        expires = int(self._clock.time() + life_s)
        return f"expires={expires}&signature={self._mac(f'{path} {expires}')}", expires

    def allows(self, path: str, expires: str, signature: str) -> bool:
        """Return True if the signature is that of `query` for this path and expiry, and has not expired."""
        genuine = hmac.compare_digest(
            signature.encode("utf-8", "replace"), self._mac(f"{path} {expires}").encode()
        )
        return genuine and expires.isdigit() and int(expires) > self._clock.time()


def _packed(tree: dict[str, Any]) -> str:
    text = json.dumps(tree, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode("ascii")
