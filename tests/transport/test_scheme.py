from __future__ import annotations

import gc
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tinker_sync.transport.scheme import speaks_tls

PATIENCE_S = 120.0


@contextmanager
def port_that_answers(answer: bytes | None) -> Iterator[int]:
    """Yield a port that sends `answer` when bytes arrive. Without an answer, it resets the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            accepted, _ = listener.accept()
            with accepted:
                accepted.recv(1 << 16)
                if answer is None:
                    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                else:
                    accepted.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("answer", "tls"),
    [
        pytest.param(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", False, id="plain HTTP"),
        pytest.param(b"", False, id="nothing"),
        pytest.param(None, False, id="a reset"),
        pytest.param(bytes.fromhex("15030300020228"), True, id="an alert"),
    ],
)
def test_the_answer_to_a_handshake_shows_tls(answer: bytes | None, tls: bool) -> None:
    """`speaks_tls` sends the first message of a handshake. Only a TLS server answers it with a TLS record."""
    with port_that_answers(answer) as port:
        assert speaks_tls("127.0.0.1", port, PATIENCE_S) is tls
    gc.collect()  # a socket that stays open fails the test


def test_a_port_without_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert not speaks_tls("127.0.0.1", port, PATIENCE_S)
