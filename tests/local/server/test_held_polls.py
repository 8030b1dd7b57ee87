"""Polls that are held open cost the server a little memory each, and no threads.

The default run holds some; `TINKER_SYNC_HELD_POLLS=2000` holds the documented number.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import tracemalloc
from pathlib import Path

from support.embedded import KEY, running
from support.open_files import room_for

COUNT = int(os.environ.get("TINKER_SYNC_HELD_POLLS", "150"))
PATIENCE_S = 120.0


def poll(port: int, request_id: str) -> socket.socket:
    """Send a poll on a connection of its own, and return the connection."""
    body = json.dumps({"request_id": request_id, "allow_metadata_only": True})
    head = f"POST /api/v1/retrieve_future HTTP/1.1\r\nHost: h\r\nX-API-Key: {KEY}\r\n"
    line = socket.create_connection(("127.0.0.1", port), PATIENCE_S)
    line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return line


def status_of(line: socket.socket) -> int:
    with line.makefile("rb") as answer:
        return int(answer.readline().split()[1])


def test_held_polls_are_cheap_and_all_answered(tmp_path: Path) -> None:
    with (
        room_for(2 * COUNT),  # each connection has two ends in this process
        running(tmp_path, hold_s=600, gap_patience_s=600) as server,
        contextlib.ExitStack() as connections,
    ):
        model = server.model(server.session())
        # Number 1 is missing, so all of these wait.
        requests = [server.pass_(model, number).json()["request_id"] for number in range(2, COUNT + 2)]
        threads = threading.active_count()
        tracemalloc.start()
        connections.callback(tracemalloc.stop)
        lines = [connections.enter_context(poll(server.port, each)) for each in requests]
        server.get("/get_server_capabilities")  # all of them have arrived: the server reads them in order
        assert tracemalloc.get_traced_memory()[0] < 32_000 * COUNT
        assert threading.active_count() == threads
        server.pass_(model, 1)
        assert [status_of(line) for line in lines] == [200] * COUNT
