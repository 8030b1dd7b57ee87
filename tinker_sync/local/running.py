"""A server in this process: for a user (`serve`), in a child process, for the command line (`main`).

`serve` blocks the thread that calls it. On a loopback address it publishes its key in a file, from which
clients of the same user read it.

The child process of `launch.EmbeddedServer` ends with the process that started it, its owner. The orders of
the owner come through standard input. A line after them tells the server to end. If that input ends without
the line, the owner has died: the server then exits at once, so that the next program, which may be the same
one again, finds the directory free. The main thread serves; the thread `tinker-owner` reads standard input.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tinker_sync._base.secret import Secret, is_loopback
from tinker_sync._base.threads import DaemonThread
from tinker_sync._embedded import DEFAULT_DATA_DIR
from tinker_sync.errors import ConfigurationError, InvalidInputError, TinkerError
from tinker_sync.local import launch
from tinker_sync.local.launch import BUILT_IN_MODEL, HOST, ServerRecord

if TYPE_CHECKING:
    from tinker_sync.local.server.http import Application, Stop

_HIGHEST_PORT: Final = 65_535
SHORTEST_REMOTE_KEY: Final = 16
"""The fewest characters of a key that other machines can try."""


def serve(
    *,
    port: int = 0,
    data_dir: str | Path | None = None,
    model: str | Path | None = None,
    key: str | Secret | None = None,
    json_only: bool = False,
    host: str = HOST,
    allow_remote: bool = False,
    ready: Callable[[str, Secret], object] | None = None,
    begun: Callable[[Stop], object] | None = None,
) -> None:
    """Run an embedded server until SIGTERM, Ctrl-C, or a call of the function that `begun` receives.

    Signals end the server only if the main thread calls this function. With a `host` of this machine alone,
    processes of the same user find the key by the address, so that they need only
    `ServiceClient(base_url="http://127.0.0.1:PORT")`.

    Args:
        port: the port to listen on; 0: a free one.
        data_dir: the directory for sessions and checkpoints, for one server at a time; None:
            `~/.tinker/local`.
        model: a Hugging Face directory to serve, under the name of the directory, beside the built-in model.
        key: the key that clients send; None or empty: a random one.
        json_only: behave like an older server: accept and send JSON only, and lack the newer calls.
        host: the address to listen on.
        allow_remote: allow a `host` that other machines can reach. A `key` then needs 16 characters.
        ready: called with the address and the key once the server accepts requests.
        begun: called before the server listens, with a function that any thread may call to stop the server.

    Raises:
        ConfigurationError: the directory, the model, the host, the port or the key cannot be used.

    >>> serve(host="0.0.0.0")
    Traceback (most recent call last):
    tinker_sync.errors.ConfigurationError: '0.0.0.0' can be reached from other machines...
    """
    from tinker_sync.local.server.http import run

    secret = key if isinstance(key, Secret) else Secret(key or f"tml-local-{os.urandom(24).hex()}")
    _check_host(host, allow_remote, secret)
    if not 0 <= port <= _HIGHEST_PORT:
        raise ConfigurationError(f"port {port}: give 0 to {_HIGHEST_PORT}; 0 stands for a free one")

    directory = Path(data_dir if data_dir is not None else DEFAULT_DATA_DIR).expanduser().absolute()
    flags = {"json_only": json_only}
    models = [BUILT_IN_MODEL, *([] if model is None else [str(model)])]
    with ExitStack() as cleanup, assemble(directory, key=secret.reveal(), models=models, flags=flags) as app:

        def announce(actual: int) -> None:
            url = f"http://{f'[{host}]' if ':' in host else host}:{actual}"
            if is_loopback(host):
                offered = None if model is None else str(Path(model).expanduser().absolute())
                # A server that lacks the newer calls is for those who know its address.
                record = ServerRecord(url, secret, os.getpid(), str(directory), offered, not json_only)
                _publish_key(record, cleanup)
            if ready is not None:
                ready(url, secret)

        with _translate_errors(host, port):
            run(app, host=host, port=port, ready=announce, begun=begun)


def _publish_key(record: ServerRecord, cleanup: ExitStack) -> None:
    """Write the key file of a server on a loopback address, and remove it at the cleanup.

    Without the file, users must pass the key to their clients.
    """
    with suppress(ConfigurationError):
        place, alive = launch.publish_record(record)
        cleanup.callback(alive.close)
        cleanup.callback(shutil.rmtree, place, ignore_errors=True)


def _check_host(host: str, allow_remote: bool, key: Secret) -> None:
    if is_loopback(host):
        return
    if allow_remote and len(key.reveal()) < SHORTEST_REMOTE_KEY:
        raise ConfigurationError(
            f"key: other machines can reach {host!r} and try keys, so a key needs at least "
            f"{SHORTEST_REMOTE_KEY} characters; leave it out for a random one"
        )
    if not allow_remote:
        raise ConfigurationError(
            f"{host!r} can be reached from other machines, where anyone with the key can use the server; "
            "if you want that, set allow_remote=True (--allow-remote)"
        )


@contextmanager
def _translate_errors(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        why = str(problem.strerror or problem)
        if problem.errno == errno.EADDRINUSE:
            why = "another program uses the port; choose another one (--port), or 0 for one that is free"
        raise ConfigurationError(f"{host}:{port} cannot be listened on: {why}") from problem


# ------------------------------------------------------------------------------------------------ one server


_ADVICE: Final = "; name another directory (--data-dir, or TINKER_LOCAL_DATA_DIR for base_url='local')"
KEEP: Final = "name another directory (base_url='local:PATH' or TINKER_LOCAL_DATA_DIR)"


class UnusableDirectory(ConfigurationError):
    """The error for a directory that cannot hold the state of a server."""


@contextmanager
def assemble(
    data_dir: Path,
    *,
    key: str,
    models: Sequence[str],
    flags: Mapping[str, Any] | None = None,
    most_bytes: int | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> Iterator[Application]:
    """Open a store, make a host, yield the application that uses both, and close the store after the block.

    The store keeps the state of the server on disk; the host has the computing threads. The application
    closes the host when it shuts down.

    Args:
        data_dir: the directory for the state of the server.
        key: the key that clients send.
        models: the base models to offer, see `load_base_model`.
        flags: settings of the server, by name, see `tinker_sync.local.server.state`.
        most_bytes: delete the oldest checkpoints beyond this size; None: delete none.
        note: called with a sentence for the user if some were deleted.

    Raises:
        UnusableDirectory: the directory cannot be used.
        ConfigurationError: a model or a setting cannot be used.
    """
    # Imported here because they take most of the time that a server needs to start.
    from tinker_sync.local.engine.host import Host, load_base_model
    from tinker_sync.local.server.app import build
    from tinker_sync.local.server.state import Flags
    from tinker_sync.local.store import Store, StoreError

    try:
        loaded = [load_base_model(name) for name in models]
    except InvalidInputError as problem:
        raise ConfigurationError(str(problem)) from problem
    chosen = Flags.of(**(flags or {}))
    try:
        store = Store(data_dir)
    except StoreError as problem:
        advice = _ADVICE if problem.kind in ("unwritable", "full") else ""
        raise UnusableDirectory(f"{problem}{advice}") from problem
    with store:
        if most_bytes is not None:
            with suppress(StoreError):  # a full disk; the next start tries again
                if deleted := store.prune(most_bytes):
                    note(
                        f"{data_dir} had more than {most_bytes / (1 << 30):g} GiB of checkpoints, so the "
                        f"oldest were deleted: {deleted}; to keep all, {KEEP}"
                    )
        yield build(store, Host(loaded), key=key, flags=chosen)


# ----------------------------------------------------------------------------------------- the child process


_GRACE_S: Final = 5.0
"""The time for work in progress after the owner has told the server to end."""


def main_of_child(orders: dict[str, Any]) -> None:
    """Serve until the owner closes the pipe or ends, or until SIGTERM or SIGINT.

    Report on standard output, once, that the server listens or cannot start.

    Args:
        orders: "place" (the directory of this process, removed at the end), "fd" (the bound socket; None:
            bind "port"), "port", "key", "models", "data_dir" (None: a directory in "place") and, if wanted,
            "or_temporary" (True: use a directory in "place" if "data_dir" cannot be used) and "most_bytes"
            (the most bytes of checkpoints that are kept; the oldest ones go first).
    """
    place = Path(orders["place"])
    report = _StartReport()
    watch = _OwnerWatch(lambda: _abort(place))
    watch.start()
    try:
        _serve_owner(orders, place, report, watch)
    except (TinkerError, ValueError, OSError, ImportError) as problem:
        report.send("failed", str(problem))
    finally:
        _remove_place(place)
    watch.mark_expected_exit()


def _serve_owner(orders: dict[str, Any], place: Path, report: _StartReport, watch: _OwnerWatch) -> None:
    from tinker_sync.local.server.http import run

    descriptor = orders["fd"]
    listening = None if descriptor is None else socket.socket(fileno=descriptor)
    options = {"key": orders["key"], "models": orders["models"]}
    with ExitStack() as parts:
        notices: list[str] = []
        data_dir = Path(orders["data_dir"] or place / "data")
        try:
            most_bytes = orders.get("most_bytes")
            app = parts.enter_context(
                assemble(data_dir, **options, most_bytes=most_bytes, note=notices.append)
            )
        except UnusableDirectory as problem:
            if not orders.get("or_temporary"):
                raise
            notices.append(
                f"the checkpoints of this program's embedded server end with it, because {problem}; "
                f"to keep them, {KEEP}"
            )
            app = parts.enter_context(assemble(place / "data", **options))
        run(
            app,
            host="127.0.0.1",
            port=orders["port"],
            listening=listening,
            ready=lambda _: report.send("ready", "; ".join(notices)),
            begun=watch.on_end,
        )


class _StartReport:
    """A writer of the one line on standard output, which reports the start to the owner.

    From the creation of the writer on, all other output of the process goes to standard error.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = os.dup(1)
        os.dup2(2, 1)

    def send(self, state: str, message: str) -> None:
        """Write the report; `state` is "ready", "missing" (a package) or "failed". Later calls do nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            with suppress(OSError):  # the owner has closed the pipe
                os.write(descriptor, json.dumps({"state": state, "message": message}).encode() + b"\n")
            os.close(descriptor)


class _OwnerWatch:
    """A thread that waits for a line from the owner, and then stops the server. Thread-safe.

    Args:
        abort: called at once if the owner has died, and five seconds after its line unless
            `mark_expected_exit` is called before.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._lock = threading.Lock()
        self._gone = False  # guarded by _lock
        self._stop: Callable[[], None] | None = None  # guarded by _lock
        self._exiting = threading.Event()

    def start(self) -> None:
        """Start the thread that reads standard input."""
        DaemonThread(self._wait, "tinker-owner").start()

    def on_end(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the owner tells the server to end, or now if that has happened."""
        with self._lock:
            self._stop, gone = stop, self._gone
        if gone:
            stop()

    def mark_expected_exit(self) -> None:
        """Record that the main thread has finished, so that `abort` is not called."""
        self._exiting.set()

    def _wait(self) -> None:
        line = b""
        with suppress(OSError):
            line = os.read(0, 1024)
        if not line:  # nobody can ask for the answers to the work in progress
            self._abort()
        with self._lock:
            self._gone, stop = True, self._stop
        if stop is not None:
            stop()
        if not self._exiting.wait(_GRACE_S):
            self._abort()


def _remove_place(place: Path) -> None:
    """Remove the directory of this process. It contains the state unless the orders have a "data_dir"."""
    with suppress(OSError):
        os.chdir(tempfile.gettempdir())
    shutil.rmtree(place, ignore_errors=True)


def _abort(place: Path) -> None:
    """Remove the directory of this process, and exit at once.

    Saved state in a "data_dir" stays whole, because every save is on the disk when it returns.
    """
    _remove_place(place)
    sys.stderr.flush()
    os._exit(1)


# ------------------------------------------------------------------------------------------ the command line


KEY_VARIABLE: Final = "TINKER_LOCAL_KEY"


class Option(NamedTuple):
    """An option of the commands `python -m tinker_sync.local` and `tinker-sync serve`.

    Attributes:
        kind: the type of the value; bool stands for a flag, and a tuple for a choice of its members.
    """

    name: str
    help: str
    kind: Any = str
    default: Any = None


OPTIONS: Final = (
    Option("port", "The port to listen on; 0: a free one.", int, 0),
    Option("data-dir", f"The directory for checkpoints; default: {DEFAULT_DATA_DIR}."),
    Option("model", "A Hugging Face directory to offer beside the built-in model."),
    Option("key", f"The key for clients; other users can see it here: better set {KEY_VARIABLE}."),
    Option("key-file", "A file with the key in its first line."),
    Option("show-key", "Print the key, once, to standard output.", bool, False),
    Option("json-only", "Speak JSON only, as older servers do.", bool, False),
    Option("host", f"The address to listen on; default: {HOST}.", str, HOST),
    Option("allow-remote", "Allow a --host that other machines can reach.", bool, False),
    Option("log", "What to log; default: warning.", ("debug", "info", "warning", "error"), "warning"),
)


def serve_with(options: dict[str, Any], ready: Callable[[str, str | None], object]) -> None:
    """Run a server until a signal ends it.

    Args:
        options: the value of each of `OPTIONS`, by its name with underscores.
        ready: called once the server accepts requests, with the address, and with the key if it is to be
            shown.

    Raises:
        ConfigurationError: the server cannot run.
    """
    given, path = options.pop("key"), options.pop("key_file")
    key = Secret(given) if given else _read_key(path)
    given = None
    log, show_key = options.pop("log"), options.pop("show_key")
    logging.basicConfig(level=log.upper(), format="%(asctime)s %(name)s %(levelname)s %(message)s")
    serve(**options, key=key, ready=lambda url, used: ready(url, used.reveal() if show_key else None))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a server until a signal ends it. Return 0, or 1 if the server cannot run; the problem is printed.

    Args:
        arguments: the command line; None: the command line of this process.

    An address that other machines can reach needs `--allow-remote`:

    >>> main(["--host", "0.0.0.0"])
    1
    """
    parser = argparse.ArgumentParser(
        prog="python -m tinker_sync.local",
        description="Run an embedded server: it trains and samples on this machine.",
    )
    for option in OPTIONS:
        how: dict[str, Any] = {"type": option.kind}
        if option.kind is bool:
            how = {"action": "store_true"}
        elif isinstance(option.kind, tuple):
            how = {"choices": option.kind}
        parser.add_argument(f"--{option.name}", default=option.default, help=option.help, **how)

    def ready(url: str, key: str | None) -> None:
        _print(f"Serving on {url} - Ctrl-C ends it.")
        if key is None:
            _print("Your programs on this machine find the key by the address; --show-key prints it.")
        else:
            sys.stdout.write(f"{key}\n")
            sys.stdout.flush()

    try:
        serve_with(vars(parser.parse_args(arguments)), ready)
    except TinkerError as problem:
        _print(f"Error: {problem}")
        return 1
    return 0


def _read_key(path: str | None) -> Secret | None:
    """Return the key in a file; without a path, the key in `TINKER_LOCAL_KEY`, or None if that is not set.

    Raises:
        ConfigurationError: the file cannot be read or is empty.
    """
    if path is None:
        text = os.environ.get(KEY_VARIABLE, "").strip()
        return Secret(text) if text else None
    try:
        lines = Path(path).read_text(encoding="utf-8").split()
    except (OSError, ValueError) as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem}") from problem
    if not lines:
        raise ConfigurationError(f"{path} is empty")
    return Secret(lines[0])


def _print(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
