"""`Exchange`: many exchanges under way in one thread, each read when its socket is readable."""

from __future__ import annotations

import os

import pytest
from support.clock import FakeClock
from support.servers import AnsweringServer, ScriptedServer, resets, silent
from support.wires import http_for, post

from tinker_sync.config import Timeout
from tinker_sync.transport.http import SendFailed


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
