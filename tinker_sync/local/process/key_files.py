"""Key files: the address and the key of a running server, in a directory that is named by its address.

`EmbeddedServer` and `serve` publish them. A process that knows only the address of a server, from a pickled
client or from its user, reads the key from a key file. A user who may read the file may use the server. Each
user has one directory that holds all these directories. It is in the temporary directory of the machine, and
only its user can open it.

A server holds a lock on a file in its directory for as long as it runs. A record without this lock is of a
server that was killed, and does not count: another program may have its port by now. On Windows, which cannot
hand an open file to a server, every record counts.

Any thread and any process of the user may call these functions. They start and stop no server.
"""

from __future__ import annotations

import ipaddress
import json
import os
import shutil
import socket
import stat
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple
from urllib.parse import urlsplit

from tinker_sync._base.secret import Secret
from tinker_sync.errors import ConfigurationError
from tinker_sync.local.locks import try_lock
from tinker_sync.local.process.server import ServerRecord

_FILE: Final = "server.json"
_ALIVE: Final = "alive"
HOST: Final = "127.0.0.1"


class Published(NamedTuple):
    """The directory of a server, and the open file whose lock shows that the server runs."""

    place: Path
    alive: BinaryIO


def is_loopback(host: str) -> bool:
    """Return True for a host that only this machine reaches.

    >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


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


def locate(port: int, host: str = HOST) -> Path:
    """Return the path of the directory of the server on a port. The directory need not exist.

    Raises:
        ConfigurationError: see `open_root`.
    """
    return open_root() / (str(port) if host == HOST else f"{port}-{host.replace(':', '_')}")


def publish(server: ServerRecord) -> Published:
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
            shutil.rmtree(place, ignore_errors=True)  # an earlier server had the same address
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


def find(base_url: str) -> ServerRecord | None:
    """Return the record of the running server at a loopback address; None if no key file names it.

    A path in the address makes no difference, because a refused key would hide that the path is wrong.
    """
    address = urlsplit(base_url)
    if address.port is None or not is_loopback(address.hostname or ""):
        return None
    with suppress(ConfigurationError):  # without the directory there is no key, which is no error here
        server = _read(locate(address.port, address.hostname or HOST))
        if server is not None and server.base_url == f"{address.scheme}://{address.netloc}":
            return server
    return None


def find_usable(owner: int | None, data_dir: str | None, model: str | None) -> ServerRecord | None:
    """Return the record of a running server with these options, or None if there is none.

    It belongs to the process `owner`, or is one of `serve`.
    """
    for record in map(_read, _list_places()):
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


def _read(place: Path) -> ServerRecord | None:
    """Return the record of a running server from its directory; None if there is none, or it was killed."""
    return _parse(place) if _is_alive(place) else None


def _is_alive(place: Path) -> bool:
    try:
        with (place / _ALIVE).open("rb") as file:
            return os.name == "nt" or not try_lock(file, shared=True)
    except OSError:
        return False


def _parse(place: Path) -> ServerRecord | None:
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


def _sweep() -> None:
    """Remove the directories of servers that were killed together with their owners."""
    for place in _list_places():
        # A directory without a record is being made.
        if _parse(place) is not None and not _is_alive(place):
            shutil.rmtree(place, ignore_errors=True)
