"""`EmbeddedServer`: the address and the key of an embedded server, and the child process that serves there.

Guarantees: if many threads call `start` at once, one server process is started. The key never appears in a
command line. The server process ends when this process ends, because the pipe between them closes.

States of a server of this process: *idle* (its port is chosen, and its process does not run), *running*, and
*gone* (its process ended by itself; final). `start` leads from idle to running and `stop` back. A start that
fails leaves the server idle.

The child process (`running.main_of_child`) reads its orders from standard input: one line of JSON, so that no
key appears in a command line. The owner then keeps the pipe open. When the pipe closes, the server ends, so
it also ends if its owner is killed. The child writes at most one line to standard output: the report that the
server listens, or the reason why it does not.

Key files have the address and the key of a running server, in a directory that is named by its address. A
process that knows only the address of a server, from a pickled client or from its user, reads the key from
there. A user who may read the file may use the server. Each user has one directory that holds all these
directories. It is in the temporary directory of the machine, and only its user can open it. A server holds a
lock on a file in its directory for as long as it runs. A record without this lock is of a server that was
killed, and does not count, because another program may have its port by now. On Windows, which cannot hand an
open file to a server, every record counts.

Any thread may call this module, except that one thread at a time may use a `ServerProcess`. Modules that take
long to import are imported where they are used, so that a client is created quickly.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple
from urllib.parse import urlsplit

from tinker_sync._base.files import try_lock
from tinker_sync._base.secret import Secret, is_loopback
from tinker_sync._embedded import DEFAULT_DATA_DIR
from tinker_sync.errors import APIConnectionError, ConfigurationError, TinkerError

if TYPE_CHECKING:
    import subprocess


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
        """Return True if the server uses this directory and this model; None is the built-in model.

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
            if self._has_failed_locked() or not (self._is_own or is_listening(self.base_url)):
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

        listening, self._socket = self._socket or bind_port(self._port), None
        try:
            place, alive = publish_record(self.record)
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
            self._found = is_listening(self.base_url)
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
    record = find_usable(None if parent is None else parent.pid, directory, _absolute(model))
    if record is None:
        return None
    return EmbeddedServer(record=record) if is_listening(record.base_url) else None


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


def _absolute(path: str | None) -> str | None:
    return None if path is None else os.path.abspath(os.path.expanduser(path))


# ----------------------------------------------------------------------------------------- the child process


LOG_FILE: Final = "server.log"
FAREWELL: Final = b"end\n"
"""What the owner writes before it closes the pipe, so that the child can tell this from the owner's death."""
START_LIMIT_S: Final = 60.0
_TAIL_CHARACTERS: Final = 2000
# The child imports modules from the same places as this process.
_CHILD: Final = (
    "import json, sys; orders = json.loads(sys.stdin.buffer.readline()); sys.path[:] = orders.pop('path'); "
    "from tinker_sync.local.running import main_of_child; main_of_child(orders)"
)


class ServerProcess:
    """The child process in which an embedded server runs. Not thread-safe."""

    def __init__(self, process: subprocess.Popen[bytes], place: Path) -> None:
        self._process = process
        self._place = place
        self.notice = ""
        """What the user must know of the directory: that it cannot be used, or what was deleted in it."""

    @classmethod
    def start(
        cls,
        place: Path,
        listening: socket.socket,
        orders: dict[str, Any],
        *,
        inherited: Sequence[int],
    ) -> ServerProcess:
        """Start a child process and return when it listens.

        Args:
            place: an existing directory for the child's log, and for its state if the orders name no
                "data_dir"; `end` removes it, and so does a start that fails.
            listening: the bound socket that the child takes over. This method closes it.
            orders: see `running.main_of_child`, without "place", "fd" and "path".
            inherited: descriptors that the child keeps open, except on Windows.

        Raises:
            ConfigurationError: the child cannot be started, cannot serve, or does not listen within
                `START_LIMIT_S`; the text has the reason.
        """
        # Close the socket here: otherwise connections would still be accepted after the end of the child.
        with listening:
            try:
                child = cls(_spawn(place, listening, inherited), place)
            except BaseException:
                _remove(place)
                raise
            try:
                child._hand_over({**orders, "place": str(place)}, listening)
                child._await_ready()
            except BaseException:  # also Ctrl-C
                child.end(0)
                raise
        return child

    @property
    def alive(self) -> bool:
        """True while the child process runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The id of the child process."""
        return self._process.pid

    def end(self, limit_s: float) -> None:
        """Tell the child to end, wait for its end, and remove its directory.

        A child that still runs after `limit_s` seconds is killed.
        """
        from subprocess import TimeoutExpired

        with suppress(OSError, ValueError):  # the child has ended, or the pipe is closed
            if self._process.stdin is not None:
                self._process.stdin.write(FAREWELL)
        _close_pipes(self._process)
        try:
            self._process.wait(limit_s)
        except TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _remove(self._place)

    def summarize_exit(self) -> str:
        """Return the error message for a child that has ended by itself, and remove its directory.

        The message has the exit code and the tail of the log.
        """
        code = self._process.wait()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        tail = self._read_log_tail()
        self.end(0)
        return f"the embedded server has ended ({how}); make a new client to start another{tail}"

    def forget(self) -> None:
        """Drop the child in a forked process. Close the copied pipe, which would keep the child alive."""
        _close_pipes(self._process)
        self._process.returncode = 0  # only the parent may wait for it

    def _hand_over(self, orders: dict[str, Any], listening: socket.socket) -> None:
        if os.name == "nt":  # Windows cannot pass descriptors to a child, so the child binds the port again
            listening.close()
        orders["fd"] = None if os.name == "nt" else listening.fileno()
        pipe = self._process.stdin
        assert pipe is not None  # noqa: S101  # opened by _spawn
        with suppress(BrokenPipeError):  # the child has ended; _await_ready finds out why
            orders["path"] = [os.path.abspath(entry) for entry in sys.path]
            pipe.write(json.dumps(orders).encode() + b"\n")
            pipe.flush()

    def _await_ready(self) -> None:
        pipe = self._process.stdout
        assert pipe is not None  # noqa: S101  # opened by _spawn
        watchdog = threading.Timer(START_LIMIT_S, self._process.kill)
        watchdog.name, watchdog.daemon = "tinker-launch", True
        watchdog.start()
        try:
            line = pipe.readline()
        finally:
            watchdog.cancel()
            watchdog.join()
        if not line:
            self._process.kill()
            code = self._process.wait()
            raise ConfigurationError(
                f"the embedded server did not start (exit code {code}){self._read_log_tail()}"
            )
        report = json.loads(line)
        if report["state"] != "ready":
            raise ConfigurationError(f"the embedded server could not be started: {report['message']}")
        self.notice = report["message"]

    def _read_log_tail(self) -> str:
        try:
            text = (self._place / LOG_FILE).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""
        return f". The end of its log:\n{text[-_TAIL_CHARACTERS:]}" if text else ""


def _spawn(place: Path, listening: socket.socket, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    import subprocess

    try:
        with (place / LOG_FILE).open("wb") as log:
            return subprocess.Popen(  # noqa: S603  # this interpreter, with code of this package
                [sys.executable, "-c", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
                cwd=place,  # other users cannot put modules there
                pass_fds=() if os.name == "nt" else (listening.fileno(), *inherited),
                # So that Ctrl-C in a terminal reaches only the program, whose clients need the server to end
                # their sessions.
                start_new_session=True,
            )
    except OSError as problem:
        raise ConfigurationError(f"the embedded server could not be started: {problem}") from problem


def _close_pipes(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()


# ------------------------------------------------------------------------------------------------- key files


_FILE: Final = "server.json"
_ALIVE: Final = "alive"


class Published(NamedTuple):
    """The directory of a server, and the open file whose lock shows that the server runs."""

    place: Path
    alive: BinaryIO


def open_root() -> Path:
    """Return the directory that holds the directories of this user's servers; create it if needed.

    Raises:
        ConfigurationError: another user owns the directory or can read it, or it cannot be created.
    """
    import tempfile

    user = str(os.getuid()) if hasattr(os, "getuid") else "own"
    path = Path(tempfile.gettempdir()) / f"tinker-sync-{user}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be used: {problem.strerror}") from problem
    if hasattr(os, "getuid") and (
        not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077
    ):
        raise ConfigurationError(f"{path} cannot be used: it is not a directory of yours alone")
    return path


def locate(port: int, host: str = HOST) -> Path:
    """Return the path of the directory of the server on a port. The directory need not exist.

    Raises:
        ConfigurationError: see `open_root`.
    """
    return open_root() / (str(port) if host == HOST else f"{port}-{host.replace(':', '_')}")


def publish_record(server: ServerRecord) -> Published:
    """Create the directory of a server with its key file.

    The directory of an earlier server at the same address is replaced, and those of killed servers are
    removed. The record counts for as long as this process, or another one that inherits it, has the file
    `Published.alive` open.

    Raises:
        ConfigurationError: the directory or the file cannot be created.
    """
    _sweep()
    address = urlsplit(server.base_url)
    place = locate(address.port or 0, address.hostname or HOST)
    with ExitStack() as after_failure:
        try:
            _remove(place)  # an earlier server had the same address
            place.mkdir(mode=0o700)
            alive = after_failure.enter_context((place / _ALIVE).open("wb"))
            try_lock(alive)
            tree = {**server._asdict(), "key": server.key.reveal()}
            descriptor = os.open(place / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(tree, file)
        except OSError as problem:
            raise ConfigurationError(f"{place} cannot be used: {problem.strerror}") from problem
        after_failure.pop_all()
    return Published(place, alive)


def find_record(base_url: str) -> ServerRecord | None:
    """Return the record of the running server at a loopback address; None if no key file names it.

    A path in the address makes no difference, because a refused key would hide that the path is wrong.
    """
    address = urlsplit(base_url)
    if address.port is None or not is_loopback(address.hostname or ""):
        return None
    with suppress(ConfigurationError):  # without the directory there is no key, which is no error here
        server = _read_record(locate(address.port, address.hostname or HOST))
        if server is not None and server.base_url == f"{address.scheme}://{address.netloc}":
            return server
    return None


def find_usable(owner: int | None, data_dir: str | None, model: str | None) -> ServerRecord | None:
    """Return the record of a running server with these options, or None if there is none.

    It belongs to the process `owner`, or is one of `serve`.
    """
    for record in map(_read_record, _list_places()):
        if record is not None and (record.owner == owner or record.lasting) and record.has(data_dir, model):
            return record
    return None


def is_listening(base_url: str) -> bool:
    """Return True if a connection to the server at this address succeeds within a second."""
    parts = urlsplit(base_url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1).close()
    except OSError:
        return False
    return True


def _list_places() -> list[Path]:
    try:
        return [path for path in open_root().iterdir() if path.name.partition("-")[0].isdigit()]
    except (OSError, ConfigurationError):
        return []


def _read_record(place: Path) -> ServerRecord | None:
    """Return the record of a running server from its directory; None if there is none, or it was killed."""
    return _parse_record(place) if _is_alive(place) else None


def _is_alive(place: Path) -> bool:
    try:
        with (place / _ALIVE).open("rb") as file:
            return os.name == "nt" or not try_lock(file, shared=True)
    except OSError:
        return False


def _parse_record(place: Path) -> ServerRecord | None:
    try:
        tree = json.loads((place / _FILE).read_text(encoding="utf-8"))
        return ServerRecord(
            str(tree["base_url"]),
            Secret(tree["key"]),
            int(tree["owner"]),
            tree["data_dir"],
            tree["model"],
            bool(tree["lasting"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _remove(place: Path) -> None:
    import shutil

    shutil.rmtree(place, ignore_errors=True)


def _sweep() -> None:
    """Remove the directories of servers that were killed together with their owners."""
    for place in _list_places():
        # A directory without a record is being made.
        if _parse_record(place) is not None and not _is_alive(place):
            _remove(place)
