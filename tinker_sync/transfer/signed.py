"""Signed addresses: whoever has one may read, or write, one file for a while.

They lead to hosts that are none of the service's, so nothing of the user goes there: no key, no header of
his, no cookie, no password of a netrc file, no client certificate. The address itself is as good as a key, so
it stays out of errors and reprs. Proxies, trusted certificates and adapters are those of the user's session.

Any thread may come in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timezone
from types import TracebackType
from typing import Final, Protocol
from urllib.parse import urljoin

import requests
import urllib3.exceptions
from attrs import field, frozen
from requests.structures import CaseInsensitiveDict

from tinker_sync._clock import Clock
from tinker_sync._secret import HeaderMap, Secret, mask_repr, without_frames
from tinker_sync._version import __version__
from tinker_sync.config import Settings
from tinker_sync.errors import TransferError
from tinker_sync.runtime.once import Once
from tinker_sync.transport.hop import MAX_REDIRECTS, REDIRECTS
from tinker_sync.transport.pools import Origin
from tinker_sync.transport.session import SessionRules

# A new address is asked for this long before the old one ends, by our own clock, which may be wrong; an
# address that has just been given is used in any case.
_MARGIN_S: Final = 30.0


class Readable(Protocol):
    """As much of a file as is needed to send it."""

    def read(self, size: int = -1, /) -> bytes: ...


class Broken(Exception):
    """The connection broke, or none came about. The text holds no address beyond its host."""


class Answer:
    """What a signed address answers; its body is read as it comes. Belongs to one thread."""

    def __init__(self, response: requests.Response, origin: Origin) -> None:
        self._response = response
        self._origin = origin
        # What has come, without waiting for more: with a whole piece, a break would lose its beginning.
        self._read = getattr(response.raw, "read1", None) or response.raw.read  # urllib3 from 2.1 on
        self.status = response.status_code
        self.headers = HeaderMap(response.headers)

    def read(self, count: int) -> bytes:
        """At most so many bytes of the body, as they were sent; none at its end.

        Raises:
            Broken: the connection broke before the end.
        """
        try:
            data: bytes = self._read(count)
        except (OSError, urllib3.exceptions.HTTPError, ValueError) as error:
            raise Broken(f"the connection to {self._origin} broke ({type(error).__name__})") from None
        return data

    def interrupt(self) -> None:
        """Wake the thread that reads, if it can be woken."""
        wake = getattr(self._response.raw, "shutdown", None)  # urllib3 from 2.3 on
        if wake is not None:
            with suppress(Exception):
                wake()

    def __enter__(self) -> Answer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()


class SignedHttp:
    """Asks signed addresses. Thread-safe.

    Args:
        settings: timeouts, the session, and what server it is all about.
    """

    def __init__(self, settings: Settings) -> None:
        self._rules = SessionRules(settings.session)
        self._timeout = (settings.timeout.connect, settings.timeout.read)
        self._secure = Origin.of(settings.base_url).scheme == "https"

    def get(self, url: str, headers: Mapping[str, str]) -> Answer:
        """Ask for a file, following redirects.

        Raises:
            Broken: there is no answer.
            TransferError: the address is none, or leads from https to http.
        """
        answer = self._send("GET", url, headers, None)
        for _ in range(MAX_REDIRECTS):
            location = answer.headers.get("location")
            if answer.status not in REDIRECTS or not location:
                return answer
            with answer:
                url = mask_repr(urljoin(url, location))
            answer = self._send("GET", url, headers, None)
        with answer:
            raise TransferError(f"the address of the file redirects more than {MAX_REDIRECTS} times")

    def put(self, url: str, body: Readable, size_bytes: int) -> Answer:
        """Send a file. Errors as for `get`; redirects are not followed."""
        return self._send("PUT", url, {"Content-Length": str(size_bytes)}, body)

    def close(self) -> None:
        """Close the connections that are ours to close."""
        self._rules.close()

    def _send(self, method: str, url: str, headers: Mapping[str, str], body: Readable | None) -> Answer:
        origin = self._origin(url)
        request = requests.PreparedRequest()
        request.method = method
        request.prepare_url(url, None)
        request.headers = CaseInsensitiveDict(
            {"User-Agent": f"tinker_sync/{__version__}", "Accept-Encoding": "identity", **headers}
        )
        request.body = body  # type: ignore[assignment]  # a file does as well
        options = self._rules.way_to(origin).options
        try:
            response = self._rules.session.get_adapter(url).send(
                request,
                stream=True,
                timeout=self._timeout,
                verify=options["verify"],
                proxies=options["proxies"],
            )
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            without_frames(error)
            if isinstance(error, requests.exceptions.SSLError):
                raise TransferError(f"the connection to {origin} is not to be trusted (TLS)") from None
            raise Broken(f"no answer from {origin} ({type(error).__name__})") from None
        return Answer(response, origin)

    def _origin(self, url: str) -> Origin:
        try:
            origin = Origin.of(url)
        except ValueError:
            raise TransferError("the server gave something that is no http or https address") from None
        if self._secure and origin.scheme == "http":
            raise TransferError(f"the server gave an address that is unprotected http ({origin})")
        return origin


@frozen
class SignedUrls:
    """Addresses by the name of the file, and until when they are good."""

    urls: Mapping[str, str] = field(repr=False)
    expires: datetime | None


class Links:
    """The newest addresses of some files, signed anew when they are about to end or are refused. Thread-safe.

    Args:
        sign: asks the service for addresses.
        clock: what time it is.
    """

    def __init__(self, sign: Callable[[], SignedUrls], clock: Clock) -> None:
        self._sign = sign
        self._clock = clock
        self._lock = threading.Lock()
        self._current: Once[_Signed] = Once()  # guarded by _lock
        self.signed = 0
        """How often addresses were asked for."""

    def names(self) -> list[str]:
        """The names of the files."""
        return sorted(self._newest().urls)

    def of(self, name: str) -> tuple[str, int]:
        """The address of a file, and which one it is, for `renew`.

        Raises:
            TransferError: there is no such file any more.
            TinkerError: the service gives no addresses.
        """
        signed = self._newest()
        if self._clock.time() > signed.stale_at and self._clock.now() > signed.fresh_until:
            self.renew(signed.number)
            signed = self._newest()
        url = signed.urls.get(name)
        if url is None:
            raise TransferError(f"the server does not list {name!r} any more")
        return url.reveal(), signed.number

    def renew(self, number: int) -> None:
        """Ask for new addresses before the next use, unless that was done since this one was given."""
        with self._lock:
            made = self._current.made
            if made is not None and made.number == number:
                self._current = Once()

    def _newest(self) -> _Signed:
        with self._lock:
            once = self._current
        return once.get(self._ask)

    def _ask(self) -> _Signed:
        signed = self._sign()
        self.signed += 1
        return _Signed(
            {name: Secret(url) for name, url in signed.urls.items()},
            self.signed,
            signed.expires.timestamp() - _MARGIN_S if signed.expires is not None else float("inf"),
            self._clock.now() + _MARGIN_S,
        )


@frozen
class _Signed:
    urls: dict[str, Secret]
    number: int
    stale_at: float
    """By the time of day."""
    fresh_until: float
    """By the monotonic clock."""


def in_utc(moment: datetime) -> datetime:
    """A moment with a time zone; without one the service means UTC."""
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
