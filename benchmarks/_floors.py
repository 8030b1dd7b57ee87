"""The cost of a sample's two requests without a client: with a bare urllib3 pool, http.client and sockets.

    python _floors.py urllib3|http.client|sockets URL COUNT       CPU and wall time of a sample
    python _floors.py urllib3-400 URL COUNT                       the same, from 400 threads
    python _floors.py memcpy - BYTES                              CPU and wall time of one copy
    python _floors.py loopback - BYTES                            those of sending the bytes to a process

The first four send the same requests: POST `asample`, read the promise, POST `retrieve_future`, read the
answer. None of them retries, checks or decodes the answer.
"""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

WARM_UP = 20
IN_FLIGHT = 400
HEADERS = {"Content-Type": "application/json", "X-API-Key": "tml-benchmark", "Accept": "application/json"}

Post = Callable[[str, bytes], bytes]


def with_urllib3(url: str) -> Post:
    import urllib3

    pool = urllib3.connection_from_url(url, maxsize=IN_FLIGHT)
    return lambda path, body: pool.urlopen("POST", path, body=body, headers=HEADERS).data


def with_http_client(url: str) -> Post:
    connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def post(path: str, body: bytes) -> bytes:
        connection.request("POST", path, body, HEADERS)
        return connection.getresponse().read()

    return post


def with_sockets(url: str) -> Post:
    address = urlsplit(url)
    sock = socket.create_connection((address.hostname, address.port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    fields = "".join(f"{name}: {value}\r\n" for name, value in HEADERS.items())

    def post(path: str, body: bytes) -> bytes:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {address.netloc}\r\n{fields}Content-Length: {len(body)}\r\n\r\n"
        )
        sock.sendall(head.encode() + body)
        received = b""
        while b"\r\n\r\n" not in received:
            received += sock.recv(65536)
        head_octets, _, content = received.partition(b"\r\n\r\n")
        size = int(head_octets.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while len(content) < size:
            content += sock.recv(65536)
        return content

    return post


KINDS = {
    "urllib3": with_urllib3,
    "urllib3-400": with_urllib3,
    "http.client": with_http_client,
    "sockets": with_sockets,
}


def samples(kind: str, url: str, count: int) -> dict[str, float]:
    post = KINDS[kind](url)
    session = json.loads(post("/api/v1/create_session", b'{"tags":[],"sdk_version":"0.38.0"}'))["session_id"]
    asked = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "stub/model"}
    made = json.loads(post("/api/v1/create_sampling_session", json.dumps(asked).encode()))
    request = {
        "sampling_session_id": made["sampling_session_id"],
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(20))}]},
        "sampling_params": {"max_tokens": 8},
        "type": "sample",
    }

    def one(number: int) -> None:
        promise = json.loads(post("/api/v1/asample", json.dumps({**request, "seq_id": number}).encode()))
        wanted = json.dumps({"request_id": promise["request_id"], "allow_metadata_only": True})
        post("/api/v1/retrieve_future", wanted.encode())

    threads = IN_FLIGHT if kind.endswith("-400") else 1
    with ThreadPoolExecutor(threads) as workers:
        every = workers.map if threads > 1 else map
        list(every(one, range(max(WARM_UP, threads))))
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        list(every(one, range(WARM_UP, WARM_UP + count)))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {"wall_ms": wall_s / count * 1e3, "cpu_ms": cpu_s / count * 1e3}


def memcpy(size: int) -> dict[str, float]:
    source = bytes(size)
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    copied = bytearray(source)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    assert len(copied) == size
    return {"wall_s": wall_s, "cpu_s": cpu_s}


_READER = """
import socket, sys
reader, scratch = socket.create_connection(("127.0.0.1", int(sys.argv[1]))), bytearray(1 << 20)
while reader.recv_into(scratch):
    pass
"""


def loopback(size: int) -> dict[str, float]:
    """Send `size` bytes over loopback, one block of 256 KB repeatedly, to a process that drops them."""
    block = bytes(256 * 1024)
    with socket.create_server(("127.0.0.1", 0)) as server:
        reader = subprocess.Popen([sys.executable, "-c", _READER, str(server.getsockname()[1])])
        accepted, _ = server.accept()
        with accepted:
            accepted.sendall(block)
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(size // len(block)):
                accepted.sendall(block)
            wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        reader.wait()
    return {"wall_s": wall_s, "cpu_s": cpu_s}


BYTES = {"memcpy": memcpy, "loopback": loopback}

if __name__ == "__main__":
    kind, url, size = sys.argv[1:]
    print(json.dumps(BYTES[kind](int(size)) if kind in BYTES else samples(kind, url, int(size))), flush=True)
