"""`base_url="local"`: an embedded server for this process, in a process of its own.

This is the side of the clients. It knows how to start the server and how to end it, and nothing of what the
server does; that is `tinker_sync.local`.

    server   `LocalServer`: its port and key from the beginning, its process from the first request on
    known    key files, by which other processes of the same user find a server's key

A process has one server, shared by its clients. The port is taken and the key drawn when the first client
is made, which takes no time. The server's process starts with the first request. It ends when the last client
is closed or dropped, or when this process ends, however it ends: the server holds the other end of a pipe.
Forked children use their parent's server as long as it is there, and so do those that `multiprocessing`
spawns.

Any thread may come in. Importing this loads nothing heavy: the clients' settings do it.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tinker_sync._secret import Secret
    from tinker_sync.launch.server import LocalServer

LOCAL: Final = "local"
"""What stands in the place of an address."""

_lock = threading.Lock()
_current: LocalServer | None = None  # guarded by _lock


def local_server(*, data_dir: str | None = None, model: str | None = None) -> LocalServer:
    """The server of this process; it is not started by this.

    Args:
        data_dir: where it keeps its state; None: in a directory that goes with it.
        model: a Hugging Face directory to serve; None: the built-in model.

    Raises:
        ConfigurationError: it is in use already, with another directory or model.

    >>> one = local_server()
    >>> one is local_server(), one.base_url.startswith("http://127.0.0.1:")
    (True, True)
    >>> one.stop()
    """
    global _current  # noqa: PLW0603  # there is one for the process
    with _lock:
        if _current is not None and _current.serves(data_dir, model):
            return _current
        from tinker_sync.launch.server import LocalServer, parents_server

        if _current is not None:
            _current.stop()
        _current = parents_server(data_dir, model) or LocalServer(data_dir=data_dir, model=model)
        return _current


def own_server(base_url: str) -> LocalServer | None:
    """The server of this process, if that is its address."""
    with _lock:
        return _current if _current is not None and _current.base_url == base_url else None


def known_key(base_url: str) -> Secret | None:
    """The key of a server of this user on this machine, if that is where one listens."""
    if not base_url.startswith("http://127.0.0.1:"):
        return None
    from tinker_sync.launch import known

    found = known.at(base_url)
    return None if found is None else found.key


def stop_all() -> None:
    """End the server of this process: it is leaving, and its clients have said so."""
    server = _current
    if server is not None:
        server.stop()


def _before_fork() -> None:
    """A client that was made before a fork is used after it, often by several children: let them share."""
    server = _current
    if server is not None:
        server.prepare_fork()


def _after_fork_in_child() -> None:
    global _lock  # noqa: PLW0603  # it may be held by a thread that only the parent has
    _lock = threading.Lock()
    server = _current
    if server is not None:
        server.renew_after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
