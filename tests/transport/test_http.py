"""One request over real sockets: requests, answers, and errors without an answer."""

from __future__ import annotations

import gzip
import os
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest
from support.clock import PATIENCE_S, FakeClock
from support.servers import (
    AnsweringServer,
    Peer,
    ScriptedServer,
    answer,
    chunked,
    once,
    redirect,
    resets,
    silent,
    unused_port,
)
from support.wires import KEY, Keys, Notebook, get, heard_by, http_for, post

from tinker_sync._base.secret import Secret
from tinker_sync.config import Settings, Timeout
from tinker_sync.errors import CredentialError, InvalidInputError
from tinker_sync.transport.body import PiecedBody
from tinker_sync.transport.http import Call, Exchange, Http, SendFailed
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.pools import Origin, Route
from tinker_sync.transport.request import Hop, RedirectRefused, by_name, redirected


def fails(http: Http, call: Call) -> SendFailed:
    with pytest.raises(SendFailed) as caught:
        http.send(call)
    return caught.value


# ------------------------------------------------------------------------------------------- requests


def test_a_request_looks_as_the_protocol_says() -> None:
    with AnsweringServer(lambda seen: answer(b'{"a": 1}')) as server, http_for(server.url + "/pre") as http:
        call = post(query="limit=5", idempotency_key="key-1", attempt=3, headers={"X-Extra": "e"})
        reply = http.send(call)
    assert (reply.status, reply.body) == (200, b'{"a": 1}')
    (seen,) = server.seen
    assert (seen.method, seen.target, seen.body) == ("POST", "/pre/api/v1/x?limit=5", b"{}")
    assert seen.header("host") == f"127.0.0.1:{server.port}"
    assert seen.header("x-api-key") == KEY
    assert seen.header("content-type") == "application/json"
    assert seen.header("content-length") == "2"
    assert seen.header("accept") == "application/json"
    assert seen.header("x-idempotency-key") == "key-1"
    assert seen.header("x-retry-count") == "2"
    assert seen.header("x-extra") == "e"
    assert (seen.header("user-agent") or "").startswith("tinker_sync/")
    assert "gzip" in (seen.header("accept-encoding") or "")
    assert not [name for name, _ in seen.pairs if name.lower().startswith("x-stainless")]


def test_default_headers_win_and_cloudflare_goes_along() -> None:
    options = {
        "default_headers": {"user-agent": "mine", "X-API-KEY": "other", "x-team": "blue"},
        "cf_access_id": "cf-id",
        "cf_access_secret": "cf-secret",
    }
    with AnsweringServer() as server, http_for(server, **options) as http:
        http.send(post(headers={"X-Team": "red"}))
    (seen,) = server.seen
    assert seen.header("user-agent") == "mine"
    assert seen.header("x-api-key") == "other"
    assert seen.header("x-team") == "red"  # the header of this call alone
    assert (seen.header("cf-access-client-id"), seen.header("cf-access-client-secret")) == (
        "cf-id",
        "cf-secret",
    )


def test_which_credential_goes_along() -> None:
    keys = Keys()
    with AnsweringServer() as server:
        http = http_for(server, keys=keys)
        for credential in ("usual", "exchange", "none"):
            http.send(post(credential=credential))
        http.send(post(headers={"x-api-key": "given"}))
        http.close()
        bare = http_for(server, keys=None)
        bare.send(post())
        bare.close()
    sent = [seen.header("x-api-key") for seen in server.seen]
    assert sent == [KEY, "tml-longlived-0123456789", None, "given", None]


def test_a_credential_that_cannot_be_had_is_raised_as_it_is() -> None:
    class Broken:
        def credential(self) -> str:
            raise CredentialError("no key")

        for_exchange = credential

        def renewed(self, rejected: Secret) -> Secret | None:
            raise NotImplementedError

    with (
        ScriptedServer(Peer.wait_gone) as server,
        http_for(server, keys=Broken()) as http,
        pytest.raises(CredentialError),
    ):
        http.send(post())
    assert server.connections == 0


def test_a_header_that_cannot_be_sent_sends_nothing() -> None:
    with (
        ScriptedServer(Peer.wait_gone) as server,
        http_for(server) as http,
        pytest.raises(InvalidInputError),
    ):
        http.send(post(headers={"X-Bad": "a\r\nX-API-Key: stolen"}))
    assert server.connections == 0


# ------------------------------------------------------------------------------------------- answers


@pytest.mark.parametrize(
    "raw",
    [
        answer(b"hello"),
        chunked(b"he", b"llo"),
        answer(b"hello", length=None, version="HTTP/1.0"),
        answer(gzip.compress(b"hello"), headers={"Content-Encoding": "gzip"}),
        b"HTTP/1.1 100 Continue\r\n\r\n" + answer(b"hello"),
        b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + answer(b"hello"),
    ],
    ids=["counted", "chunked", "http/1.0", "gzip", "100-continue", "early hints"],
)
def test_answers_in_every_framing(raw: bytes) -> None:
    with ScriptedServer(once(raw)) as server, http_for(server) as http:
        assert http.send(get()).body == b"hello"


def test_a_large_header_passes_and_a_huge_one_does_not() -> None:
    def large(size: int) -> bytes:
        return answer(b"x", headers={"X-Policy": "p" * size})

    sizes = iter([60_000, 200_000, 10_000_000])
    with ScriptedServer(lambda peer: (peer.read_request(), peer.send(large(next(sizes))))[0]) as server:
        http = http_for(server)
        assert len(http.send(get()).headers["x-policy"]) == 60_000
        assert len(http.send(get()).headers["x-policy"]) == 200_000
        assert "head of the answer" in str(fails(http, get()))
        http.close()


def test_headers_are_found_under_any_case_and_joined() -> None:
    raw = b"HTTP/1.1 200 OK\r\nX-Many: a\r\nx-many: b\r\nContent-Length: 0\r\n\r\n"
    with AnsweringServer(lambda seen: raw) as server, http_for(server) as http:
        assert http.send(get()).headers["X-MANY"] == "a, b"


def test_bodies_are_bounded() -> None:
    limit = 100_000
    lies = [
        answer(b"", length=limit + 1),
        chunked(*[b"x" * 10_000] * 20),
        answer(b"x" * (limit + 1), length=None),
        answer(gzip.compress(bytes(10_000_000)), headers={"Content-Encoding": "gzip"}),
    ]
    for raw in lies:
        with ScriptedServer(
            lambda peer, raw=raw: (peer.read_request(), peer.send(raw), peer.close())[0]
        ) as server:
            http = http_for(server, max_body_bytes=limit)
            failed = fails(http, get())
            assert failed.final
            assert failed.maybe_received
            http.close()


def test_the_kind_of_a_call_limits_its_answer_unless_the_user_does() -> None:
    raw = answer(gzip.compress(b"x" * 2000), headers={"Content-Encoding": "gzip"})
    with AnsweringServer(lambda seen: raw) as server:
        with http_for(server) as http:
            assert len(http.send(get()).body) == 2000
            failed = fails(http, get(answer_bytes=1999))
            assert failed.final
            assert "1999 bytes (max_body_bytes)" in str(failed)
        with http_for(server, max_body_bytes=2000) as http:
            assert len(http.send(get(answer_bytes=1999)).body) == 2000


@pytest.mark.parametrize("limit", [1 << 30, 1000])
def test_the_body_of_an_error_is_cut(limit: int) -> None:
    """The status counts. The rest of the body would cost time, and stays unread with its connection."""
    size = 3_000_000
    unfolding = {"Content-Encoding": "gzip"}
    lines = {"Transfer-Encoding": "chunked"}
    one_chunk = b"%x\r\n%b\r\n0\r\n\r\n" % (size, b"x" * size)
    chunks = b"2710\r\n%b\r\n" % (b"x" * 10_000) * (size // 10_000) + b"0\r\n\r\n"
    for raw, read_to_the_end in (
        (answer(b"x" * size, status=403), False),
        (answer(b"x" * size, status=403, length=None), False),
        (answer(one_chunk, status=403, headers=lines, length=None), False),
        (answer(chunks, status=403, headers=lines, length=None), False),
        (answer(gzip.compress(b"x" * size)[:900], status=403, headers=unfolding), True),
        (answer(gzip.compress(b"x")[:-1], status=403, headers=unfolding), True),
    ):
        with (
            ScriptedServer(
                lambda peer, raw=raw: (peer.read_request(), peer.send(raw), peer.close())[0]
            ) as server,
            http_for(server, max_body_bytes=limit) as http,
        ):
            reply = http.send(post(repeatable=False))
            assert reply.status == 403
            assert len(reply.body) <= min(limit, 256 * 1024)
            assert http.pools.has_idle() is read_to_the_end


# ----------------------------------------------------------------------------------------- failures


def test_a_refused_connection_was_surely_not_received() -> None:
    with unused_port() as port, http_for(f"http://127.0.0.1:{port}") as http:
        failed = fails(http, post())
    assert (failed.maybe_received, failed.timed_out, failed.final) == (False, False, False)
    assert "refused" in str(failed)


def test_a_reset_after_the_request_may_have_been_received() -> None:
    with ScriptedServer(resets) as server, http_for(server) as http:
        failed = fails(http, post())
        assert (failed.maybe_received, failed.timed_out, failed.stale) == (True, False, False)


@pytest.mark.parametrize("raw", [b"", b"HTT", answer(b"abc", length=10), chunked(b"abc")[:-5]])
def test_an_answer_cut_short_may_have_been_received(raw: bytes) -> None:
    with ScriptedServer(once(raw)) as server, http_for(server) as http:
        failed = fails(http, post())
        assert (failed.maybe_received, failed.final) == (True, False)


def test_something_that_is_not_http() -> None:
    with ScriptedServer(lambda peer: peer.send(b"220 smtp.example ESMTP\r\n")) as server:
        http = http_for(server)
        assert "not HTTP" in str(fails(http, post()))
        http.close()


def test_a_refusal_before_the_whole_body_was_read_is_heard() -> None:
    def script(peer: Peer) -> None:
        peer.read_head()
        peer.send(answer(b"too much", status=413))
        peer.close()

    with ScriptedServer(script) as server, http_for(server) as http:
        outcomes = []
        for _ in range(3):
            try:
                outcomes.append(http.send(post(body=bytes(16_000_000))).status)
            except SendFailed as failed:  # the reset may arrive before the answer is read
                outcomes.append(failed.maybe_received)
    assert set(outcomes) <= {413, False}
    assert 413 in outcomes


# --------------------------------------------------------------------------------------------- silences


def stalls(peer: Peer) -> None:
    """Send half of an answer, pause for a second, and send the other half."""
    peer.read_request()
    peer.send(answer(b"x", length=2))
    peer._server.stopping.wait(1.0)
    peer.send(b"x")
    peer.wait_gone()


def slow_but_steady(peer: Peer) -> None:
    peer.read_request()
    peer.send(answer(b"", length=10))
    for _ in range(10):
        peer._server.stopping.wait(0.12)
        peer.send(b"x")
    peer.wait_gone()


def test_silence_ends_with_the_read_timeout() -> None:
    with ScriptedServer(silent) as server:
        http = http_for(server, timeout=Timeout(connect=10, read=0.1, idle=10))
        failed = fails(http, post())
        assert (failed.maybe_received, failed.timed_out) == (True, True)
        http.close()


def test_while_data_flows_the_read_timeout_does_not_matter() -> None:
    with ScriptedServer(slow_but_steady) as server:
        http = http_for(server, timeout=Timeout(connect=10, read=1, idle=10))
        assert http.send(post()).body == b"x" * 10  # takes 1.2 s
        http.close()


def test_a_stalled_body_ends_with_the_idle_timeout() -> None:
    with ScriptedServer(stalls) as server:
        http = http_for(server, timeout=Timeout(connect=10, read=30, idle=0.2))
        failed = fails(http, post())
        assert (failed.maybe_received, failed.timed_out) == (True, True)
        http.close()


def test_a_deadline_ends_even_a_flowing_answer() -> None:
    def endless(peer: Peer) -> None:
        peer.read_request()
        peer.send(answer(b"", length=1_000_000))
        while not peer._server.stopping.wait(0.02):
            peer.send(b"x" * 20_000)

    with ScriptedServer(endless) as server, http_for(server) as http:
        failed = fails(http, post(deadline_s=0.3))
        assert failed.timed_out


def test_an_upload_to_a_server_that_does_not_read_ends() -> None:
    with ScriptedServer(lambda peer: (peer.read_head(), peer._server.stopping.wait(120))[0]) as server:
        http = http_for(server, timeout=Timeout(connect=10, read=0.2))
        failed = fails(http, post(body=bytes(16_000_000)))
        assert (failed.maybe_received, failed.timed_out) == (False, True)
        assert "stopped reading" in str(failed)
        http.close()


def test_no_time_left_sends_nothing() -> None:
    with ScriptedServer(silent) as server, http_for(server) as http:
        failed = fails(http, post(deadline_s=0.0))
        assert (failed.maybe_received, failed.timed_out) == (False, True)
    assert server.connections == 0


# ------------------------------------------------------------------------------------------- connections


def test_connection_close_is_obeyed() -> None:
    with AnsweringServer(lambda seen: answer(headers={"Connection": "close"})) as server:
        http = http_for(server)
        http.send(post())
        http.send(post())
        http.close()
    assert server.connections == 2


def drops_after_each_answer(peer: Peer) -> None:
    peer.read_request()
    peer.send(answer())
    peer.close()


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_server_that_drops_every_pooled_connection(repeatable: bool) -> None:
    dropped = threading.Semaphore(0)

    def script(peer: Peer) -> None:
        drops_after_each_answer(peer)
        dropped.release()

    with ScriptedServer(script) as server, http_for(server) as http:
        for _ in range(5):
            assert http.send(post(repeatable=repeatable)).status == 200
            assert dropped.acquire(timeout=120)
    assert len(server.seen) == 5


def drops_on_the_second_request(peer: Peer) -> None:
    """Answer one request, and reset the connection when the second one arrives."""
    peer.read_request()
    peer.send(answer())
    peer.read_request()
    peer.reset()


def test_a_connection_lost_in_the_race_is_replaced_for_calls_that_may_be_repeated() -> None:
    notebook = Notebook()
    with ScriptedServer(drops_on_the_second_request, drops_after_each_answer) as server:
        http = http_for(server, journal=Journal(heard_by(notebook)))
        assert not http.send(post()).resent
        assert http.send(post()).resent
        http.close()
    assert len(server.seen) == 3  # the second request was sent twice
    assert notebook.names == [
        "RequestSent", "ReplyReceived",
        "RequestSent", "RequestSent", "ReplyReceived",
    ]  # fmt: skip


def test_a_connection_lost_in_the_race_may_have_carried_a_call_that_then_finds_no_server() -> None:
    with ScriptedServer(drops_on_the_second_request) as server, http_for(server) as http:
        assert http.send(post()).status == 200
        server.stop_listening()
        assert fails(http, post()).maybe_received


def test_a_connection_lost_in_the_race_is_an_error_for_calls_that_may_not() -> None:
    with ScriptedServer(drops_on_the_second_request, drops_after_each_answer) as server:
        http = http_for(server)
        assert http.send(post(repeatable=False)).status == 200
        failed = fails(http, post(repeatable=False))
        assert (failed.maybe_received, failed.stale) == (True, True)
        http.close()
    assert len(server.seen) == 2


FIRST, SECOND = b'{"call": 1}', b'{"call": 2}'
DOUBLED = {
    "small": answer(FIRST),
    "chunked": chunked(FIRST[:4], FIRST[4:]),
    "large": answer(FIRST + b" " * 1_000_000),
    "without a body": answer(b"", status=204, length=None),
}


def answers_second(peer: Peer) -> None:
    peer.read_request()
    peer.send(answer(SECOND))


@pytest.mark.parametrize("raw", DOUBLED.values(), ids=DOUBLED)
@pytest.mark.parametrize("together", [True, False])
def test_an_answer_that_came_twice_is_not_the_next_ones(raw: bytes, together: bool) -> None:
    sent = threading.Event()

    def doubles(peer: Peer) -> None:
        peer.read_request()
        if together:
            peer.send(raw + raw)
        else:
            peer.send(raw, raw)
        sent.set()
        peer.wait_gone()

    with ScriptedServer(doubles, answers_second) as server, http_for(server) as http:
        assert http.send(post(repeatable=False)).body.strip() in (FIRST, b"")
        assert sent.wait(PATIENCE_S)
        assert http.send(post(repeatable=False)).body == SECOND
    assert [seen.connection for seen in server.seen] == [0, 1]


@pytest.mark.parametrize("body", [bytes(16_000_000), PiecedBody([b"x", memoryview(bytes(16_000_000))])])
def test_an_answer_that_came_twice_is_not_that_of_a_request_on_its_way(body: Any) -> None:
    def doubles(peer: Peer) -> None:
        peer.read_request()
        peer.send(answer(FIRST))
        peer.read_head()  # the body does not fit into the buffers, so the client is still sending
        peer.send(answer(FIRST))
        peer.wait_gone()

    with ScriptedServer(doubles, answers_second) as server, http_for(server) as http:
        assert http.send(post(repeatable=False)).body == FIRST
        assert http.send(post(body=body, repeatable=False)).body == SECOND
    assert [seen.connection for seen in server.seen] == [0, 0, 1]


@pytest.mark.parametrize(("status", "connections"), [(400, [0, 0]), (500, [0, 1]), (503, [0, 1])])
def test_a_connection_on_which_the_server_stumbled_is_not_kept(status: int, connections: list[int]) -> None:
    with AnsweringServer(lambda seen: answer(status=status)) as server, http_for(server) as http:
        http.send(post())
        http.send(post(repeatable=False))
    assert [seen.connection for seen in server.seen] == connections


def test_an_unrepeatable_call_does_not_trust_an_old_connection() -> None:
    clock = FakeClock()
    with AnsweringServer() as server, http_for(server, clock=clock) as http:
        http.send(post())
        clock.advance(4)
        http.send(post(repeatable=False))
        http.send(post(repeatable=False))
        clock.advance(4)
        http.send(post())
    assert [seen.connection for seen in server.seen] == [0, 1, 1, 1]


def test_connections_idle_for_long_are_not_used() -> None:
    clock = FakeClock()
    with AnsweringServer() as server, http_for(server, clock=clock) as http:
        http.send(post())
        clock.advance(601)
        http.send(post())
    assert server.connections == 2


def test_a_fresh_connection_on_demand() -> None:
    with AnsweringServer() as server, http_for(server) as http:
        http.send(post())
        http.send(post(fresh=True))
        http.forget_idle()
        http.send(post())
    assert server.connections == 3


class InterruptedClock(FakeClock):
    """A clock at which Ctrl-C comes once, when a test asks for it."""

    interrupts = False

    def now(self) -> float:
        if self.interrupts:
            self.interrupts = False
            raise KeyboardInterrupt
        return super().now()


def test_an_interrupted_exchange_leaves_no_half_answer_behind() -> None:
    clock = InterruptedClock()
    with AnsweringServer(lambda seen: answer(seen.body)) as server, http_for(server, clock=clock) as http:
        exchange = http.open(post(body=b"first"))
        clock.interrupts = True  # while it reads the answer
        with pytest.raises(KeyboardInterrupt):
            exchange.finish()
        assert http.send(post(body=b"second")).body == b"second"
    assert server.connections == 2


# ---------------------------------------------------------------------------------------------- closing


def test_close_interrupts_what_is_under_way_and_refuses_what_follows() -> None:
    with ScriptedServer(silent) as server, ThreadPoolExecutor(1) as pool:
        http = http_for(server)
        future = pool.submit(http.send, post())
        server.await_seen(1)
        http.close()
        failed = future.exception(120)
        assert isinstance(failed, SendFailed)
        assert failed.final
        assert "closed" in str(failed)
        again = fails(http, post())
        assert (again.final, again.maybe_received) == (True, False)
        http.close()


# ---------------------------------------------------------------------------------------------- redirects


def test_redirects_are_followed_within_the_server() -> None:
    def respond(seen: Any) -> bytes:
        return redirect("/api/v1/end") if seen.target == "/api/v1/x" else answer(seen.body)

    notebook = Notebook()
    with AnsweringServer(respond) as server, http_for(server, journal=Journal(heard_by(notebook))) as http:
        assert http.send(post(body=b"kept")).body == b"kept"
    assert [seen.header("x-api-key") for seen in server.seen] == [KEY, KEY]
    assert notebook.names == ["RequestSent", "Redirected", "RequestSent", "ReplyReceived"]


def test_redirects_that_go_in_circles_end() -> None:
    with AnsweringServer(lambda seen: redirect(seen.target)) as server, http_for(server) as http:
        failed = fails(http, post())
        assert failed.final
        assert "more than 10" in str(failed)
    assert len(server.seen) == 11


def test_an_endless_body_of_a_redirect_is_not_read() -> None:
    body = b"x" * 5_000_000
    with AnsweringServer(
        lambda seen: (
            answer(b"end")
            if seen.target == "/end"
            else answer(body, status=307, headers={"Location": "/end"})
        )
    ) as server:
        http = http_for(server, max_body_bytes=1000)
        assert fails(http, get()).final
        http.close()


def test_after_a_303_the_first_server_has_had_the_request() -> None:
    with unused_port() as port:
        pass
    with AnsweringServer(lambda seen: redirect(f"http://127.0.0.1:{port}/", 303)) as server:
        http = http_for(server)
        assert fails(http, post()).maybe_received
        http.close()
    with AnsweringServer(lambda seen: redirect(f"http://127.0.0.1:{port}/", 307)) as server:
        http = http_for(server)
        assert not fails(http, post()).maybe_received
        http.close()


def test_tls_to_a_plain_server_was_surely_not_received() -> None:
    with ScriptedServer(lambda peer: peer.send(answer())) as server:
        http = http_for(f"https://127.0.0.1:{server.port}")
        failed = fails(http, post())
        assert not failed.maybe_received
        assert isinstance(failed.cause.__cause__ if failed.cause else None, (ssl.SSLError, OSError))
        http.close()


# -------- `Exchange`: many exchanges under way in one thread, each read when its socket is readable
def test_an_expired_exchange_fails_at_the_next_step() -> None:
    clock = FakeClock()
    with ScriptedServer(silent) as server:
        http = http_for(server, clock=clock, timeout=Timeout(connect=10, read=45))
        exchange = http.open(post())
        assert exchange.expires_at_s == clock.now() + 45
        clock.advance(44)
        assert exchange.step() is None
        clock.advance(1)
        with pytest.raises(SendFailed) as caught:
            exchange.step()
        assert (caught.value.timed_out, caught.value.maybe_received) == (True, True)
        assert "0 idle, 0 busy" in repr(http)
        http.close()


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files by /proc")
def test_no_file_stays_open() -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    with AnsweringServer() as server, http_for(server) as warm:
        warm.send(post())
    before = open_files()
    with AnsweringServer() as server:
        for _ in range(5):
            http = http_for(server)
            http.send(post())
            http.open(post()).abort()
            http.open(post()).finish()
            http.close()
    with ScriptedServer(resets) as server, http_for(server) as http:
        for _ in range(5):
            with pytest.raises(SendFailed):
                http.send(post())
    assert open_files() == before


# --------------------------------------- One request on one connection, with a double of the socket
class HandSocket:
    """A double of a socket that records its timeouts.

    Args:
        clock: the clock, which `sendall` advances.
        arrivals: the bytes or exceptions of the next calls of `recv`.
        send_takes_s: the seconds that a `sendall` takes.
        room: the number of bytes that a single `send` takes.
    """

    def __init__(
        self, clock: FakeClock, arrivals: list[bytes | Exception], send_takes_s: float, room: int
    ) -> None:
        self.clock = clock
        self.arrivals = arrivals
        self.send_takes_s = send_takes_s
        self.room = room
        self.timeouts: list[float | None] = [0]  # as a new connection has it
        self.sent = b""

    def settimeout(self, seconds: float | None) -> None:
        self.timeouts.append(seconds)

    def gettimeout(self) -> float | None:
        return self.timeouts[-1]

    def send(self, data: Any) -> int:
        """Take as many bytes as there is room for, without waiting. Return their number."""
        assert self.gettimeout() == 0
        taken = bytes(data)[: self.room]
        self.sent += taken
        if not taken:
            raise BlockingIOError
        return len(taken)

    def sendall(self, data: Any) -> None:
        self.clock.advance(self.send_takes_s)
        self.sent += bytes(data)

    def recv(self, size: int) -> bytes:
        if not self.arrivals:
            raise BlockingIOError
        arrival = self.arrivals.pop(0)
        if isinstance(arrival, Exception):
            raise arrival
        return arrival

    def fileno(self) -> int:
        return 99


class HandConnection:
    def __init__(self, sock: HandSocket, requests: int) -> None:
        self.sock = sock
        self.requests = requests
        self.closed = False
        self.multiplexed = False
        self.route = Route(Origin("http", "127.0.0.1", 1))
        self.nothing_yet = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

    def count_answer(self) -> None:
        self.requests += 1

    def close(self) -> None:
        self.closed = True


class Bench:
    """One request on a double of a connection. Its answer has 10 s to begin, and 5 s between two pieces.

    Args:
        arrivals: as for `HandSocket`, like `send_takes_s` and `room`.
        requests: the number of answers that the connection has brought before.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *arrivals: bytes | Exception,
        requests: int = 0,
        send_takes_s: float = 0.0,
        room: int = 1000,
    ) -> None:
        self.clock = FakeClock(now_s=0.0)
        self.sock = HandSocket(self.clock, list(arrivals), send_takes_s, room)
        self.connection = HandConnection(self.sock, requests)
        monkeypatch.setattr("tinker_sync.transport.http.connect", lambda *_: self.connection)
        timeout = Timeout(connect=5, read=10, idle=5)
        self._http = Http(Settings.resolve(base_url="http://127.0.0.1:1", timeout=timeout), clock=self.clock)

    def open(self, body: bytes = b"", deadline_s: float | None = None) -> Exchange:
        call = Call(method="POST", path="/x", body=body, deadline_s=deadline_s, repeatable=False)
        return self._http.open(call)

    def sent(self) -> tuple[bytes, bytes]:
        """Return the head and the body that were sent."""
        head, _, body = self.sock.sent.partition(b"\r\n\r\n")
        return head, body


def test_each_piece_of_an_upload_has_the_timeout_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, answer(b"ok"), send_takes_s=9.0)
    body = bytes(3_000_000)
    made = bench.open(body)
    assert bench.clock.now() > 100  # in all, far more than the timeout of 10 s
    assert bench.sent()[1] == body
    assert set(bench.sock.timeouts) == {0, 10.0}
    reply = made.step()
    assert reply is not None
    assert reply.body == b"ok"


def test_a_small_body_shares_a_packet_with_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch)
    bench.open(b"{}")
    assert bench.sent()[1] == b"{}"
    assert bench.sock.timeouts == [0]


@pytest.mark.parametrize("room", [0, 1, 100])
def test_what_does_not_fit_at_once_is_waited_for(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, room=room, send_takes_s=1.0)
    bench.open(b"{}")
    assert bench.sent()[1] == b"{}"
    assert bench.sock.timeouts == [0, 10.0, 0]
    assert bench.clock.now() == 1.0


def test_a_deadline_cuts_an_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(monkeypatch, send_takes_s=9.0)
    with pytest.raises(SendFailed) as caught:
        bench.open(bytes(3_000_000), deadline_s=30.0)
    assert (caught.value.timed_out, caught.value.maybe_received) == (True, False)


def test_silence_is_measured_from_the_last_news(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = answer(b"x" * 20)
    bench = Bench(monkeypatch, raw[:-10], BlockingIOError())
    made = bench.open()
    assert made.expires_at_s == 10.0
    bench.clock.advance(4)
    assert made.step() is None
    assert made.expires_at_s == 9.0  # 4 s and the idle timeout
    bench.clock.advance(4.5)
    assert made.step() is None
    bench.clock.advance(1)
    with pytest.raises(SendFailed, match="stopped coming") as caught:
        made.step()
    assert caught.value.timed_out


@pytest.mark.parametrize(
    ("arrivals", "stale"),
    [
        ([ConnectionResetError()], True),
        ([b""], True),
        ([b"HTTP", b""], False),
        ([TimeoutError()] * 100, False),
    ],
)
def test_only_a_used_connection_without_a_word_is_stale(
    arrivals: list[Any], stale: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for requests in (0, 1):
        bench = Bench(monkeypatch, *arrivals, requests=requests)
        made = bench.open()
        with pytest.raises(SendFailed) as caught:
            made.step()
        assert caught.value.stale is (stale and requests > 0)
        assert caught.value.maybe_received
        assert bench.connection.closed


# ------------------------------ Targets of redirects, and the headers that redirected requests keep
HEADERS = by_name(
    {
        "X-API-Key": "tml-marked",
        "Authorization": "Basic marked",
        "CF-Access-Client-Secret": "marked",
        "X-Tinker-Weights-Access-Token": "marked",
        "Cookie": "marked",
        "X-My-Gateway": "marked",
        "X-Idempotency-Key": "k",
        "Accept": "application/json",
        "Content-Type": "application/json",
        "User-Agent": "u",
    }
)


def hop(method: str = "POST", url: str = "https://h/api/v1/x?a=1", body: bytes | None = b"{}") -> Hop:
    return Hop(method, urlsplit(url), Origin.of(url), HEADERS, body)


def test_303_asks_for_a_get() -> None:
    after = redirected(hop(), 303, "/other")
    assert (after.method, after.body) == ("GET", None)
    assert not {"content-type", "x-idempotency-key"} & set(after.headers)
    assert "x-api-key" in after.headers
    assert redirected(hop("GET", body=None), 303, "/other").method == "GET"


@pytest.mark.parametrize(
    "location",
    [
        *("https://other/x", "https://h:444/x", "https://sub.h/x", "//other/x"),
        *("https://h.evil/x", "https://h@other/x", "HTTPS://OTHER/x", "https://127.0.0.1/x"),
    ],
)
def test_nothing_secret_goes_to_another_origin(location: str) -> None:
    after = redirected(hop(), 307, location)
    assert set(after.headers) == {"accept", "content-type", "user-agent"}
    assert not after.own
    assert "marked" not in str(after.headers)


@pytest.mark.parametrize("location", ["https://h:443/y", "//h/y", "https://H/y", "y", "?b=2", "/y"])
def test_the_same_origin_in_other_words(location: str) -> None:
    after = redirected(hop(), 307, location)
    assert after.headers == HEADERS
    assert after.own


def test_dropped_headers_do_not_come_back_with_a_second_redirect() -> None:
    away = redirected(hop(), 307, "https://other/x")
    back = redirected(away, 307, "https://h/api/v1/x")
    assert "x-api-key" not in back.headers
    assert not back.own


@pytest.mark.parametrize(
    "location",
    ["http://h/x", "http://other/x", "ftp://h/x", "file:///etc/passwd", "javascript:x", "https://h:99999/"],
)
def test_redirects_that_are_refused(location: str) -> None:
    with pytest.raises(RedirectRefused):
        redirected(hop(), 307, location)


def test_a_secret_in_the_body_stays_at_home() -> None:
    load = hop(body=b'{"path": "tinker://r/weights/a", "weights_access_token": "abcdefgh"}')
    with pytest.raises(RedirectRefused, match="secret"):
        redirected(load, 307, "https://other/x")
    assert redirected(load, 307, "/x").body == load.body
    assert redirected(load, 303, "https://other/x").body is None
    assert redirected(hop(body=b'{"path": "p"}'), 307, "https://other/x").body == b'{"path": "p"}'
    assert redirected(hop(body=b"\x0a\x05probe\xff"), 307, "https://other/x").body is not None


def test_locations_are_cleaned() -> None:
    assert redirected(hop(), 307, " /a b#frag ").address == "https://h/a%20b"
    assert redirected(hop(), 307, "/ü".encode().decode("latin-1")).address == "https://h/%C3%BC"
    assert redirected(hop(), 307, "https://bücher.example/").origin.host == "xn--bcher-kva.example"
