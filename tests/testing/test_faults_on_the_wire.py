"""Every kind of fault as a plain socket sees it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import parsedate_to_datetime
from typing import Any

import pytest

from tinker_sync.local.server.http import Answer, Application, Request, ServerThread, Write
from tinker_sync.testing import FaultPlan, faults
from tinker_sync.testing._middleware import FaultMiddleware
from tinker_sync.testing._scene import Scene

REPLY = json.dumps({"request_id": "req-0", "filler": "x" * 1000}).encode()


class Work(Application):
    """An application that records the paths and bodies of its requests, and answers each."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.bodies: list[bytes] = []

    async def __call__(self, request: Request) -> Answer:
        self.done.append(request.path)
        self.bodies.append(request.body)
        reply = json.dumps({"session_id": "s-1"}).encode() if request.path.endswith("n") else REPLY

        async def stream(write: Write) -> None:
            await write(reply[:10])
            await write(reply[10:])

        if request.path.endswith("n"):
            return Answer(reply)
        return Answer(headers={"content-length": str(len(reply))}, stream=stream)


class Wire:
    """A server with a plan of faults, to which a test sends requests over plain sockets."""

    def __init__(self, address: tuple[str, int], work: Work, scene: Scene) -> None:
        self.address, self.work, self.scene = address, work, scene

    def raw(
        self, path: str = "/asample", body: bytes = b"{}", method: str = "POST", header: str = "Accept: */*"
    ) -> bytes:
        """Send a request, and return all bytes that come until the server closes the connection."""
        with socket.create_connection(self.address, timeout=120) as sock:
            head = f"{method} /api/v1{path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n{header}\r\n"
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            got = b""
            while piece := sock.recv(65536):
                got += piece
            return got

    def ask(self, path: str = "/asample", **how: Any) -> tuple[int, dict[str, str], bytes]:
        head, _, body = self.raw(path, **how).partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body


@contextmanager
def serving(plan: FaultPlan, *, pace: float = 1.0) -> Iterator[Wire]:
    work, scene = Work(), Scene(plan)
    with ServerThread(FaultMiddleware(work, scene, pace=pace), key="k") as server:
        yield Wire(("127.0.0.1", server.port), work, scene)


def plan(fault: faults.Fault, **which: Any) -> FaultPlan:
    return FaultPlan().on("asample", fault, **which)


def test_without_faults_the_reply_passes() -> None:
    with serving(FaultPlan()) as wire:
        assert wire.ask(body=b'{"n": 1}')[::2] == (200, REPLY)
        assert wire.work.bodies == [b'{"n": 1}']
        assert wire.ask("/nowhere")[0] == 200
        assert [call.endpoint for call in wire.scene.calls] == ["asample", ""]


@pytest.mark.parametrize("code", [401, 402, 404, 410, 500, 502, 503])
def test_a_status(code: int) -> None:
    with serving(plan(faults.status(code, headers={"X-Note": "n"}))) as wire:
        status, headers, body = wire.ask()
        assert (status, headers["x-note"], headers["content-type"]) == (code, "n", "application/json")
        assert json.loads(body) == {"detail": f"status {code}"}
        assert wire.work.done == []


def test_every_form_of_retry_after() -> None:
    rows = (
        FaultPlan()
        .on("asample", faults.too_many_requests(2.5), nth=1)
        .on("asample", faults.too_many_requests(0.25, form="milliseconds"), nth=2)
        .on("asample", faults.too_many_requests(3, form="date"), nth=3)
        .on("asample", faults.too_many_requests(), nth=4)
        .on("asample", faults.status(503, retry_after=7), nth=5)
    )
    with serving(rows) as wire:
        before_s = time.time()
        asked = [wire.ask() for _ in range(6)]
    assert [status for status, _, _ in asked] == [429, 429, 429, 429, 503, 200]
    said = [{name: h[name] for name in h if name.startswith("retry")} for _, h, _ in asked]
    assert said[:2] == [{"retry-after": "2.5"}, {"retry-after-ms": "250"}]
    assert said[3:] == [{}, {"retry-after": "7"}, {}]
    ahead_s = parsedate_to_datetime(said[2]["retry-after"].title().replace("Gmt", "GMT")).timestamp()
    assert before_s + 1 < ahead_s < time.time() + 5


def test_a_truncated_body() -> None:
    with serving(plan(faults.truncated(0.3))) as wire:
        status, headers, body = wire.ask()  # a reset would raise
        assert (status, int(headers["content-length"])) == (200, len(REPLY))
        assert body == REPLY[: int(len(REPLY) * 0.3)]
        assert wire.work.done == ["/api/v1/asample"]


def events(plan: FaultPlan, monkeypatch: pytest.MonkeyPatch, *, pace: float = 1.0) -> list[Any]:
    """Let the application answer one request. Return its pauses, in seconds, and what it sends."""
    found: list[Any] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    async def write(piece: bytes) -> None:
        found.append(piece)

    async def exchange() -> None:
        answer = await FaultMiddleware(Work(), Scene(plan), pace=pace)(Request("POST", "/api/v1/asample"))
        found.append(answer.status)
        assert answer.stream is not None
        await answer.stream(write)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(exchange())
    return found


def test_a_slow_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply goes out in pieces, with equal pauses between them."""
    edges = [0, len(REPLY) // 3, len(REPLY) * 2 // 3, len(REPLY)]
    first, second, third = (REPLY[edges[piece] : edges[piece + 1]] for piece in range(3))
    found = events(plan(faults.slow(0.2, pieces=3)), monkeypatch)
    assert found == [0.0, 200, first, 0.1, second, 0.1, third]


@pytest.mark.parametrize("after_work", [False, True])
def test_a_reset_is_a_tcp_reset(after_work: bool) -> None:
    with serving(plan(faults.reset(after_work=after_work), nth=1)) as wire:
        with pytest.raises(ConnectionResetError):
            wire.raw()
        assert len(wire.work.done) == after_work
        assert wire.ask()[0] == 200


@pytest.mark.parametrize("after_work", [False, True])
def test_a_hang_up_closes_without_a_reply(after_work: bool) -> None:
    with serving(plan(faults.hang_up(after_work=after_work), nth=1)) as wire:
        assert wire.raw() == b""
        assert len(wire.work.done) == after_work


def test_an_expired_session_gets_410_and_a_new_one_works() -> None:
    gone = FaultPlan().on("optim_step", faults.session_expired(), nth=2)
    step = b'{"model_id": "s-1:train:0", "seq_id": 1}'
    with serving(gone) as wire:
        assert wire.ask("/create_session")[2] == b'{"session_id": "s-1"}'
        assert [wire.ask("/optim_step", body=step)[0] for _ in range(3)] == [200, 410, 410]
        assert wire.ask("/session_heartbeat", body=b'{"session_id": "s-1"}')[0] == 410
        assert wire.ask("/samplers/s-1:sample:0", method="GET")[0] == 410
        target = b'{"target": {"sampling_session_id": "s-1:sample:0"}}'
        assert wire.ask("/retrieve_futures", body=target)[0] == 410
        # A session with a longer name and calls without a session still work.
        assert wire.ask("/session_heartbeat", body=b'{"session_id": "s-10"}')[0] == 200
        assert wire.ask("/checkpoints", method="GET")[0] == 200
        assert wire.ask("/optim_step", body=b"no JSON")[0] == 200
        wire.scene.forget()
        assert wire.ask("/session_heartbeat", body=b'{"session_id": "s-1"}')[0] == 200


def test_latency_comes_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    late = FaultPlan().latency("asample", 0.15)
    assert events(late, monkeypatch)[:2] == [0.15, 200]
    assert late.latency_of("optim_step") == 0
