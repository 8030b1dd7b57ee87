"""One request on one connection, and the reading of its answer.

Blocking callers and pollers both use a `SocketLine`. After its request is sent, `finish` blocks until the
answer is whole; `step` takes the bytes that have arrived and never blocks. The two methods use the same
parser, so a thread may call `finish` after `step`. A line belongs to one thread at a time.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple, NoReturn

from tinker_sync._base.clock import Clock, slice_of
from tinker_sync.transport.body import BLOCK_BYTES, PiecedBody
from tinker_sync.transport.call import SendFailed
from tinker_sync.transport.pools import Connection, Pools, never_block
from tinker_sync.transport.scheme import with_tls
from tinker_sync.wire.http1.client import RECEIVE_BYTES, ReplyParser, SpeaksTls
from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

# A socket's timeout covers one whole `sendall`. Sending in pieces limits each piece, not the whole upload.
_SEND_BYTES: Final = BLOCK_BYTES


class Limits(NamedTuple):
    """The limits of one request: on time, on silence of the server, and on the size of the answer."""

    connect_s: float
    read_s: float
    """The limit until the first byte of the answer, and for each piece of the request."""
    idle_s: float
    """The limit between two pieces of an answer that has begun."""
    give_up_s: float
    """The moment of the clock at which the request must be over."""
    max_body_bytes: int


class SocketLine:
    """A request under way on a connection.

    At the end of the request, the line returns the connection to the pools, or closes it if it cannot be used
    again.
    """

    # Slots, because tens of thousands may wait for their answers.
    __slots__ = (
        "_clock",
        "_connection",
        "_limits",
        "_made_parser",
        "_method",
        "_over",
        "_pools",
        "_sent",
        "expires_at_s",
        "sock",
    )

    def __init__(
        self, connection: Connection, pools: Pools, clock: Clock, method: str, limits: Limits
    ) -> None:
        self._connection = connection
        self.sock = connection.sock
        """The socket; when it is readable, `step` makes progress."""
        self._pools = pools
        self._clock = clock
        self._limits = limits
        self._method = method
        self._made_parser: ReplyParser | None = None
        self._sent = False
        self._over = False
        self.expires_at_s = limits.give_up_s
        """The moment of the clock after which `step` fails if nothing has arrived."""

    @property
    def _parser(self) -> ReplyParser:
        """The parser of the answer, made when it is first needed."""
        if self._made_parser is None:
            self._made_parser = ReplyParser(self._method, max_body_bytes=self._limits.max_body_bytes)
        return self._made_parser

    def send(self, head: bytes, body: bytes | PiecedBody | None) -> None:
        """Send the request. Return early if the server has answered before the end of the request.

        Raises:
            SendFailed: The connection broke or stalled before the end of the request, so the server has not
                received the whole.
            InvalidInputError: An array of the body has changed since an earlier try.
        """
        try:
            if isinstance(body, PiecedBody):
                self._send_pieces(chain((head,), body.to_send()))
            elif not body or len(body) <= _SEND_BYTES:
                self._send_piece(head + body if body else head)  # a small body shares the packet of its head
            else:
                view = memoryview(body)
                blocks = (view[at : at + _SEND_BYTES] for at in range(0, len(view), _SEND_BYTES))
                self._send_pieces(chain((head,), blocks))
            self._sent = True
        except OSError as error:
            if not self._answered_early():
                self._fail(error)
        except BaseException:
            self.abort()
            raise

    def _send_piece(self, piece: bytes | memoryview) -> None:
        """Send a piece.

        First send as much as the socket takes without blocking, which is the whole of most pieces. Then block
        for what is left, with a timeout.
        """
        sock, limits, now_s = self.sock, self._limits, self._clock.now()
        self.expires_at_s = min(now_s + limits.read_s, limits.give_up_s)
        if self.expires_at_s <= now_s:
            raise TimeoutError("timed out")
        try:
            never_block(sock)
            at = sock.send(piece)
        except self._connection.nothing_yet:
            at = 0
        if at < len(piece):
            left_s = self.expires_at_s - now_s
            sock.settimeout(left_s if math.isfinite(left_s) else None)
            sock.sendall(memoryview(piece)[at:])
            self._begin_silence(self._limits.read_s)

    def _send_pieces(self, pieces: Iterator[bytes | memoryview]) -> None:
        """Send the pieces of a request. Keep the last one back if bytes have arrived on a used connection.

        The server has not read the request by then, so the bytes belong to the answer of an earlier one, as
        when a proxy sends an answer twice. Or they refuse this request; a new connection will show that.
        """
        last = next(pieces)
        for piece in pieces:
            self._send_piece(last)
            last = piece
        connection = self._connection
        if connection.requests and not connection.is_quiet():
            raise SendFailed(
                "bytes came on the connection before the request was sent",
                maybe_received=False,
                stale=not self._pools.closed,
                final=self._pools.closed,
            )
        self._send_piece(last)

    def step(self) -> ReplyParser | None:
        """Take the bytes that have arrived, without blocking. Return the answer if it is whole, else None.

        Raises:
            SendFailed: The request failed, or no answer came in time.
        """
        sock, parser = self.sock, self._parser
        try:
            never_block(sock)
            while not parser.done:
                self._take_from(sock)
        except self._connection.nothing_yet:
            if self._clock.now() >= self.expires_at_s:
                self._fail(TimeoutError("timed out"))
            return None
        except (OSError, MalformedMessage, MessageTooLarge) as error:
            self._fail(error)
        return self._conclude()

    def finish(self) -> ReplyParser:
        """Wait for the answer and return it.

        Raises:
            SendFailed: The request failed, or no answer came in time.
        """
        try:
            while not self._parser.done:
                self._receive()
        except (OSError, MalformedMessage, MessageTooLarge) as error:
            self._fail(error)
        except BaseException:  # Ctrl-C leaves half an answer on the connection
            self.abort()
            raise
        return self._conclude()

    def _receive(self) -> None:
        """Wait for the next bytes of the answer, and pass them to the parser."""
        sock, left_s = self.sock, self._left_s()
        while True:
            now_s = slice_of(left_s)
            sock.settimeout(now_s)
            left_s -= now_s
            try:
                self._take_from(sock)
            except TimeoutError:
                if left_s <= 0:
                    raise
            else:
                return

    def abort(self) -> None:
        """Give up the request and close the connection. Do nothing if the request is over."""
        if not self._over:
            self._over = True
            self._pools.discard(self._connection)

    def _begin_silence(self, limit_s: float) -> None:
        self.expires_at_s = min(self._clock.now() + limit_s, self._limits.give_up_s)

    def _left_s(self) -> float:
        left_s = self.expires_at_s - self._clock.now()
        if left_s <= 0:
            raise TimeoutError("timed out")
        return left_s

    def _take_from(self, sock: socket.socket) -> None:
        parser = self._parser
        room = parser.room() if parser.started else None
        if room is not None:
            with room:
                count = sock.recv_into(room)
            parser.fill(count)
        elif data := sock.recv(parser.wants if parser.started else RECEIVE_BYTES):
            parser.feed(data)
        else:
            parser.eof()
        if not parser.done:
            self._begin_silence(self._limits.idle_s)

    def _answered_early(self) -> bool:
        """Return True if the whole answer has arrived, though the request was not sent to its end.

        A server may refuse a large body before it has read the whole.
        """
        sock = self.sock
        try:
            never_block(sock)
            while not self._parser.done:
                self._take_from(sock)
        except (OSError, MalformedMessage, MessageTooLarge):
            return False
        self._parser.keep_alive = False
        return True

    def _conclude(self) -> ReplyParser:
        parser, connection = self._parser, self._connection
        if not self._over:
            self._over = True
            connection.requests += 1
            # After a 5xx, servers often close the connection without announcing it in the answer. The next
            # call on it may be one that must not be repeated.
            if parser.keep_alive and parser.status < 500:
                self._pools.give_back(connection)
            else:
                self._pools.discard(connection)
        return parser

    def _fail(self, error: Exception) -> NoReturn:
        self.abort()
        timed_out = isinstance(error, TimeoutError)
        unheard = not self._parser.started and not timed_out
        if isinstance(error, SpeaksTls):
            # The server cannot read plain HTTP at this port, so it has not received the request.
            message = with_tls(self._connection.route.origin.netloc)
            raise SendFailed(message, maybe_received=False, final=True) from error
        raise SendFailed(
            self._describe(error),
            maybe_received=self._sent,
            timed_out=timed_out,
            stale=unheard and self._connection.requests > 0 and not self._pools.closed,
            final=isinstance(error, MessageTooLarge) or self._pools.closed,
        ) from error

    def _describe(self, error: Exception) -> str:
        if self._pools.closed:
            return "the client was closed while the request was under way"
        if isinstance(error, TimeoutError):
            if not self._sent:
                return "the server stopped reading the request"
            return "the answer stopped coming" if self._parser.started else "no answer came in time"
        if isinstance(error, (MalformedMessage, MessageTooLarge)):
            return str(error)
        return (
            f"the connection broke: {error.strerror or error}" if isinstance(error, OSError) else str(error)
        )
