"""`EmbeddedServer`: the address and the key of an embedded server, and its process.

Guarantees: if many threads call `start` at once, one server process is started. The key never appears in a
command line. The server process ends when this process ends, because the pipe between them closes.

States of a server of this process: *idle* (its port is chosen, and its process does not run), *running*, and
*gone* (its process ended by itself; final). `start` leads from idle to running and `stop` back. A start that
fails leaves the server idle.

Any thread may call this module.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urlsplit

from tinker_sync._base.secret import Secret
from tinker_sync._embedded import DEFAULT_DATA_DIR
from tinker_sync.errors import APIConnectionError, ConfigurationError, TinkerError

# The modules that start processes and write key files are imported at the first start, so that a client is
# created quickly.
if TYPE_CHECKING:
    from tinker_sync.local.process.server_process import ServerProcess

_log: Final = logging.getLogger("tinker_sync.local")

HOST: Final = "127.0.0.1"
MOST_BYTES: Final = 4 << 30
"""The most bytes of checkpoints in the default directory; the oldest ones are deleted at a start."""
BUILT_IN_MODEL: Final = "tinker-sync/tiny"
# The time for work in progress, such as a last report, and for removing files. Saved state needs no time: it
# is on the disk at any moment.
STOP_LIMIT_S: Final = 3.0


class ServerRecord(NamedTuple):
    """The record of a server, by which other processes find and use it: its address, key and options.

    Attributes:
        owner: the id of the process that the server belongs to.
        data_dir, model: the options of the owner's `EmbeddedServer` or of `serve`, as absolute paths.
        lasting: True for a server of `serve`, which any process of the user may use for its directory.
    """

    base_url: str
    key: Secret
    owner: int
    data_dir: str | None = None
    model: str | None = None
    lasting: bool = False

    def has(self, data_dir: str | None, model: str | None) -> bool:
        """Return True if the server uses this directory and offers this model; None is the built-in one.

        >>> server = ServerRecord("http://127.0.0.1:8000", Secret("key"), 1, "/data", "/qwen")
        >>> server.has("/data", "/qwen"), server.has("/data", None), server.has("/data", "/other")
        (True, True, False)
        """
        return self.data_dir == data_dir and model in (None, self.model)


class EmbeddedServer:
    """An embedded server: its address and key, and the child process that `start` launches. Thread-safe.

    Args:
        data_dir: the directory for its state; None: a directory that is removed when the child process ends.
        model: a Hugging Face directory to serve beside the built-in model.
        record: the record of another process's server, to use instead of a new one. There is then no child
            process here, and the other arguments have no effect.

    Raises:
        ConfigurationError: no port is free.

    >>> server = EmbeddedServer()
    >>> server.running
    False
    >>> server.stop()
    """

    def __init__(
        self, *, data_dir: str | None = None, model: str | None = None, record: ServerRecord | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._holders = 0  # guarded by _lock
        self._process: ServerProcess | None = None  # guarded by _lock
        self._failure: str | None = None  # guarded by _lock; set once, final
        self._socket: socket.socket | None = None  # guarded by _lock; the port, until a process takes it
        self._notice = ""  # guarded by _lock; about the directory for the state, until it is logged
        self._found = False  # guarded by _lock; True once the server of another process has answered
        if record is None:
            self._socket = bind_port()
            record = ServerRecord(
                base_url=f"http://{HOST}:{self._socket.getsockname()[1]}",
                key=Secret(f"tml-local-{os.urandom(24).hex()}"),
                owner=os.getpid(),
                data_dir=_absolute(data_dir),
                model=_absolute(model),
            )
        self.record = record

    @property
    def base_url(self) -> str:
        """The URL of the server, which stays the same through `stop` and `start`."""
        return self.record.base_url

    @property
    def key(self) -> Secret:
        """The key that clients send."""
        return self.record.key

    @property
    def _is_own(self) -> bool:
        return self.record.owner == os.getpid()

    def serves(self, data_dir: str | None, model: str | None) -> bool:
        """Return True if a client with these options can use this server, and False if it needs a new one.

        If the options are the same and `stop` has ended this server, this call reserves its port again and
        returns True, or False if another program has the port. It also returns False if this server has ended
        without `stop`, if it belongs to another process and does not listen, or if it has other options and
        neither a child process nor clients of this process.

        Raises:
            ConfigurationError: the server has other options, and is in use.
        """
        with self._lock:
            if self._has_failed_locked() or not (self._is_own or _is_listening(self.base_url)):
                return False
            if self.record.has(_absolute(data_dir), _absolute(model)):
                return self._holders > 0 or self._reserve_port_locked()
            if self._process is None and self._holders == 0:
                return False
            raise ConfigurationError(
                "the embedded server of this process is in use, with another directory or model; "
                "close its clients first"
            )

    @property
    def in_use(self) -> bool:
        """True while the server needs its port: it runs, waits for its first request, or has clients."""
        with self._lock:
            return self._process is not None or self._socket is not None or self._holders > 0

    @property
    def running(self) -> bool:
        """True while this process has a running child; False for a server of another process."""
        with self._lock:
            return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        """The id of the child process; None while this process has no child."""
        with self._lock:
            return None if self._process is None else self._process.pid

    # -------------------------------------------------------------------------------------- holders

    def hold(self) -> ServerHold:
        """Return a new claim of a client on this server. The release of the last claim stops the server."""
        with self._lock:
            self._holders += 1
        return ServerHold(self)

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self.stop()

    # -------------------------------------------------------------------------------------- start and stop

    def start(self) -> None:
        """Start the server if it is not running, and return when it listens.

        A start takes a fraction of a second. Threads that call this meanwhile wait for it. A server of
        another process is not started; the first call checks that it listens.

        Raises:
            MissingExtraError: a package that the server needs is not installed.
            ConfigurationError: the server cannot be started, for example because of its data directory or
                its model. The next call tries again.
            APIConnectionError: the server has ended by itself, or that of another process does not listen.
        """
        launched = False
        with self._lock:  # held during the start, so that one thread starts the server and the others wait
            if not self._is_own:
                self._look_for_it_locked()
            if self._has_failed_locked():
                raise APIConnectionError(self._failure or "")
            if self._is_own and self._process is None:
                self._process = self._launch_locked()
                self._notice = self._process.notice
                launched = True
            notice, self._notice = self._notice, ""
        if notice:
            _log.warning("%s", notice)
        elif launched and self.record.data_dir:
            _log.info("the embedded server keeps its checkpoints in %s", self.record.data_dir)

    def stop(self) -> None:
        """End the child process, if this process has one, and free the port. Idempotent.

        A later `start` launches a new child at the same port. A server of another process runs on.
        """
        with self._lock:
            process, self._process = self._process, None
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if process is not None:
                process.end(STOP_LIMIT_S)

    def _has_failed_locked(self) -> bool:
        if self._process is not None and not self._process.alive:
            self._failure = self._process.summarize_exit()
            self._process = None
        return self._failure is not None

    def _reserve_port_locked(self) -> bool:
        if self._is_own and self._process is None and self._socket is None:
            try:
                self._socket = bind_port(self._port)
            except ConfigurationError:
                return False
        return True

    @property
    def _port(self) -> int:
        return urlsplit(self.base_url).port or 0

    def _launch_locked(self) -> ServerProcess:
        if not sys.executable:
            raise ConfigurationError("this program has no Python interpreter to run the embedded server with")
        from tinker_sync.local.process import key_files
        from tinker_sync.local.process.server_process import ServerProcess

        listening, self._socket = self._socket or bind_port(self._port), None
        try:
            place, alive = key_files.publish(self.record)
        except BaseException:
            listening.close()
            raise
        orders = {
            "port": self._port,
            "key": self.key.reveal(),
            "data_dir": self.record.data_dir,
            "models": [BUILT_IN_MODEL, *([self.record.model] if self.record.model else [])],
        }
        if self.record.data_dir == _absolute(DEFAULT_DATA_DIR):
            orders |= {"or_temporary": True, "most_bytes": MOST_BYTES}
        with alive:  # the child inherits the file, and its lock
            return ServerProcess.start(place, listening, orders, inherited=[alive.fileno()])

    # -------------------------------------------------------------------------------------- other processes

    def prepare_fork(self) -> None:
        """Start the server before a fork if a client holds it.

        The forked process can share only a running server.
        """
        with self._lock:
            wanted = self._holders > 0 and self._process is None and self._failure is None
        if wanted and self._is_own:
            with suppress(TinkerError):  # the next request raises it
                self.start()

    def renew_after_fork(self) -> None:
        """In a forked process: renew the lock, and drop the port and the child process of the parent."""
        self._lock = threading.Lock()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.forget()
            self._process = None

    def _look_for_it_locked(self) -> None:
        if not self._found and self._failure is None:
            self._found = _is_listening(self.base_url)
            if not self._found:
                self._failure = (
                    "the embedded server belongs to the process that this one came from, or to another one, "
                    "and is gone"
                )

    def __repr__(self) -> str:
        state = "running" if self.running else "not running"
        return f"<EmbeddedServer {self.base_url} {state}>"


class ServerHold:
    """The claim of one client on a server, which `EmbeddedServer.hold` returns. Thread-safe."""

    def __init__(self, server: EmbeddedServer) -> None:
        self._server: EmbeddedServer | None = server

    def start(self) -> None:
        """Start the server if it is not running; see `EmbeddedServer.start`. After `release`, do nothing."""
        server = self._server
        if server is not None:
            server.start()

    def release(self) -> None:
        """Give up the claim. The last release stops a server of this process. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server._let_go()


def find_running_server(data_dir: str | None, model: str | None) -> EmbeddedServer | None:
    """Return a running server with these options that this process may use.

    It is that of the process that started this one by `multiprocessing`, or one that the user has started by
    `serve` for the same directory.
    """
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    directory = _absolute(data_dir)
    # A directory that a server uses has a file `lock`. Without it, nothing else is loaded and looked at.
    if parent is None and not (directory and os.path.exists(os.path.join(directory, "lock"))):
        return None
    from tinker_sync.local.process import key_files

    record = key_files.find_usable(None if parent is None else parent.pid, directory, _absolute(model))
    if record is None:
        return None
    return EmbeddedServer(record=record) if _is_listening(record.base_url) else None


def bind_port(port: int = 0) -> socket.socket:
    """Return a socket that is bound to a port of the loopback address; 0 means a free port.

    The socket does not listen, so the system refuses connections to the port.

    Raises:
        ConfigurationError: the port cannot be bound.

    >>> bind_port().close()
    """
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port and os.name != "nt":  # closed connections of an earlier server may still occupy the port
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((HOST, port))
    except OSError as problem:
        bound.close()
        raise ConfigurationError(f"the embedded server found no port: {problem.strerror}") from problem
    return bound


def _is_listening(base_url: str) -> bool:
    from tinker_sync.local.process import key_files

    return key_files.is_listening(base_url)


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))
