"""Key files: who may read them may use the server. One directory a server, named by its port.

They let a process that got an address, with a pickled client, in a handle or from its user, find the key that
belongs to it. The directories lie in one of this user's own, closed to others, under the machine's directory
for temporary files.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from tinker_sync._secret import Secret
from tinker_sync.errors import ConfigurationError
from tinker_sync.launch.server import KnownServer

_FILE: Final = "server.json"


def root() -> Path:
    """The directory of this user's servers. Closed to everybody else.

    Raises:
        ConfigurationError: somebody else has made it, or it cannot be made.
    """
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


def place_of(port: int) -> Path:
    """The directory of the server on a port."""
    return root() / str(port)


def publish(server: KnownServer) -> Path:
    """Make the directory of a server that has this port now, with its key file, and give it.

    Raises:
        ConfigurationError: it cannot be made.
    """
    _sweep()
    place = place_of(urlsplit(server.base_url).port or 0)
    try:
        shutil.rmtree(place, ignore_errors=True)  # of one that had the port before
        place.mkdir(mode=0o700)
        tree = {
            "base_url": server.base_url,
            "key": server.key.reveal(),
            "owner": server.owner,
            "data_dir": server.data_dir,
            "model": server.model,
        }
        descriptor = os.open(place / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(tree, file)
    except OSError as problem:
        raise ConfigurationError(f"{place} cannot be used: {problem.strerror}") from problem
    return place


def at(base_url: str) -> KnownServer | None:
    """The server at an address."""
    port = urlsplit(base_url).port
    server = None if port is None else _read(_quiet_root() / str(port))
    return server if server is not None and server.base_url == base_url else None


def of_owner(owner: int) -> KnownServer | None:
    """The server of a process."""
    for place in _places():
        server = _read(place)
        if server is not None and server.owner == owner:
            return server
    return None


def _quiet_root() -> Path:
    try:
        return root()
    except ConfigurationError:  # who only looks is not told
        return Path(tempfile.gettempdir()) / "tinker-sync-nobody"


def _places() -> list[Path]:
    try:
        return [path for path in _quiet_root().iterdir() if path.name.isdigit()]
    except OSError:
        return []


def _read(place: Path) -> KnownServer | None:
    try:
        tree = json.loads((place / _FILE).read_text(encoding="utf-8"))
        return KnownServer(
            str(tree["base_url"]), Secret(tree["key"]), int(tree["owner"]), tree["data_dir"], tree["model"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sweep() -> None:
    """Remove what servers have left that were killed together with their owners."""
    if os.name == "nt":  # where asking for a process would end it
        return
    for place in _places():
        server = _read(place)
        with suppress(PermissionError, FileNotFoundError):  # another process may sweep, too
            if server is None or place.stat().st_uid != os.getuid():
                continue
            try:
                os.kill(server.owner, 0)
            except ProcessLookupError:
                if not answers(server.base_url):
                    shutil.rmtree(place, ignore_errors=True)


def answers(base_url: str) -> bool:
    """Whether anybody listens at an address of this machine."""
    parts = urlsplit(base_url)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=1).close()
    except OSError:
        return False
    return True
