"""`Exchange`: many exchanges under way in one thread, each read when its socket is readable."""

from __future__ import annotations

import os
import selectors
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from support.authority import Authority
from support.clock import PATIENCE_S, FakeClock
from support.servers import AnsweringServer, Peer, ScriptedServer, answer, redirect, resets, silent
from support.wires import Notebook, http_for, post

from tinker_sync.config import Timeout
from tinker_sync.transport.http import Exchange, Reply, SendFailed
from tinker_sync.transport.journal import Journal


@pytest.fixture
def selector() -> Iterator[selectors.BaseSelector]:
    with selectors.DefaultSelector() as made:
        yield made


def poll(selector: selectors.BaseSelector, exchanges: list[Exchange]) -> dict[int, Reply]:
    """Read the answers of all exchanges with a minimal reactor. Return them by the index of the exchange."""
    replies: dict[int, Reply] = {}
    for number, exchange in enumerate(exchanges):
        selector.register(exchange.fileno(), selectors.EVENT_READ, number)
    while selector.get_map():
        ready = selector.select(PATIENCE_S)
        assert ready, "nothing became readable"
        for key, _ in ready:
            exchange = exchanges[key.data]
            selector.unregister(key.fd)
            reply = exchange.step()
            if reply is None:
                selector.register(exchange.fileno(), selectors.EVENT_READ, key.data)
            else:
                replies[key.data] = reply
    return replies


def test_one_thread_reads_many_answers(selector: selectors.BaseSelector) -> None:
    gate = threading.Barrier(50)

    def respond(seen: object) -> bytes:
        gate.wait(PATIENCE_S)  # the server answers when all requests have arrived
        return answer(seen.body)  # type: ignore[attr-defined]

    with AnsweringServer(respond) as server, http_for(server) as http:
        exchanges = [http.open(post(body=str(n).encode())) for n in range(50)]
        replies = poll(selector, exchanges)
        assert {n: reply.body for n, reply in replies.items()} == {n: str(n).encode() for n in range(50)}
        assert "50 idle, 0 busy" in repr(http)


def test_half_an_answer_blocks_no_other(selector: selectors.BaseSelector) -> None:
    on = threading.Event()
    raw = answer(b"x" * 100_000)

    def halves(peer: Peer) -> None:
        peer.read_request()
        peer.send(raw[:50])
        assert on.wait(PATIENCE_S)
        peer.send(raw[50:])
        peer.wait_gone()

    with ScriptedServer(halves) as server, http_for(server) as http:
        exchange = http.open(post())
        selector.register(exchange.fileno(), selectors.EVENT_READ)
        assert selector.select(PATIENCE_S)
        assert exchange.step() is None
        assert exchange.step() is None
        on.set()
        assert len(exchange.finish().body) == 100_000  # after steps, a thread may also wait


def test_tls_tickets_do_not_block_it(tmp_path: Path, selector: selectors.BaseSelector) -> None:
    """`step` returns None, and does not wait, when only TLS 1.3 tickets have made the socket readable."""
    on = threading.Event()
    authority = Authority(tmp_path)

    def late(peer: Peer) -> None:
        peer.read_request()
        assert on.wait(PATIENCE_S)
        peer.send(answer(b"x" * 70_000))  # several TLS records
        peer.wait_gone()

    with ScriptedServer(late, tls=authority.server_context()) as server, requests.Session() as session:
        session.verify = authority.ca_file
        http = http_for(server, session=session)
        exchange = http.open(post())
        server.await_seen(1)
        assert exchange.step() is None
        on.set()
        assert len(poll(selector, [exchange])[0].body) == 70_000
        http.close()


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


def test_redirects_are_followed_step_by_step(selector: selectors.BaseSelector) -> None:
    with (
        AnsweringServer(lambda seen: answer(b"there"), host="127.0.0.2") as there,
        AnsweringServer(lambda seen: redirect(there.url)) as here,
        http_for(here) as http,
    ):
        assert poll(selector, [http.open(post())])[0].body == b"there"


def drops_on_the_second_request(peer: Peer) -> None:
    peer.read_request()
    peer.send(answer(b"first"))
    peer.read_request()
    peer.reset()


def test_a_lost_connection_is_replaced_between_steps(selector: selectors.BaseSelector) -> None:
    notebook = Notebook()
    with ScriptedServer(
        drops_on_the_second_request,
        lambda peer: (peer.read_request(), peer.send(answer(b"second")), peer.wait_gone())[0],
    ) as server:
        http = http_for(server, journal=Journal(notebook))
        assert poll(selector, [http.open(post())])[0].body == b"first"
        assert poll(selector, [http.open(post())])[0].body == b"second"
        http.close()
    assert "RequestLost" not in notebook.names


def test_giving_up_closes_the_connection() -> None:
    with ScriptedServer(silent) as server, http_for(server) as http:
        exchange = http.open(post())
        exchange.abort()
        exchange.abort()
        assert "0 idle, 0 busy" in repr(http)


def test_closing_wakes_a_selector(selector: selectors.BaseSelector) -> None:
    with ScriptedServer(silent) as server:
        http = http_for(server)
        exchange = http.open(post())
        selector.register(exchange.fileno(), selectors.EVENT_READ)
        http.close()
        assert selector.select(PATIENCE_S)
        with pytest.raises(SendFailed, match="closed") as caught:
            exchange.step()
        assert caught.value.final


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
