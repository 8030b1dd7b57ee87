"""Requests to signed addresses, which let their holder read or write one file for a limited time.

The addresses belong to hosts outside the service, so requests carry nothing of the user: no key, no default
header, no cookie, no netrc password, no client certificate. An address gives access like a key, so it never
appears in errors and reprs. Proxies, trusted certificates and adapters are those of the user's session.

Any thread may call this module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Final, Protocol
from urllib.parse import urljoin

import requests
import urllib3.exceptions
from attrs import field, frozen
from requests.structures import CaseInsensitiveDict

from tinker_sync._base.clock import Clock
from tinker_sync._base.secret import HeaderMap, Secret
from tinker_sync._version import __version__
from tinker_sync.config import Settings
from tinker_sync.errors import TransferError
from tinker_sync.transport.pools import Origin
from tinker_sync.transport.request import MAX_REDIRECTS, REDIRECTS
from tinker_sync.transport.session import SessionRules

# New addresses are requested this long before the old ones expire by the local clock. That clock may be
# wrong, so an address younger than this is used in any case.
_MARGIN_S: Final = 30.0


class Readable(Protocol):
    """A file with a method `read`, whose content is sent."""

    def read(self, size: int = -1, /) -> bytes: ...


class ConnectionBroken(Exception):
    """The error for a connection that broke or was never made. The text names the host, not the address."""


class SignedResponse:
    """The response from a signed address, with the body still to be read.

    One thread reads it; any thread may call `interrupt`.
    """

    def __init__(self, response: requests.Response, origin: Origin) -> None:
        self._response = response
        self._origin = origin
        # `read1` returns the bytes that have arrived. `read` waits for a full piece, and loses an incomplete
        # one if the connection breaks.
        self._read = getattr(response.raw, "read1", None) or response.raw.read  # urllib3 from 2.1 on
        self.status = response.status_code
        self.headers = HeaderMap(response.headers)

    def read(self, count: int) -> bytes:
        """Return at most `count` undecoded bytes of the body, or no bytes at its end.

        Raises:
            ConnectionBroken: the connection broke before the end.
        """
        try:
            data: bytes = self._read(count)
        except (OSError, urllib3.exceptions.HTTPError, ValueError) as error:
            raise ConnectionBroken(
                f"the connection to {self._origin} broke ({type(error).__name__})"
            ) from None
        return data

    def interrupt(self) -> None:
        """Wake the thread that reads the body. Do nothing before version 2.3 of urllib3."""
        wake = getattr(self._response.raw, "shutdown", None)  # urllib3 from 2.3 on
        if wake is not None:
            with suppress(Exception):
                wake()

    def __enter__(self) -> SignedResponse:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()


class Cancellation:
    """A flag that stops one transfer. Thread-safe.

    >>> cancellation = Cancellation()
    >>> cancellation.stop()
    >>> cancellation.refuse_stopped()
    Traceback (most recent call last):
        ...
    tinker_sync.errors.TransferError: the transfer was stopped; the same call goes on from here
    """

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._reading: set[SignedResponse] = set()  # guarded by _lock

    def stop(self) -> None:
        """Stop the transfer, and wake the threads that read a response. Idempotent."""
        self._stopped.set()
        with self._lock:
            reading = list(self._reading)
        for answer in reading:
            answer.interrupt()

    def refuse_stopped(self) -> None:
        """Raise TransferError if `stop` was called."""
        if self._stopped.is_set():
            raise TransferError("the transfer was stopped; the same call goes on from here")

    def pause(self, clock: Clock, seconds: float) -> None:
        """Wait for some seconds, which the clock may shorten, or until `stop`."""
        clock.wait(self._stopped, clock.shorten(seconds))

    @contextmanager
    def reading(self, answer: SignedResponse) -> Iterator[SignedResponse]:
        """Let `stop` interrupt a response while the block runs, and close the response at its end."""
        with self._lock:
            self._reading.add(answer)
        try:
            with answer:
                yield answer
        finally:
            with self._lock:
                self._reading.discard(answer)


def follow(url: str, location: str) -> str:
    """Return the full address of a redirect, which may be relative to `url`.

    Raises:
        TransferError: the address is not valid.
    """
    try:
        return urljoin(url, location)
    except ValueError:  # its text may have the address
        raise TransferError("the server redirects to an address that is not valid") from None


class SignedHttp:
    """A sender of requests to signed addresses. Thread-safe.

    Args:
        settings: timeouts, the user's session, and the base URL; if it is https, http addresses are refused.
            A server of this user on this machine is reached without a proxy of the environment.
    """

    def __init__(self, settings: Settings) -> None:
        self._rules = SessionRules(settings.session, direct=settings.api_key_source == "local")
        self._timeout = (settings.timeout.connect, settings.timeout.read)
        self._secure = Origin.of(settings.base_url).scheme == "https"

    def get(self, url: str, headers: Mapping[str, str]) -> SignedResponse:
        """Request a file, following redirects.

        Raises:
            ConnectionBroken: no response arrived.
            TransferError: the address is invalid, is http although the server has https, or redirects too
                often; or the TLS certificate cannot be trusted.
        """
        answer = self._send("GET", url, headers, None)
        for _ in range(MAX_REDIRECTS):
            location = answer.headers.get("location")
            if answer.status not in REDIRECTS or not location:
                return answer
            with answer:
                url = follow(url, location)
            answer = self._send("GET", url, headers, None)
        with answer:
            raise TransferError(f"the address of the file redirects more than {MAX_REDIRECTS} times")

    def put(self, url: str, body: Readable, size_bytes: int) -> SignedResponse:
        """Send a file without following redirects. Raises the errors of `get`."""
        return self._send("PUT", url, {"Content-Length": str(size_bytes)}, body)

    def close(self) -> None:
        """Close the connections, unless they belong to the user's session."""
        self._rules.close()

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Readable | None
    ) -> SignedResponse:
        origin = self._origin(url)
        request = requests.PreparedRequest()
        request.method = method
        try:
            request.prepare_url(url, None)
        except requests.RequestException:  # its text may have the address
            raise TransferError(f"the server gave an address whose host is not valid ({origin})") from None
        request.headers = CaseInsensitiveDict(
            {"User-Agent": f"tinker_sync/{__version__}", "Accept-Encoding": "identity", **headers}
        )
        request.body = body  # type: ignore[assignment]  # adapters accept a file
        options = self._rules.route_to(origin).options
        try:
            response = self._rules.session.get_adapter(url).send(
                request,
                stream=True,
                timeout=self._timeout,
                verify=options["verify"],
                proxies=options["proxies"],
            )
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
            if isinstance(error, requests.exceptions.SSLError):
                raise TransferError(f"the TLS connection to {origin} cannot be trusted") from None
            raise ConnectionBroken(f"no answer from {origin} ({type(error).__name__})") from None
        return SignedResponse(response, origin)

    def _origin(self, url: str) -> Origin:
        try:
            origin = Origin.of(url)
        except ValueError:
            raise TransferError("the server gave an address that is neither http nor https") from None
        if self._secure and origin.scheme == "http":
            raise TransferError(f"the server gave an unprotected http address ({origin})")
        return origin


@frozen
class SignedUrls:
    """The addresses by file name, and the time at which they expire; None if the service states none."""

    urls: Mapping[str, str] = field(repr=False)
    expires: datetime | None


class SignedLinks:
    """The current addresses of some files, renewed before they expire or when one is refused. Thread-safe.

    Args:
        sign: requests addresses from the service.
        clock: the current time.
    """

    def __init__(self, sign: Callable[[], SignedUrls], clock: Clock) -> None:
        self._sign = sign
        self._clock = clock
        self._lock = threading.Lock()
        # The newest addresses, or a request for them.
        self._current: Future[_Signed] | None = None  # guarded by _lock
        self._signed = 0  # changed only by the thread that makes such a request

    def names(self) -> list[str]:
        """Return the sorted names of the files."""
        return sorted(self._newest().urls)

    def get(self, name: str) -> tuple[str, int]:
        """Return the address of a file, and the number by which `renew` drops it.

        Raises:
            TransferError: the server no longer lists the file.
            TinkerError: the service refuses to sign.
        """
        signed = self._newest()
        if self._clock.time() > signed.stale_at and self._clock.now() > signed.fresh_until:
            self.renew(signed.number)
            signed = self._newest()
        url = signed.urls.get(name)
        if url is None:
            raise TransferError(f"the server no longer lists {name!r}")
        return url.reveal(), signed.number

    def renew(self, number: int) -> None:
        """Drop the addresses with this number, so that the next use requests new ones. Keep newer ones."""
        with self._lock:
            current = self._current
            if current is not None and current.done() and current.result().number == number:
                self._current = None

    def _newest(self) -> _Signed:
        """Return the newest addresses. The first thread requests them, and the others wait for it."""
        made: Future[_Signed] = Future()
        with self._lock:
            current = self._current
            if current is None:
                self._current = made
        if current is not None:
            return current.result()
        try:
            made.set_result(self._request())
        except BaseException as error:
            with self._lock:
                self._current = None  # so that the next use tries again
            made.set_exception(error)
            raise
        return made.result()

    def _request(self) -> _Signed:
        signed = self._sign()
        self._signed += 1
        return _Signed(
            {name: Secret(url) for name, url in signed.urls.items()},
            self._signed,
            signed.expires.timestamp() - _MARGIN_S if signed.expires is not None else float("inf"),
            self._clock.now() + _MARGIN_S,
        )


@frozen
class _Signed:
    urls: dict[str, Secret]
    number: int
    stale_at: float
    """Time of day."""
    fresh_until: float
    """Monotonic time."""


def in_utc(moment: datetime) -> datetime:
    """Return the moment with a time zone: UTC if the service has sent none."""
    return moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)
