"""The HTTP/2 of the stub server, with the package `h2`: `tinker_stub` uses it where a client chooses "h2".

A test scripts an answer, and may do more with the connection that an `Asked.connection` names:

    with StubServer(tls=authority.server_context(), http2=True) as stub:
        stub.script("/asample", Answer(reset=ErrorCodes.REFUSED_STREAM))
        stub.http2[0].go_away(last=5)
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.exceptions import ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame
from support.tinker_stub import PATIENCE_S, Answer, Asked, Stub


class Http2Connection(asyncio.Protocol):
    """One connection. Its methods are for the thread of the loop, except those that say so."""

    def __init__(self, stub: Stub, number: int, tasks: set[asyncio.Task[None]]) -> None:
        self._stub = stub
        self.number = number
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._asked: dict[int, tuple[dict[str, str], bytearray]] = {}
        self._unsent: dict[int, memoryview] = {}
        self.resets: list[int] = []
        """The streams that the client has reset."""
        self.streams: list[int] = []
        """The streams of all requests that have come."""
        self.pings = 0
        self.closed = False
        self._news = threading.Condition()
        self._h2 = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding="latin-1",
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=stub.validates,
            )
        )

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._h2.local_settings = Settings(
            client=False,
            initial_values={SettingCodes.MAX_CONCURRENT_STREAMS: 128, **self._stub.http2_settings},
        )
        self._h2.initiate_connection()
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            arrived = self._h2.receive_data(data)
        except ProtocolError as error:
            self._stub.broken.append(error)
            self._flush()
            self._transport.close()
            return
        with self._news:
            for event in arrived:
                self._handle(event)
            self._news.notify_all()
        self._flush()

    def connection_lost(self, _: object) -> None:
        with self._news:
            self.closed = True
            self._news.notify_all()

    def _handle(self, event: events.Event) -> None:
        if isinstance(event, events.RequestReceived):
            self.streams.append(event.stream_id)
            self._asked[event.stream_id] = dict(event.headers), bytearray()  # type: ignore[arg-type]
        elif isinstance(event, events.DataReceived):
            self._asked[event.stream_id][1].extend(event.data)
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, events.StreamEnded):
            task = self._loop.create_task(self._serve(event.stream_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(event, events.StreamReset):
            self.resets.append(event.stream_id)
            self._unsent.pop(event.stream_id, None)
        elif isinstance(event, (events.WindowUpdated, events.RemoteSettingsChanged)):
            for number in list(self._unsent):
                self._send_body(number)
        elif isinstance(event, events.PingAckReceived):
            self.pings += 1

    async def _serve(self, number: int) -> None:
        headers, body = self._asked.pop(number)
        url = urlsplit(headers[":path"])
        if headers.get(":authority"):
            headers["host"] = headers[":authority"]
        asked = Asked(headers[":method"], url.path, parse_qs(url.query), headers, bytes(body), self.number)
        answer = await self._stub.answer_always(asked)
        if answer.abort:
            self._transport.abort()
        elif answer.status and not self._transport.is_closing():
            with suppress(ProtocolError):  # the client has said GOAWAY meanwhile
                self._answer(number, answer)

    def _answer(self, number: int, answer: Answer) -> None:
        if number in self.resets:
            return
        if answer.reset is not None:
            self._h2.reset_stream(number, answer.reset)
        elif answer.frames:
            self._flush()
            self._transport.write(answer.frames(number, self._h2))
        else:
            octets = answer.octets()
            length = [] if answer.lasts_until_close else [("content-length", str(len(octets)))]
            lines = [(name.lower(), value) for name, value in answer.headers.items()]
            head = [(":status", str(answer.status)), *length, ("content-type", answer.content_type), *lines]
            self._h2.send_headers(number, head, end_stream=not octets)
            if octets:
                self._unsent[number] = memoryview(octets)
                self._send_body(number)
        self._flush()
        if answer.hang_up:
            self._transport.close()

    def _send_body(self, number: int) -> None:
        rest = self._unsent.pop(number)
        while rest:
            size = min(self._h2.local_flow_control_window(number), self._h2.max_outbound_frame_size)
            if size <= 0:
                self._unsent[number] = rest
                return
            piece, rest = rest[:size], rest[size:]
            self._h2.send_data(number, bytes(piece), end_stream=not rest)

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    # ---------------------------------------------------- for tests, on any thread

    def go_away(self, last: int, code: ErrorCodes = ErrorCodes.NO_ERROR) -> None:
        """Say that streams after `last` are not looked at, and go on with the others."""
        frame = GoAwayFrame(0, last_stream_id=last, error_code=code)
        self.write(frame.serialize())

    def write(self, octets: bytes) -> None:
        """Send these bytes, which may be no HTTP/2."""
        self._loop.call_soon_threadsafe(self._transport.write, octets)

    def ping(self) -> None:
        def ping() -> None:
            with suppress(ProtocolError):  # the client has said GOAWAY
                self._h2.ping(b"12345678")
                self._flush()

        self._loop.call_soon_threadsafe(ping)

    def indexed(self) -> list[tuple[bytes, bytes]]:
        """Return the headers that the client has put into the table of HPACK; call it between requests."""
        return list(self._h2.decoder.header_table.dynamic_entries)

    def await_pings(self, count: int) -> None:
        """Wait until the client has answered so many pings."""
        self._await(lambda: self.pings >= count)

    def await_resets(self, count: int) -> None:
        """Wait until the client has reset so many streams."""
        self._await(lambda: len(self.resets) >= count)

    def await_closed(self) -> None:
        """Wait until the connection is closed."""
        self._await(lambda: self.closed)

    def _await(self, is_so: Callable[[], bool]) -> None:
        with self._news:
            assert self._news.wait_for(is_so, PATIENCE_S)

    def drop(self) -> None:
        """Cut the connection."""
        self._loop.call_soon_threadsafe(self._transport.abort)


class ByProtocol(asyncio.Protocol):
    """The beginning of a TLS connection, which goes on with the protocol that the client has chosen."""

    def __init__(self, stub: Stub, plain: Any, tasks: set[asyncio.Task[None]]) -> None:
        self._stub, self._plain, self._tasks = stub, plain, tasks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        chosen = transport.get_extra_info("ssl_object").selected_alpn_protocol()
        inner = self._plain
        if chosen == "h2":
            inner = Http2Connection(self._stub, len(self._stub.http2), self._tasks)
            self._stub.http2.append(inner)
        transport.set_protocol(inner)  # type: ignore[attr-defined]
        inner.connection_made(transport)
