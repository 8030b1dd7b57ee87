"""Thousands of polls that are held open cost the server a little memory each, and no threads or CPU.

The default run holds some; `TINKER_SYNC_HELD_POLLS=2000` holds the documented number, and `-s` shows the
figures.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import embedded
from support.embedded import KEY, Wire
from support.open_files import room_for

COUNT = int(os.environ.get("TINKER_SYNC_HELD_POLLS", "150"))
HOLD_S = 0.6 if COUNT <= 500 else 8.0
ROUNDS = 2 if COUNT <= 500 else 4
PATIENCE_S = 120.0
ROOT = Path(embedded.__file__).parents[2]


class Process:
    """A server in its own process, whose memory, threads and CPU a test can measure."""

    def __init__(self, directory: Path) -> None:
        flags = json.dumps({"hold_s": HOLD_S, "gap_patience_s": 600})
        command = [sys.executable, "-m", "support.embedded", str(directory), flags]
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **paths}
        )
        assert self.process.stdout is not None
        self.wire = Wire(f"http://127.0.0.1:{int(self.process.stdout.readline())}")

    def status(self, name: str) -> int:
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))

    @property
    def memory_mb(self) -> float:
        return self.status("VmRSS") / 1024

    @property
    def threads(self) -> int:
        return self.status("Threads")

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Process]:
    made = Process(tmp_path)
    try:
        yield made
    finally:
        assert made.process.stdin is not None
        assert made.process.stdout is not None
        made.process.stdin.close()
        assert made.process.wait(PATIENCE_S) == 0
        made.process.stdout.close()


class Crowd:
    """Many polls, each on its own connection, which one thread sends and awaits."""

    def __init__(self, wire: Wire, count: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._connections = []
        for _ in range(count):
            connection = socket.create_connection(("127.0.0.1", wire.port))
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)
            self._connections.append(connection)

    def ask(self, request_ids: list[str]) -> None:
        for connection, request_id in zip(self._connections, request_ids, strict=True):
            body = json.dumps({"request_id": request_id, "allow_metadata_only": True}).encode()
            head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: h\r\nX-API-Key: {KEY}\r\n"
            connection.sendall(head.encode() + b"Content-Length: %d\r\n\r\n%b" % (len(body), body))

    def answers(self) -> dict[int, int]:
        """Wait for all answers, and return the number of answers with each status, by status."""
        counts: dict[int, int] = {}
        content: dict[Any, bytes] = dict.fromkeys(self._connections, b"")
        missing, until = len(self._connections), time.monotonic() + PATIENCE_S
        while missing:
            assert time.monotonic() < until, f"{missing} were not answered"
            for key, _ in self._selector.select(1):
                data = key.fileobj.recv(65536)  # type: ignore[union-attr]
                assert data, "a connection was closed"
                content[key.fileobj] += data
                status = _complete(content[key.fileobj])
                if status is not None:
                    content[key.fileobj] = b""
                    counts[status] = counts.get(status, 0) + 1
                    missing -= 1
        return counts

    def close(self) -> None:
        self._selector.close()
        for connection in self._connections:
            connection.close()


def _complete(content: bytes) -> int | None:
    head, found, body = content.partition(b"\r\n\r\n")
    if not found:
        return None
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    return int(head.split(b" ")[1]) if len(body) >= length else None


@pytest.fixture
def _files() -> Iterator[None]:
    with room_for(COUNT):
        yield


@pytest.mark.usefixtures("_files")
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the figures come from /proc")
def test_held_polls_are_cheap_and_all_answered(server: Process) -> None:
    wire = server.wire
    model = wire.model(wire.session())
    # Number 1 is missing, so all of these wait.
    with ThreadPoolExecutor(4) as pool:
        replies = list(pool.map(lambda number: wire.pass_(model, number), range(2, COUNT + 2)))
    requests = [reply.json()["request_id"] for reply in replies]
    before = server.memory_mb, server.threads
    crowd = Crowd(wire, COUNT)
    try:
        figures = []
        for _ in range(ROUNDS):
            crowd.ask(requests)
            threading.Event().wait(HOLD_S / 4)
            wire.get("/get_server_capabilities")  # all of them have arrived: the server reads them in order
            cpu, start = server.cpu_s, time.monotonic()
            threading.Event().wait(HOLD_S / 4)
            load = (server.cpu_s - cpu) / (time.monotonic() - start)
            figures.append((server.memory_mb, server.threads, load))
            assert crowd.answers() == {408: COUNT}
        wire.pass_(model, 1)
        answers: dict[int, int] = {}
        while answers != {200: COUNT}:
            crowd.ask(requests)
            answers = crowd.answers()
            assert answers.keys() <= {200, 408}
    finally:
        crowd.close()
    each_kb = (figures[0][0] - before[0]) * 1024 / COUNT
    print(f"\nbefore: {before[0]:.1f} MB, {before[1]} threads; {COUNT} held: {each_kb:.1f} kB each")  # noqa: T201
    for memory, threads, load in figures:
        print(f"held: {memory:.1f} MB, {threads} threads, {load:.1%} of a core")  # noqa: T201
    assert all(threads == before[1] for _, threads, _ in figures)
    assert each_kb < 32
    assert figures[-1][0] - figures[0][0] < 2 + COUNT / 1000
    assert min(load for _, _, load in figures) < 0.3
