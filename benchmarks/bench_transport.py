"""Print the CPU of one round trip on a kept-alive loopback connection, to a server in its own process.

The subjects are our two ways, with own connections and with a session of the user, and as floors: requests, a
urllib3 pool and http.client. Only the CPU of this process counts.

    python benchmarks/bench_transport.py
"""

from __future__ import annotations

import http.client
import multiprocessing
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection as Pipe

import requests
import urllib3

from tinker_sync.config import Settings
from tinker_sync.transport.http import Call, Http

ROUNDS = 3
SIZES = {"small": (300, 60), "5 MB up": (5_000_000, 60), "16 MB down": (300, 16_000_000)}


class Keys:
    def credential(self) -> str:
        return "tml-benchmark"

    def for_exchange(self) -> str:
        return "tml-benchmark"

    def renewed(self, rejected: object) -> None:
        """Return None, because there is no other key."""


def converse(sock: socket.socket, answer: bytes) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with sock, sock.makefile("rb", 1 << 20) as stream:
        while stream.readline():
            length = 0
            for line in iter(stream.readline, b"\r\n"):
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
            stream.read(length)
            sock.sendall(answer)


def serve(pipe: Pipe, size: int) -> None:
    head = (
        "HTTP/1.1 200 OK",
        "Date: x",
        "Server: bench",
        "Content-Type: application/json",
        f"Content-Length: {size}",
    )
    answer = "\r\n".join([*head, "", ""]).encode() + b"x" * size
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname()[1])
        while True:
            sock, _ = listener.accept()
            threading.Thread(target=converse, args=(sock, answer), daemon=True).start()


@contextmanager
def server(size: int) -> Iterator[int]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, size), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


def cpu_ms(call: Callable[[], object], repetitions: int) -> float:
    """Return the CPU of one call in milliseconds, the median of the rounds."""
    call()
    took = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(repetitions):
            call()
        took.append((time.process_time() - began) / repetitions * 1000)
    return statistics.median(took)


def ways(port: int, body: bytes) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each subject, and a function that makes one round trip with it.

    All subjects send about the same headers.
    """
    url, path = f"http://127.0.0.1:{port}", "/api/v1/asample"
    call = Call(method="POST", path=path, body=body, idempotency_key="k" * 36, answer_bytes=1 << 25)
    own = Http(Settings.resolve(base_url=url), Keys())
    yield "own connections", lambda: own.send(call)
    own.close()
    with requests.Session() as session:
        through = Http(Settings.resolve(base_url=url, session=session), Keys())
        yield "user's session", lambda: through.send(call)
        through.close()
    headers = {
        "X-API-Key": "tml-benchmark",
        "Content-Type": "application/json",
        "X-Idempotency-Key": "k" * 36,
    }
    with requests.Session() as plain:
        yield "requests", lambda: plain.post(url + path, data=body, headers=headers).content
    pool = urllib3.HTTPConnectionPool("127.0.0.1", port)
    yield "urllib3 pool", lambda: pool.urlopen("POST", path, body=body, headers=headers).data
    pool.close()
    connection = http.client.HTTPConnection("127.0.0.1", port)

    def bare() -> bytes:
        connection.request("POST", path, body, headers)
        return connection.getresponse().read()

    yield "http.client", bare
    connection.close()


def main() -> None:
    for name, (up, down) in SIZES.items():
        repetitions = 2000 if name == "small" else 20
        with server(down) as port:
            for way, call in ways(port, b"x" * up):
                print(f"{name:12} {way:18} {cpu_ms(call, repetitions):8.3f} ms CPU")


if __name__ == "__main__":
    main()
