"""Servers on loopback sockets whose behaviour a test scripts.

`ScriptedServer` runs a function for each connection. The function sends any bytes, pauses, or resets the
connection. `AnsweringServer` runs a function for each request, over kept-alive connections. `ProxyServer`
forwards and tunnels, and may ask for a password. Each is a context manager, which at its exit joins its
threads and raises the first exception of the functions.
"""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from support.clock import PATIENCE_S

Script = Callable[["Peer"], None]
Answer = Callable[["Seen"], bytes]


class Seen:
    """A request that a server has received."""

    def __init__(self, head: bytes, body: bytes, connection: int) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        self.method, self.target, self.version = first.split(" ")
        self.pairs = [tuple(part.strip() for part in line.split(":", 1)) for line in lines]
        self.body = body
        self.connection = connection
        """The number of the connection over which it came, from 0."""

    def header(self, name: str) -> str | None:
        """Return the value of a header. Raise AssertionError if the request has it more than once."""
        values = [value for header, value in self.pairs if header.lower() == name.lower()]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    def __repr__(self) -> str:
        return f"<{self.method} {self.target} on connection {self.connection}>"


class Gone(Exception):
    """The error for a connection that the client has closed."""


class Peer:
    """The server's end of one connection, which a script uses."""

    def __init__(self, sock: socket.socket, number: int, server: ScriptedServer) -> None:
        self.sock = sock
        self.number = number
        self._server = server
        self._buffer = b""

    def read_request(self) -> Seen:
        """Return the next whole request. Raise `Gone` at the end of the connection."""
        while b"\r\n\r\n" not in self._buffer:
            self._receive()
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        seen = Seen(head, b"", self.number)
        length = int(seen.header("content-length") or 0)
        while len(self._buffer) < length:
            self._receive()
        seen.body, self._buffer = self._buffer[:length], self._buffer[length:]
        self._server.note(seen)
        return seen

    def read_head(self) -> Seen:
        """Return the next request without its body, which stays unread."""
        while b"\r\n\r\n" not in self._buffer:
            self._receive()
        head, self._buffer = self._buffer.split(b"\r\n\r\n", 1)
        seen = Seen(head, b"", self.number)
        self._server.note(seen)
        return seen

    def take_rest(self) -> bytes:
        """Return the bytes of the body that have arrived after `read_head`."""
        rest, self._buffer = self._buffer, b""
        return rest

    def send(self, *parts: bytes) -> None:
        for part in parts:
            self.sock.sendall(part)

    def close(self) -> None:
        """Close the connection with an orderly end, not with a reset."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()

    def half_close(self) -> None:
        """Close the sending direction of the connection; reading goes on."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """Reset the connection, as a crashed server does."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def wait_gone(self) -> None:
        """Return when the client has closed the connection. Drop the bytes that it sends until then."""
        with contextlib.suppress(OSError):
            while self.sock.recv(65536):
                pass

    def _receive(self) -> None:
        try:
            data = self.sock.recv(65536)
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        self._buffer += data


class ScriptedServer:
    """A server that runs the n-th script on the n-th connection, and the last script on all later ones.

    >>> with ScriptedServer(lambda peer: peer.send(answer(b"hi"))) as server:
    ...     with socket.create_connection(server.address) as client:
    ...         client.recv(100)[-2:]
    b'hi'
    """

    def __init__(
        self,
        *scripts: Script,
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        name: str | None = None,
    ) -> None:
        self._scripts = scripts
        self._tls = tls
        self._name = name or host
        self._lock = threading.Condition()
        self._seen: list[Seen] = []  # guarded by _lock
        self._sockets: list[socket.socket] = []  # guarded by _lock
        self._threads: list[threading.Thread] = []  # guarded by _lock
        self._failures: list[BaseException] = []  # guarded by _lock
        self.stopping = threading.Event()
        """Set at the end of the test. A script that waits must also wait for this event."""
        self._listener = socket.create_server((host, 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        self.address = (host, self.port)

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://{self._name}:{self.port}"

    @property
    def seen(self) -> list[Seen]:
        """The requests that the server has read so far, on all connections, in order."""
        with self._lock:
            return list(self._seen)

    @property
    def connections(self) -> int:
        """Return the number of accepted connections."""
        with self._lock:
            return len(self._sockets)

    def await_seen(self, count: int) -> None:
        """Return when `count` requests have been read."""
        with self._lock:
            if not self._lock.wait_for(lambda: len(self._seen) >= count, PATIENCE_S):
                raise AssertionError(f"{count} requests expected, {len(self._seen)} came")

    def note(self, seen: Seen) -> None:
        with self._lock:
            self._seen.append(seen)
            self._lock.notify_all()

    def __enter__(self) -> ScriptedServer:
        self._accepting = threading.Thread(target=self._accept, name=f"test-server-{self.port}")
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        self._wake_listener()
        self._accepting.join(PATIENCE_S)
        self._listener.close()
        with self._lock:
            sockets, threads = list(self._sockets), list(self._threads)
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(PATIENCE_S)
        for sock in sockets:
            sock.close()
        alive = [thread.name for thread in (self._accepting, *threads) if thread.is_alive()]
        if error is None:
            assert not alive, f"still running: {alive}"
            for failure in self._failures:
                raise failure

    def stop_listening(self) -> None:
        """Refuse new connections from now on. Open connections stay open."""
        self._wake_listener()
        self._accepting.join(PATIENCE_S)
        self._listener.close()

    def _wake_listener(self) -> None:
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # Linux
        except OSError:
            with contextlib.suppress(OSError):  # on other systems a connection wakes the thread
                socket.create_connection(self.address, timeout=1).close()

    def _accept(self) -> None:
        while not self.stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            if self.stopping.is_set():
                sock.close()
                return
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                number = len(self._sockets)
                self._sockets.append(sock)
                thread = threading.Thread(
                    target=self._serve, args=(sock, number), name=f"test-server-{self.port}-{number}"
                )
                self._threads.append(thread)
            thread.start()

    def _serve(self, sock: socket.socket, number: int) -> None:
        script = self._scripts[min(number, len(self._scripts) - 1)]
        wrapped = sock
        try:
            if self._tls:
                wrapped = self._handshake(sock)
            script(Peer(wrapped, number, self))
        except (Gone, OSError):
            pass  # the client closed the connection; the test decides if that is an error
        except BaseException as error:  # noqa: BLE001 - raised on exit, in the test's own thread
            with self._lock:
                self._failures.append(error)
        finally:
            wrapped.close()

    def _handshake(self, sock: socket.socket) -> socket.socket:
        assert self._tls
        with self._lock:
            place = self._sockets.index(sock)
        wrapped = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:
            self._sockets[place] = wrapped  # wrapping has detached the plain socket
        wrapped.do_handshake()
        return wrapped


def silent(peer: Peer) -> None:
    """Read a request, and send no answer."""
    peer.read_request()
    peer.wait_gone()


def resets(peer: Peer) -> None:
    """Read a request, and reset the connection."""
    peer.read_request()
    peer.reset()


def once(raw: bytes) -> Script:
    """Return a script that answers one request with these bytes, and closes the connection."""

    def script(peer: Peer) -> None:
        peer.read_request()
        peer.send(raw)
        peer.close()

    return script


class AnsweringServer(ScriptedServer):
    """A server that answers each request with the bytes that a function returns for it.

    Its connections are kept alive.
    """

    def __init__(self, respond: Answer = lambda _: answer(), **options: Any) -> None:
        super().__init__(self._converse, **options)
        self._respond = respond

    def _converse(self, peer: Peer) -> None:
        while True:
            seen = peer.read_request()
            peer.send(self._respond(seen))
            if seen.header("connection") == "close":
                return


class ProxyServer(ScriptedServer):
    """An HTTP proxy, which tunnels on CONNECT and forwards other requests. It may require a password.

    A refusal repeats the password that was sent, in its status line and its body, plain and as it was sent.

    `seen` has the requests that the proxy can read: of tunnels only the CONNECT requests.
    """

    def __init__(
        self, *, user: str = "", password: str = "", refuse: int = 0, known: Mapping[str, int] | None = None
    ) -> None:
        super().__init__(self._proxy)
        self._wanted = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode() if user else None
        self._refuse = refuse
        self._known = known or {}

    def _proxy(self, peer: Peer) -> None:
        while True:
            seen = peer.read_request()
            login = seen.header("proxy-authorization") or ""
            if self._refuse or (self._wanted and login != self._wanted):
                sent = login.removeprefix("Basic ")
                password = base64.b64decode(sent).decode().partition(":")[2]
                told = f"who are you? {password} {sent}".strip()
                raw = answer(
                    told.encode(), status=self._refuse or 407, headers={"Proxy-Authenticate": "Basic"}
                )
                peer.send(raw.replace(b" X\r\n", f" {told}\r\n".encode(), 1))
                return
            if seen.method == "CONNECT":
                self._tunnel(peer, seen.target)
                return
            self._forward(peer, seen)

    def _tunnel(self, peer: Peer, target: str) -> None:
        host, _, port = target.rpartition(":")
        with socket.create_connection(("127.0.0.1", self._known.get(host, int(port)))) as upstream:
            peer.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
            self._pump(peer.sock, upstream)

    def _forward(self, peer: Peer, seen: Seen) -> None:
        assert seen.target.startswith("http://"), "a forwarding proxy needs the whole address"
        netloc, _, path = seen.target[len("http://") :].partition("/")
        host, _, port = netloc.partition(":")
        lines = [f"{seen.method} /{path} HTTP/1.1"]
        lines += [f"{name}: {value}" for name, value in seen.pairs if not name.lower().startswith("proxy-")]
        with socket.create_connection((host, int(port or 80))) as upstream:
            upstream.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1") + seen.body)
            while data := upstream.recv(65536):
                peer.send(data)

    def _pump(self, left: socket.socket, right: socket.socket) -> None:
        while not self.stopping.is_set():
            for sock in select.select([left, right], [], [], 0.5)[0]:
                data = sock.recv(65536)
                if not data:
                    return
                (right if sock is left else left).sendall(data)


def answer(
    body: bytes = b"{}",
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
    length: int | None = -1,
    version: str = "HTTP/1.1",
) -> bytes:
    """Return the bytes of an answer. `length` is the content length in its head; None leaves it out.

    >>> answer(b"hi", status=404)
    b'HTTP/1.1 404 X\\r\\nContent-Length: 2\\r\\n\\r\\nhi'
    """
    lines = [f"{version} {status} X", *(f"{name}: {value}" for name, value in (headers or {}).items())]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def redirect(location: str, status: int = 307) -> bytes:
    """Return the bytes of a redirect."""
    return answer(b"moved", status=status, headers={"Location": location})


def chunked(*chunks: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes of an answer in chunks.

    >>> chunked(b"ab", b"c")[-18:]
    b'2\\r\\nab\\r\\n1\\r\\nc\\r\\n0\\r\\n\\r\\n'
    """
    head = answer(b"", headers={"Transfer-Encoding": "chunked", **(headers or {})}, length=None)
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """Yield a port that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    yield port
