"""The environment of every test and doctest of the suite.

No test sees the user's own configuration, none reaches another machine, and none leaves a thread of the
client running. `tests/conftest.py` registers this module as a plugin, so its fixtures also cover the doctests
inside the package.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import itertools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.doctest import DoctestItem
from support import leaf_locks

# Read by the package, by requests, by the TLS stack or by the tokenizer library.
_FOREIGN_SETTINGS = frozenset(
    {
        "ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY",
        "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE",
        "NETRC", "XDG_CONFIG_HOME", "XDG_CACHE_HOME",
    }
)  # fmt: skip
_FOREIGN_PREFIXES = ("TINKER_", "HF_", "HUGGINGFACE_", "CLOUDFLARE_ACCESS_")

_home_numbers = itertools.count()


def foreign_settings(names: Iterator[str] | list[str]) -> list[str]:
    """Return the environment variables that would let the user's own configuration into a test."""
    return [
        name
        for name in names
        if name.upper() in _FOREIGN_SETTINGS or name.upper().startswith(_FOREIGN_PREFIXES)
    ]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the examples of a room whose extra is not installed."""
    absent = "tinker_sync/ray/" in collection_path.as_posix() and importlib.util.find_spec("ray") is None
    return True if absent else None


@pytest.fixture(autouse=True)
def strangers_at_known_addresses() -> Iterator[None]:
    """Forget the facts about servers: the server of the next test may get the same port."""
    yield
    introduction = sys.modules.get("tinker_sync.runtime.introduction")
    if introduction is not None:
        introduction._probed.clear()


@pytest.fixture(scope="session")
def _homes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return tmp_path_factory.mktemp("homes")


@pytest.fixture(autouse=True)
def isolated_environment(monkeypatch: pytest.MonkeyPatch, _homes: Any) -> None:
    """An environment without settings of the client or the network stack, and an empty home directory."""
    for name in foreign_settings(list(os.environ)):
        monkeypatch.delenv(name)
    home = _homes / str(next(_home_numbers))
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("USERPROFILE", str(home))


def hold_embedded_server() -> Callable[[], None]:
    """Keep the embedded server of this process when clients close. Return the function that releases it."""
    from tinker_sync import _embedded

    reserved = _embedded.reserve_server()
    held = _embedded.hold_server(reserved.base_url, reserved.key)
    assert held is not None
    return held.release


class _ServerOfExamples:
    """The embedded server that doctests share, so that each does not start its own."""

    def __init__(self) -> None:
        self._let_go: Callable[[], None] | None = None

    def hold(self) -> None:
        """Keep the server that the clients of examples start, until `release`."""
        if self._let_go is None:
            self._let_go = hold_embedded_server()

    def release(self) -> None:
        """Stop the server."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


@pytest.fixture(scope="session")
def _server_of_examples() -> Iterator[_ServerOfExamples]:
    server = _ServerOfExamples()
    yield server
    server.release()


@pytest.fixture(autouse=True)
def one_server_for_examples(
    request: pytest.FixtureRequest, isolated_environment: None, _server_of_examples: _ServerOfExamples
) -> None:
    """Examples in docstrings share one embedded server. Other tests find none of this process."""
    del isolated_environment
    if not isinstance(request.node, DoctestItem):
        _server_of_examples.release()
        return
    example = request.node.dtest.docstring
    if "import tinker_sync, torch" in example:
        pytest.importorskip("torch")
    if "ServiceClient" in example:
        _server_of_examples.hold()


class OffMachine(RuntimeError):
    """A test tried to reach something other than this machine. Not an OSError: no retry may swallow it."""


def is_local(address: Any) -> bool:
    """Return True for a socket address of this machine: a path, or a loopback literal or name."""
    if not isinstance(address, tuple):
        return True  # AF_UNIX and friends
    host = address[0]
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sockets connect to this machine only, and only its own names resolve.

    Names under `.invalid` never resolve anywhere, so a test may use them to see how a failed lookup is
    handled. Anything else fails the test at its end too, should the code under test swallow the exception.
    """
    attempts: list[Any] = []

    def check(address: Any) -> None:
        if not is_local(address):
            attempts.append(address)
            raise OffMachine(f"a test may not reach {address!r}")

    real_connect, real_connect_ex = socket.socket.connect, socket.socket.connect_ex
    real_getaddrinfo = socket.getaddrinfo

    def connect(self: socket.socket, address: Any) -> None:
        check(address)
        real_connect(self, address)

    def connect_ex(self: socket.socket, address: Any) -> int:
        check(address)
        return real_connect_ex(self, address)

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode("ascii") if isinstance(host, bytes) else host
        if isinstance(name, str) and name.rstrip(".").endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        check((host, 0))
        return real_getaddrinfo(host, *args, **kwargs)

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket.socket, "connect_ex", connect_ex)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield
    if attempts:
        pytest.fail(f"the test tried to reach {attempts!r}", pytrace=False)


# A thread that is about to end may need a moment, the more so on a busy machine.
GRACE_S = 1.0


def our_threads() -> set[threading.Thread]:
    """Threads of the package that are alive now."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tinker-")}


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Iterator[None]:
    """A test stops and joins every thread that it starts."""
    before = our_threads()
    yield
    pause = threading.Event()
    for _ in range(int(GRACE_S / 0.002)):  # not `join`: one that is just being started cannot be joined yet
        left = our_threads() - before
        if not left:
            return
        pause.wait(0.002)
    left = our_threads() - before
    if left:
        names = sorted(thread.name for thread in left)
        pytest.fail(f"threads that outlive their test: {', '.join(names)}", pytrace=False)


@pytest.fixture(autouse=True)
def locks_are_leaves() -> Iterator[None]:
    """No lock of the package is taken under another one, and no future ends under one."""
    leaf_locks.breaches.clear()
    yield
    if leaf_locks.breaches:
        pytest.fail(f"locks are leaves, but {leaf_locks.breaches[0]}", pytrace=False)
