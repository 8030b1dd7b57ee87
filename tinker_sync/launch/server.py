"""`LocalServer`: one server process, from the side of those who use it.

Guarantees: however many threads ask, one process is started; it is told everything through a pipe, nothing on
its command line; it ends when this process does, since the pipe then closes.

The states: *idle*, the port is known and nobody listens; *running*; *gone*, it ended by itself, for good.
`start` leads from idle to running, `stop` back; what fails to start stays idle.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit

from tinker_sync._secret import Secret
from tinker_sync.errors import APIConnectionError, ConfigurationError, TinkerError

# What starts processes and keeps key files loads with the first start: making a client takes no time.
if TYPE_CHECKING:
    from pathlib import Path

    from tinker_sync.launch.process import ServerProcess

HOST: Final = "127.0.0.1"
START_LIMIT_S: Final = 60.0
# State is safe at any moment; this is for what is under way, such as a last report, and for tidying up.
STOP_LIMIT_S: Final = 3.0


class KnownServer(NamedTuple):
    """What there is to know of a server; its process need not run.

    Attributes:
        owner: the process it belongs to.
        data_dir, model: what its owner asked for.
    """

    base_url: str
    key: Secret
    owner: int
    data_dir: str | None = None
    model: str | None = None


class LocalServer:
    """An embedded server that starts when it is first needed. Thread-safe.

    Args:
        data_dir: where it keeps its state; None: in a directory that goes with it.
        model: a Hugging Face directory; None: the built-in model.

    >>> server = LocalServer()
    >>> server.running
    False
    >>> server.stop()
    """

    def __init__(
        self, *, data_dir: str | None = None, model: str | None = None, joined: KnownServer | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._holders = 0  # guarded by _lock
        self._process: ServerProcess | None = None  # guarded by _lock
        self._failure: str | None = None  # guarded by _lock; set once, final
        self._socket: socket.socket | None = None  # guarded by _lock; the port, while no process has it
        self._found = False  # guarded by _lock; whether the server of another process was seen
        if joined is None:
            self._socket = _bound(0)
            joined = KnownServer(
                base_url=f"http://{HOST}:{self._socket.getsockname()[1]}",
                key=Secret(f"tml-local-{os.urandom(24).hex()}"),
                owner=os.getpid(),
                data_dir=_absolute(data_dir),
                model=model,
            )
        self._known = joined

    @property
    def base_url(self) -> str:
        """Its address, which stays the same."""
        return self._known.base_url

    @property
    def key(self) -> Secret:
        """What its clients have to send."""
        return self._known.key

    @property
    def _ours(self) -> bool:
        return self._known.owner == os.getpid()

    def serves(self, data_dir: str | None, model: str | None) -> bool:
        """Whether this is what somebody needs who asks for such a server; not when it must be replaced.

        Raises:
            ConfigurationError: it is in use, and keeps its state elsewhere or serves something else.
        """
        with self._lock:
            if self._over_locked() or not (self._ours or _answers(self.base_url)):
                return False
            if (_absolute(data_dir), model) == (self._known.data_dir, self._known.model):
                return True
            if self._ours and self._process is None and self._holders == 0:
                return False
            raise ConfigurationError(
                "the embedded server of this process is in use, with another directory or model; "
                "close its clients first"
            )

    @property
    def running(self) -> bool:
        """Whether its process runs, as far as this process knows."""
        with self._lock:
            return self._process is not None and self._process.alive

    @property
    def pid(self) -> int | None:
        """The server's process, while there is one."""
        with self._lock:
            return None if self._process is None else self._process.pid

    # -------------------------------------------------------------------------------------- its users

    def hold(self) -> Callable[[], None]:
        """Be one of those for whom it runs; what is returned ends that, and with the last one the server."""
        with self._lock:
            self._holders += 1
        return _Hold(self).release

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self.stop()

    # -------------------------------------------------------------------------------------- its life

    def start(self) -> None:
        """Return when it runs. Starting takes a part of a second, once; whoever comes meanwhile waits.

        Raises:
            MissingExtraError: something is not installed that it needs.
            ConfigurationError: its directory or its model cannot be used. The next call tries again.
            APIConnectionError: it has ended by itself, and what it held in memory is lost.
        """
        with self._lock:  # it takes long, on purpose: one starts it, the others wait
            if not self._ours:
                self._look_for_it_locked()
            if self._over_locked():
                raise APIConnectionError(self._failure or "")
            if self._ours and self._process is None:
                self._process = self._launched_locked()

    def stop(self) -> None:
        """End its process, if it is ours; the next `start` begins anew. Idempotent."""
        with self._lock:
            process, self._process = self._process, None
            if self._socket is not None:
                self._socket.close()
                self._socket = None
            if process is not None:
                process.end(STOP_LIMIT_S)

    def _over_locked(self) -> bool:
        if self._process is not None and not self._process.alive:
            self._failure = self._process.obituary()
            self._process = None
        return self._failure is not None

    def _launched_locked(self) -> ServerProcess:
        if not sys.executable:
            raise ConfigurationError("this program has no Python interpreter to run the embedded server with")
        from tinker_sync.launch import known
        from tinker_sync.launch.process import ServerProcess

        listening = self._socket or _bound(urlsplit(self.base_url).port or 0)
        self._socket = None
        # Were it open here too, connections would be taken that nobody answers when the server has ended.
        with listening:
            place = known.publish(self._known)
            return ServerProcess.start(place, listening, self._handover(place), START_LIMIT_S)

    def _handover(self, place: Path) -> dict[str, Any]:
        return {
            "port": urlsplit(self.base_url).port,
            "key": self.key.reveal(),
            "place": str(place),
            "data_dir": self._known.data_dir,
            "model": self._known.model,
        }

    # -------------------------------------------------------------------------------------- children

    def prepare_fork(self) -> None:
        """Run before a fork if anybody holds this: a child can only share what runs."""
        with self._lock:
            wanted = self._holders > 0 and self._process is None and self._failure is None
        if wanted and self._ours:
            with suppress(TinkerError):  # it is told to whoever uses it
                self.start()

    def renew_after_fork(self) -> None:
        """In the child: the server is the parent's, and lives as long as the parent wants it to."""
        self._lock = threading.Lock()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            self._process.forget()
            self._process = None

    def _look_for_it_locked(self) -> None:
        if not self._found and self._failure is None:
            self._found = _answers(self.base_url)
            if not self._found:
                self._failure = (
                    "the embedded server belongs to the process that this one came from, and is gone"
                )

    def __repr__(self) -> str:
        state = "running" if self.running else "not running"
        return f"<LocalServer {self.base_url} {state}>"


class _Hold:
    """One user of a server, once."""

    def __init__(self, server: LocalServer) -> None:
        self._server: LocalServer | None = server

    def release(self) -> None:
        """Let go. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server._let_go()


def parents_server(data_dir: str | None, model: str | None) -> LocalServer | None:
    """In a process that `multiprocessing` has spawned: the server of the one that did, if it fits."""
    multiprocessing = sys.modules.get("multiprocessing.process")
    parent = multiprocessing.parent_process() if multiprocessing is not None else None
    if parent is None:
        return None
    from tinker_sync.launch import known

    found = known.of_owner(parent.pid)
    if found is None or (found.data_dir, found.model) != (_absolute(data_dir), model):
        return None
    return LocalServer(joined=found) if _answers(found.base_url) else None


def _answers(base_url: str) -> bool:
    from tinker_sync.launch import known

    return known.answers(base_url)


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


def _bound(port: int) -> socket.socket:
    """A port of this machine that nobody listens on yet: connections are refused."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        if port and os.name != "nt":  # connections of the server before may not have faded yet
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((HOST, port))
    except OSError as problem:
        made.close()
        raise ConfigurationError(f"the embedded server found no port: {problem.strerror}") from problem
    return made
