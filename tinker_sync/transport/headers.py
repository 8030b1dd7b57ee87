"""The headers of a request, in layers: who comes later wins.

Ours that everybody may change (`User-Agent`, `Accept-Encoding`, Cloudflare Access), the user's session, what
the protocol needs for this call, the call's own, and last the user's default headers. Any thread.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from functools import lru_cache

from tinker_sync._secret import HeaderMap, Secret, header_map
from tinker_sync._version import __version__
from tinker_sync.config import Settings
from tinker_sync.transport.call import Call
from tinker_sync.transport.content import accepted_encodings
from tinker_sync.transport.hop import Headers

API_KEY = "X-API-Key"
IDEMPOTENCY_KEY = "X-Idempotency-Key"
RETRY_COUNT = "X-Retry-Count"


@lru_cache(maxsize=1)
def user_agent() -> str:
    """Who we are: package, interpreter and system.

    >>> user_agent().startswith("tinker_sync/")
    True
    """
    system = platform.system() or "unknown system"
    return f"tinker_sync/{__version__} (Python {platform.python_version()}; {system})"


def by_name(headers: Mapping[str, str]) -> Headers:
    """Headers in the form in which layers are laid over each other.

    >>> by_name({"Accept": "*/*"})
    {'accept': ('Accept', '*/*')}
    """
    return header_map(headers).lines


class HeaderLayers:
    """Composes the headers of calls. Immutable after construction, so any thread may use it."""

    def __init__(self, settings: Settings) -> None:
        ours = {"User-Agent": user_agent(), "Accept-Encoding": accepted_encodings()}
        if settings.cf_access_id:
            ours["CF-Access-Client-Id"] = settings.cf_access_id.reveal()
        if settings.cf_access_secret:
            ours["CF-Access-Client-Secret"] = settings.cf_access_secret.reveal()
        self._ours = by_name(ours)
        self._version = settings.sdk_version
        self._users = by_name(settings.default_headers)

    def compose(self, call: Call, credential: Secret | None, session_headers: HeaderMap) -> Headers:
        """All headers of a call but those of framing and of the way it takes."""
        headers = {**self._ours, **session_headers.lines}
        headers["accept"] = ("Accept", call.accept)
        if credential:
            headers["x-api-key"] = (API_KEY, credential.reveal())
        if call.method not in ("GET", "HEAD"):
            headers["content-type"] = ("Content-Type", call.content_type)
            if call.idempotency_key:
                headers["x-idempotency-key"] = (IDEMPOTENCY_KEY, call.idempotency_key)
        if call.sdk_method:
            headers["x-sdk-version"] = ("X-SDK-Version", self._version)
            headers["x-sdk-method"] = ("X-SDK-Method", call.sdk_method)
        headers["x-retry-count"] = (RETRY_COUNT, str(call.attempt - 1))
        headers.update(call.headers.lines)
        headers.update(self._users)
        return headers
