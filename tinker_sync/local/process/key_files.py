"""Key files: the address and the key of a running server, in a directory that is named by its port.

`EmbeddedServer` and `serve` publish them. A process that knows only the address of a server, from a pickled
client or from its user, reads the key from a key file. A user who may read the file may use the server. Each
user has one directory that holds all these directories. It is in the temporary directory of the machine, and
only its user can open it.

Any thread and any process of the user may call these functions. They start and stop no server.
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
from tinker_sync.local.process.server import ServerRecord

_FILE: Final = "server.json"


def open_root() -> Path:
    """Return the directory that holds the directories of this user's servers; create it if needed.

    Raises:
        ConfigurationError: another user owns the directory or can read it, or it cannot be created.
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


def locate(port: int) -> Path:
    """Return the path of the directory of the server on a port. The directory need not exist.

    Raises:
        ConfigurationError: see `open_root`.
    """
    return open_root() / str(port)


def publish(server: ServerRecord) -> Path:
    """Create the directory of a server with its key file, and return the directory.

    The directory of an earlier server at the same port is replaced. The directories of servers that were
    killed together with their owners are removed, except on Windows.

    Raises:
        ConfigurationError: the directory or the file cannot be created.
    """
    _sweep()
    place = locate(urlsplit(server.base_url).port or 0)
    try:
        shutil.rmtree(place, ignore_errors=True)  # an earlier server had the same port
        place.mkdir(mode=0o700)
        tree = {**server._asdict(), "key": server.key.reveal()}
        descriptor = os.open(place / _FILE, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(tree, file)
    except OSError as problem:
        raise ConfigurationError(f"{place} cannot be used: {problem.strerror}") from problem
    return place


def find(base_url: str) -> ServerRecord | None:
    """Return the record of the server at an address; None if no key file names the address."""
    port = urlsplit(base_url).port
    if port is None:
        return None
    with suppress(ConfigurationError):  # without the directory there is no key, which is no error here
        server = _read(locate(port))
        if server is not None and server.base_url == base_url:
            return server
    return None


def find_owned_by(pid: int) -> ServerRecord | None:
    """Return the record of a server that belongs to a process; None if no key file names the process."""
    records = (_read(place) for place in _list_places())
    return next((record for record in records if record is not None and record.owner == pid), None)


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
        return [path for path in open_root().iterdir() if path.name.isdigit()]
    except (OSError, ConfigurationError):
        return []


def _read(place: Path) -> ServerRecord | None:
    try:
        tree = json.loads((place / _FILE).read_text(encoding="utf-8"))
        return ServerRecord(
            str(tree["base_url"]), Secret(tree["key"]), int(tree["owner"]), tree["data_dir"], tree["model"]
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _sweep() -> None:
    """Remove the directories of servers that were killed together with their owners; not on Windows."""
    if os.name == "nt":  # os.kill(pid, 0) would end the process there
        return
    for place in _list_places():
        server = _read(place)
        if server is None:  # another process may remove the directory at the same time
            continue
        try:
            os.kill(server.owner, 0)
        except ProcessLookupError:
            if not is_listening(server.base_url):
                shutil.rmtree(place, ignore_errors=True)
        except PermissionError:  # a process of another user has the process id now
            pass
