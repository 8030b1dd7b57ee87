"""The embedded server as a process: the end that starts, finds and stops it.

    server      `EmbeddedServer`: its address and key, and its process from the first request on
    process     `ServerProcess`: start the child process, wait for its report, end it
    key_files   key files, by which other processes of the same user find the key of a server

`tinker_sync.local.launch` is the other end: the code that runs in the child process. `base_url="local"`,
`tinker_sync.testing.LocalServer(process=True)` and pickled clients all come through here. This room knows
nothing about what the server computes.

A process has one embedded server, which its clients share. Creating the first client takes a port and draws a
key, which is quick. The first request starts the child process. The child ends when the last client is closed
or dropped, and when this process ends in any way, because the child holds the other end of a pipe. Forked and
`multiprocessing` children use the server of their parent for as long as it runs.

Any thread may call these functions. Importing this package loads nothing heavy, because the settings of every
client import it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tinker_sync._secret import Secret
    from tinker_sync.launch.server import EmbeddedServer

LOCAL: Final = "local"
"""The base URL that asks for the embedded server."""

_lock = threading.Lock()
_current: EmbeddedServer | None = None  # guarded by _lock


def get_server(*, data_dir: str | None = None, model: str | None = None) -> EmbeddedServer:
    """Return the server of this process without starting it.

    Args:
        data_dir: the directory for its state; None: a directory that is removed with the server.
        model: a Hugging Face directory to serve beside the built-in model.

    Raises:
        ConfigurationError: the server is in use with another directory or model.

    >>> server = get_server()
    >>> server is get_server(), server.base_url.startswith("http://127.0.0.1:")
    (True, True)
    >>> server.stop()
    """
    global _current  # noqa: PLW0603  # one server for the process
    while True:
        found = current_server()
        if found is not None and found.serves(data_dir, model):
            return found
        from tinker_sync.launch.server import EmbeddedServer, find_parent_server

        made = find_parent_server(data_dir, model) or EmbeddedServer(data_dir=data_dir, model=model)
        with _lock:
            kept = _current is found  # else another thread was faster; look at its server
            if kept:
                _current = made
        doomed = found if kept else made
        if doomed is not None:
            doomed.stop()
        if kept:
            return made


def current_server() -> EmbeddedServer | None:
    """Return the server of this process, or None before the first client asks for it."""
    with _lock:
        return _current


def find_own_server(base_url: str) -> EmbeddedServer | None:
    """Return the server of this process if `base_url` is its address.

    Another program may have the port of a server that was stopped and has no clients left.
    """
    server = current_server()
    return server if server is not None and server.base_url == base_url and server.in_use else None


def find_key(base_url: str) -> Secret | None:
    """Return the key of this user's server at a loopback address, or None if there is no key file for it."""
    if not base_url.startswith("http://127.0.0.1:"):
        return None
    from tinker_sync.launch import key_files

    record = key_files.find(base_url)
    return None if record is None else record.key


def stop_server() -> None:
    """Stop the server of this process. Call it at exit, after the clients have ended their sessions."""
    server = _current  # without the lock: a thread that is gone at exit may hold it
    if server is not None:
        server.stop()


def _before_fork() -> None:
    """Start a server that clients hold, so that the children of this process can share it."""
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
