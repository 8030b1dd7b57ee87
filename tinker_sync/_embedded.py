"""The interface between clients and the embedded server, which starts with the first request to its URL.

`Settings` asks `reserve_server` for the URL and the key behind the base URL "local". `Http` asks
`hold_server` for the server behind its URL and starts it before it sends a request. At its exit, the process
calls `stop_server`. All other code of the server's process is in `tinker_sync.local`, which loads on first
use.

A process has one embedded server, which its clients share. Reserving it takes a port and draws a key, which
is quick. The first request starts the child process. The child ends when the last client is closed or
dropped, and when this process ends in any way, because the child holds the other end of a pipe. Forked and
`multiprocessing` children use the server of their parent for as long as it runs.

Any thread may call these functions.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tinker_sync._base.secret import Secret
    from tinker_sync.local.launch import EmbeddedServer, ServerHold, ServerRecord

LOCAL: Final = "local"
"""The base URL that stands for the embedded server; `local:PATH` names the directory for its state, too."""
TEMPORARY: Final = "temporary"
"""Stands for a directory that ends with the server. A directory of this name is `./temporary`."""
DEFAULT_DATA_DIR: Final = "~/.tinker/local"

_LOOPBACK: Final = ("http://127.", "http://localhost:", "http://[::1]:")

_lock = threading.Lock()
_current: EmbeddedServer | None = None  # guarded by _lock


def is_local(base_url: str) -> bool:
    """Return True for a base URL that stands for the embedded server.

    >>> is_local("local"), is_local("local:~/runs"), is_local("http://localhost:8000")
    (True, True, False)
    """
    return base_url.partition(":")[0] == LOCAL


def find_data_dir(base_url: str, variable: str | None) -> str | None:
    """Return the directory for the state of the embedded server; None for one that ends with the server.

    Args:
        base_url: "local" or "local:PATH".
        variable: the value of `TINKER_LOCAL_DATA_DIR`.

    >>> find_data_dir("local", None), find_data_dir("local:runs", "x"), find_data_dir("local", "temporary")
    ('~/.tinker/local', 'runs', None)
    """
    given = base_url.partition(":")[2] or variable or DEFAULT_DATA_DIR
    return None if given == TEMPORARY else given


def reserve_server(*, data_dir: str | None = None, model: str | None = None) -> ServerRecord:
    """Return the URL and the key of the server of this process without starting it.

    Args:
        data_dir: the directory for its state; None: a directory that is removed with the server.
        model: a Hugging Face directory to serve beside the built-in model.

    Raises:
        ConfigurationError: the server has another directory or model and is in use, or no port is free.

    >>> reserved = reserve_server()
    >>> reserved == reserve_server(), reserved.base_url.startswith("http://127.0.0.1:")
    (True, True)
    >>> stop_server()
    """
    global _current  # noqa: PLW0603  # one server for the process
    while True:
        found = current_server()
        if found is not None and found.serves(data_dir, model):
            return found.record
        from tinker_sync.local.launch import EmbeddedServer, find_running_server

        made = find_running_server(data_dir, model) or EmbeddedServer(data_dir=data_dir, model=model)
        with _lock:
            kept = _current is found  # else another thread was faster; check its server
            if kept:
                _current = made
        doomed = found if kept else made
        if doomed is not None:
            doomed.stop()
        if kept:
            return made.record


def hold_server(base_url: str, key: Secret | None) -> ServerHold | None:
    """Return a hold (a claim that keeps it running) on the embedded server for a client.

    Return None if the URL belongs to another server. The embedded server runs until every client has released
    its hold. Another program may use the port after the server has ended; a client then gets a hold only if
    it has the key of the embedded server.

    Args:
        base_url: the URL to which the client sends.
        key: the key that the client sends.
    """
    server = current_server()
    if server is None or server.base_url != base_url or not (server.in_use or server.key == key):
        return None
    return server.hold()


def current_server() -> EmbeddedServer | None:
    """Return the server of this process, or None before the first client asks for it."""
    return _current


def find_key(base_url: str) -> Secret | None:
    """Return the key of the server that this user runs at a loopback URL, or None if there is none."""
    server = current_server()
    if server is not None and server.base_url == base_url and server.in_use:
        return server.key
    if not base_url.startswith(_LOOPBACK):
        return None
    from tinker_sync.local.launch import find_record

    record = find_record(base_url)
    return None if record is None else record.key


def stop_server() -> None:
    """Stop the server of this process. Call it at exit, after the clients have ended their sessions."""
    server = _current  # without the lock: a thread that is gone at exit may hold it
    if server is not None:
        server.stop()


def _before_fork() -> None:
    """Start the embedded server before a fork if clients hold it, so the child can share it."""
    server = _current
    if server is not None:
        server.prepare_fork()


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603  # a thread that exists only in the parent may hold it
    _lock = threading.Lock()
    server = _current
    if server is not None:
        server.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
