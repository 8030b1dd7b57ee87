"""Sending one request through `requests.Session.send`, for what only the session can do.

Has the methods of `SocketLine`, with one difference: nothing is sent before `finish` (or `step`, which
blocks), and there is no socket to wait for. A line belongs to one thread at a time.
"""

from __future__ import annotations

import contextlib
import io
import math
import ssl
from collections.abc import Iterator
from typing import Any, Final

import requests
import requests.cookies
from urllib3.exceptions import NameResolutionError, NewConnectionError

from tinker_sync._clock import Clock
from tinker_sync._secret import is_secret_header, mask_text, without_frames
from tinker_sync.errors import TinkerError
from tinker_sync.transport.call import SendFailed
from tinker_sync.transport.http1 import MalformedReply, ReplyTooLarge, joined
from tinker_sync.transport.pools import Origin
from tinker_sync.transport.scheme import answered_without_tls, without_tls
from tinker_sync.transport.socket_line import Limits, RawReply

# Small steps bound what one piece of a compressed answer can unfold to in older versions of urllib3.
_READ_BYTES: Final = 16 * 1024
# A socket's timeout covers one `sendall`: larger bodies go as a file, which urllib3 sends in pieces.
_SMALL_BODY_BYTES: Final = 64 * 1024
# What urllib3 undoes in every version.
SESSION_ENCODINGS: Final = "gzip, deflate"
_KNOWN_ENCODINGS: Final = frozenset({"", "identity", "gzip", "x-gzip", "deflate"})

_UNUSABLE: Final = (
    requests.exceptions.InvalidURL,
    requests.exceptions.InvalidSchema,
    requests.exceptions.InvalidHeader,
    requests.exceptions.InvalidProxyURL,
)


class SessionLine:
    """A request that the session sends when its answer is asked for."""

    def __init__(
        self,
        session: requests.Session,
        request: requests.PreparedRequest,
        options: dict[str, Any],
        clock: Clock,
        limits: Limits,
    ) -> None:
        self._session = session
        self._request = request
        self._options = options
        self._clock = clock
        self._limits = limits

    def fileno(self) -> int:
        """-1: there is no socket of ours."""
        return -1

    @property
    def expires_at_s(self) -> float:
        return self._limits.give_up_s

    def step(self) -> RawReply:
        """As `finish`; it blocks."""
        return self.finish()

    def finish(self) -> RawReply:
        """Send and wait for the answer.

        Raises:
            SendFailed: There is none.
        """
        try:
            with contextlib.closing(self._send()) as response:
                return self._read(response)
        except (TinkerError, SendFailed):
            raise
        except Exception as error:  # noqa: BLE001 - adapters and hooks are the user's and raise what they like
            failed = _failure(error, self._request)
        # Raised outside of the handler: an error that quotes a secret must not be its context either.
        raise failed

    def abort(self) -> None:
        """Nothing is under way between calls of `finish`."""

    def _send(self) -> requests.Response:
        left_s = self._limits.give_up_s - self._clock.now()
        if left_s <= 0:
            raise SendFailed("no time was left to send", maybe_received=False, timed_out=True)
        return self._session.send(
            self._request,
            stream=True,
            allow_redirects=False,
            timeout=(_finite(self._limits.connect_s, left_s), _finite(self._limits.read_s, left_s)),
            **self._options,
        )

    def _read(self, response: requests.Response) -> RawReply:
        encoding = response.headers.get("content-encoding", "").strip().lower()
        if encoding not in _KNOWN_ENCODINGS:
            raise MalformedReply(f"content encoding {encoding[:20]!r} was not asked for")
        self._refuse_over(int(response.headers.get("content-length") or 0))
        _set_idle(response, self._limits.idle_s)
        pieces, size = [], 0
        for piece in self._in_time(response.iter_content(_READ_BYTES)):
            size += len(piece)
            self._refuse_over(size)
            pieces.append(piece)
        headers = [(n, v) for n, v in response.headers.items() if n.lower() != "content-encoding"]
        return RawReply(response.status_code, headers, joined(headers), b"".join(pieces))

    def _refuse_over(self, size: int) -> None:
        if size > self._limits.max_body_bytes:
            raise ReplyTooLarge(f"the answer is over the limit of {self._limits.max_body_bytes} bytes")

    def _in_time(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece
            if self._clock.now() >= self._limits.give_up_s:
                raise SendFailed("the answer stopped coming", maybe_received=True, timed_out=True)


def prepare(
    session: requests.Session,
    method: str,
    url: str,
    headers: dict[str, str],
    body: bytes | None,
    *,
    authenticate: bool,
) -> requests.PreparedRequest:
    """Make the request the session will send: its own headers are in `headers` already.

    Args:
        authenticate: Whether the session's `auth` may see this request.
    """
    request = requests.PreparedRequest()
    large = body is not None and len(body) > _SMALL_BODY_BYTES
    hooks = [*session.hooks.get("response", []), lambda response, **_: _calm(session, response)]
    request.prepare(
        method=method,
        url=url,
        headers=headers,
        data=io.BytesIO(body) if large and body else body,
        params=session.params or None,
        auth=session.auth if authenticate and callable(session.auth) else None,
        hooks={"response": hooks},
    )
    return request


def _calm(session: requests.Session, response: requests.Response) -> requests.Response:
    """Keep `Session.send` from reading the body of a redirect, however long it is."""
    if response.is_redirect:
        keep = requests.cookies.extract_cookies_to_jar
        keep(session.cookies, response.request, response.raw)  # type: ignore[no-untyped-call]  # in the stubs
        response.raw.close()
        response.raw = io.BytesIO(b"")
    return response


def _set_idle(response: requests.Response, idle_s: float) -> None:
    sock = getattr(getattr(response.raw, "connection", None), "sock", None)
    if sock is not None:  # an adapter of the user's may have none
        sock.settimeout(_finite(idle_s, math.inf))


def _finite(*limits_s: float) -> float | None:
    shortest = min(limits_s)
    return shortest if math.isfinite(shortest) else None


def _failure(error: Exception, request: requests.PreparedRequest) -> SendFailed:
    """What an error of the libraries means; it is the cause unless it quotes a server that quotes us."""
    told = [str(value) for name, value in (request.headers or {}).items() if is_secret_header(name)]
    timed_out = isinstance(error, (requests.Timeout, TimeoutError)) or "timed out" in str(error)
    message = str(error)
    if any(answered_without_tls(link) for link in _chain(error)):
        message = without_tls(Origin.of(request.url or "").netloc)
    failed = SendFailed(
        mask_text(message, told) or type(error).__name__,
        maybe_received=not _surely_unsent(error),
        timed_out=timed_out,
        final=_is_final(error),
    )
    if all(mask_text(repr(link), told) == repr(link) for link in _chain(error)):
        failed.__cause__ = without_frames(error)
    return failed


def _is_final(error: Exception) -> bool:
    kinds = (ReplyTooLarge, *_UNUSABLE, ssl.SSLCertVerificationError)
    return any(isinstance(link, kinds) or answered_without_tls(link) for link in _chain(error))


def _surely_unsent(error: Exception) -> bool:
    kinds = (
        requests.ConnectTimeout,
        requests.exceptions.ProxyError,
        *_UNUSABLE,
        ssl.SSLCertVerificationError,
        NewConnectionError,
        NameResolutionError,
    )
    return any(isinstance(link, kinds) or answered_without_tls(link) for link in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and what it was made from; urllib3 keeps reasons in arguments and attributes as well."""
    for _ in range(10):
        if error is None:
            return
        yield error
        inner = [error.__cause__, getattr(error, "reason", None), *error.args, error.__context__]
        error = next((link for link in inner if isinstance(link, BaseException)), None)
