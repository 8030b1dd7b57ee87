"""A server of checkpoint files, whose connections and answers fail as a test wants.

`with FileServer(...) as server` runs it in a thread. As a process, which tests kill and start again at the
same port, it runs by `python -m support.file_server '{"files": {"archive": 2000000}, "cut": 50000}'`, and
prints its port.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from support.tars import END, member

BLOCK = 1 << 16
API = "/api/v1"


class Content:
    """The pseudo-random content of a file. It is computed when it is read, so a file may be very large."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self._base = random.Random(seed).randbytes(BLOCK)

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        while begin < end:
            number, at = divmod(begin, BLOCK)
            block = number.to_bytes(8, "little") + self._base[8:]
            piece = block[at : min(BLOCK, at + end - begin)]
            yield piece
            begin += len(piece)

    @cache  # noqa: B019  # it goes with the test
    def sum(self, algorithm: str) -> bytes:
        summed = hashlib.new(algorithm)
        for piece in self.pieces(0, self.size):
            summed.update(piece)
        return summed.digest()

    def read(self) -> bytes:
        return b"".join(self.pieces(0, self.size))


class Tar(Content):
    """A tar archive of one large file, computed when it is read."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.inner = Content(size, seed)
        self._head = member("adapter_model.safetensors", b"", size=size)
        self._tail = b"\0" * (-size % 512) + END
        self.size = len(self._head) + size + len(self._tail)

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        inner_end = len(self._head) + self.inner.size
        yield self._head[begin:end]
        yield from self.inner.pieces(max(begin - len(self._head), 0), min(end, inner_end) - len(self._head))
        if end > inner_end:
            yield self._tail[max(begin - inner_end, 0) : end - inner_end]


class FileServer:
    """A server of files. A test may change its attributes at any time."""

    def __init__(self, files: dict[str, Any] | None = None, *, port: int = 0, **behaviour: Any) -> None:
        self.files: dict[str, Content] = {
            name: value if isinstance(value, Content) else Content(value)
            for name, value in (files or {}).items()
        }
        self.cut = 0
        """Cut a connection each time this many more bytes have been sent. 0: never."""
        self.dies_after = 0
        """End the process when this many bytes have been sent. 0: never."""
        self.halts_after = 0
        """When this many bytes have been sent, print a line and send nothing more. 0: never."""
        self.life_s = 60.0
        """The time for which an address is valid."""
        self.uses = 0
        """The number of times that an address may be used. 0: no limit."""
        self.refusal = 403
        self.ranges = True
        self.etag: str | None = '"v1"'
        self.modified: str | None = None
        self.checksums: tuple[str, ...] = ()
        """The names of checksum headers to send, such as content-md5 and x-checksum-sha256."""
        self.wrong_checksum = False
        self.chunked = False
        self.length = True
        self.encoding: str | None = None
        self.expires_header = True
        self.archive = True
        self.archive_status = 404
        self.config: dict[str, Any] = {"fwdbwd_max_chunk_len": 1024, "custom_loss_server_side": False}
        self.redirect: str | None = None
        self.statuses: list[int] = []
        """The statuses of the answers to the next requests for files."""
        self.before: Callable[[Any], object] = lambda _: None
        """Called with each request for a file, before the answer."""
        for name, value in behaviour.items():
            assert hasattr(self, name), name
            setattr(self, name, value)
        self.seen: list[Any] = []
        self.signed = 0
        self.sent = 0
        self.puts: dict[str, bytes] = {}
        self._used: dict[str, int] = {}
        self._lock = threading.Lock()
        self._http = _Threads(("127.0.0.1", port), type("Handler", (_Handler,), {"owner": self}))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FileServer:
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), name="file-server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join(120)
        self._http.server_close()

    def serve(self) -> None:
        self._http.serve_forever()

    def asked(self) -> list[Any]:
        """Return the requests for files, in order."""
        return [seen for seen in list(self.seen) if seen.path.startswith("/files/")]

    def sign(self, name: str) -> str:
        with self._lock:
            self.signed += 1
            number = self.signed
        until = time.time() + self.life_s
        return f"{self.url}/files/{quote(name)}?signature=s3cr3t-{number}&until={until:.3f}"

    def may_send(self, count: int) -> tuple[int, bool]:
        """Return how many of the next `count` bytes may be sent, and True if a cut must follow them."""
        with self._lock:
            left = self.cut - self.sent % self.cut if self.cut else count + 1
            self.sent += min(count, left)
            sent = self.sent
        if self.dies_after and sent >= self.dies_after:
            os._exit(3)
        if self.halts_after and sent >= self.halts_after:
            # To the process that started this one. Several threads may halt, so the line is one write.
            print("halted\n", end="", flush=True)  # noqa: T201
            threading.Event().wait()
        return min(count, left), left <= count

    def is_good(self, query: dict[str, list[str]]) -> bool:
        signature = query["signature"][0]
        with self._lock:
            self._used[signature] = self._used.get(signature, 0) + 1
            worn = self.uses and self._used[signature] > self.uses
        return not worn and time.time() <= float(query["until"][0])


class _Threads(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore the error of a client that has closed the connection."""


class _Handler(BaseHTTPRequestHandler):
    owner: FileServer
    protocol_version = "HTTP/1.1"
    timeout = 30
    disable_nagle_algorithm = True

    def setup(self) -> None:
        # A cut connection loses the bytes that were sent and not received. A small buffer keeps them few.
        self.request.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
        super().setup()

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def _note(self) -> None:
        # Keep a copy, because this object serves all requests of its connection.
        self.noted = SimpleNamespace(path=self.path, headers=self.headers, method=self.command)
        self.owner.seen.append(self.noted)

    def do_GET(self) -> None:
        self._note()
        url = urlsplit(self.path)
        if url.path.startswith("/files/"):
            self.owner.before(self)
            self._file(unquote(url.path[len("/files/") :]), parse_qs(url.query))
        elif url.path.endswith("/external_weights_urls"):
            owner = self.owner
            self._json({"urls": {name: owner.sign(name) for name in owner.files}, "expires": self._expiry()})
        elif url.path.endswith("/archive") and self.owner.archive:
            self._redirect(self.owner.sign("archive"))
        elif url.path.endswith("/archive"):
            self._json({"detail": "no such archive"}, self.owner.archive_status)
        else:
            self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self._note()
        if self.path.endswith("/client/config"):
            self._json(self.owner.config)
        elif self.path.endswith("/external_weights_upload_start"):
            self.noted.start = json.loads(body)
            owner = self.owner
            self._json(
                {
                    "upload_id": f"up-{owner.signed}",
                    "urls": {name: owner.sign(name) for name in owner.files},
                    "expires": self._expiry(),
                }
            )
        elif self.path.endswith("/external_weights_upload_finish"):
            self._json({"tinker_path": f"tinker://run/external_weights/{json.loads(body)['upload_id']}"})
        else:
            self._json({}, 200 if self.path.endswith("/dynamic_config") else 404)

    def do_PUT(self) -> None:
        self._note()
        self.owner.before(self)
        url = urlsplit(self.path)
        length = int(self.headers["content-length"])
        if self.owner.statuses or not self.owner.is_good(parse_qs(url.query)):
            self.close_connection = True
            self._json({}, self.owner.statuses.pop(0) if self.owner.statuses else self.owner.refusal)
            return
        data = bytearray()
        while len(data) < length:
            allowed, cut = self.owner.may_send(min(BLOCK, length - len(data)))
            data += self.rfile.read(allowed)
            if cut:
                self._hang_up()
                return
        self.owner.puts[unquote(url.path[len("/files/") :])] = bytes(data)
        self._json({})

    def do_DELETE(self) -> None:
        self._note()
        self._json({})

    def _expiry(self) -> str:
        return formatdate_rfc3339(time.time() + self.owner.life_s)

    def _redirect(self, location: str) -> None:
        self.send_response(302)
        self.send_header("Location", location)
        if self.owner.expires_header:
            self.send_header("Expires", formatdate(time.time() + self.owner.life_s, usegmt=True))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _json(self, tree: Any, status: int = 200) -> None:
        body = json.dumps(tree).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, name: str, query: dict[str, list[str]]) -> None:
        owner = self.owner
        if owner.statuses:
            self._json({"detail": "scripted"}, owner.statuses.pop(0))
            return
        if owner.redirect is not None:
            location, owner.redirect = owner.redirect, None
            self._redirect(location or self.path)
            return
        if not owner.is_good(query):
            self._json({"detail": "expired"}, owner.refusal)
            return
        content = owner.files[name]
        begin, end, status = self._wanted(content.size)
        if status == 416:
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{content.size}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(status)
        self._describe(content, status, begin, end)
        self._send(content.pieces(begin, end))

    def _wanted(self, size: int) -> tuple[int, int, int]:
        owner, asked = self.owner, self.headers.get("range")
        condition = self.headers.get("if-range")
        if not asked or not owner.ranges or condition not in (None, owner.etag, owner.modified):
            return 0, size, 200
        first, _, last = asked.removeprefix("bytes=").partition("-")
        begin, end = int(first), min(int(last or size - 1) + 1, size)
        return begin, end, 206 if begin < size else 416

    def _describe(self, content: Content, status: int, begin: int, end: int) -> None:
        owner = self.owner
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{content.size}")
        if owner.etag:
            self.send_header("ETag", owner.etag)
        if owner.modified:
            self.send_header("Last-Modified", owner.modified)
        if owner.encoding:
            self.send_header("Content-Encoding", owner.encoding)
        for header in owner.checksums:
            algorithm = "md5" if "md5" in header else "sha256"
            summed = content.sum(algorithm)
            if owner.wrong_checksum:
                summed = bytes(len(summed))
            hexadecimal = header == "x-checksum"
            value = summed.hex() if hexadecimal else base64.b64encode(summed).decode()
            self.send_header(
                header, {"digest": f"SHA-256={value}", "repr-digest": f"sha-256=:{value}:"}.get(header, value)
            )
        if owner.chunked:
            self.send_header("Transfer-Encoding", "chunked")
        elif owner.length:
            self.send_header("Content-Length", str(end - begin))
        else:
            self.close_connection = True
        self.end_headers()

    def _send(self, pieces: Iterator[bytes]) -> None:
        owner = self.owner
        for piece in pieces:
            if not piece:
                continue
            allowed, cut = owner.may_send(len(piece))
            self.wfile.write(
                b"%x\r\n%b\r\n" % (allowed, piece[:allowed]) if owner.chunked else piece[:allowed]
            )
            if cut:
                self._hang_up()
                return
        if owner.chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _hang_up(self) -> None:
        """Close the connection without an orderly end."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


def formatdate_rfc3339(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def main() -> None:
    options = json.loads(sys.argv[1])
    files = {name: Tar(size) if name == "archive" else size for name, size in options.pop("files").items()}
    server = FileServer(files, **options)
    print(urlsplit(server.url).port, flush=True)  # noqa: T201  # to the process that started this one
    parent = os.getppid()
    threading.Thread(target=_follow, args=(parent,), daemon=True).start()
    server.serve()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        threading.Event().wait(1)
    os._exit(0)


if __name__ == "__main__":
    main()
