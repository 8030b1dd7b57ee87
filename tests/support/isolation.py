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


def foreign_settings(names: Iterator[str] | list[str]) -> list[str]:
    """Return those of the names that are settings of the user and could change the result of a test."""
    return [
        name
        for name in names
        if name.upper() in _FOREIGN_SETTINGS or name.upper().startswith(_FOREIGN_PREFIXES)
    ]


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Return True for a package whose extra is not installed, so that pytest skips its doctests."""
    absent = "tinker_sync/ray.py" in collection_path.as_posix() and importlib.util.find_spec("ray") is None
    return True if absent else None


def hold_embedded_server() -> Callable[[], None]:
    """Keep the embedded server of this process when clients close. Return the function that releases it."""
    from tinker_sync import _embedded

    reserved = _embedded.reserve_server()
    held = _embedded.hold_server(reserved.base_url, reserved.key)
    assert held is not None
    return held.release


class _ServerOfExamples:
    """The embedded server that all doctests share, because each would otherwise start its own."""

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


class OffMachine(RuntimeError):
    """An error for a connection to another machine. It is no OSError, after which clients would retry."""


_attempts: list[Any] = []
"""The addresses of other machines that the present test has tried to reach."""


def is_local(address: Any) -> bool:
    """Return True for a socket address of this machine: a path, or a loopback literal or name."""
    if not isinstance(address, tuple):
        return True  # AF_UNIX and other families with such addresses
    host = address[0]
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    except ValueError:
        return False


def _check(address: Any) -> None:
    if not is_local(address):
        _attempts.append(address)
        raise OffMachine(f"a test may not reach {address!r}")


def _stay_on_this_machine(patches: pytest.MonkeyPatch) -> None:
    """Let sockets connect to this machine only, and resolve only names of this machine.

    Names under `.invalid` never resolve, so a test may use them for a failed lookup. An attempt to reach any
    other name or address raises `OffMachine`, and also fails the test at its end, even if the code under test
    has handled the exception.
    """
    real_connect, real_connect_ex = socket.socket.connect, socket.socket.connect_ex
    real_getaddrinfo = socket.getaddrinfo

    def connect(self: socket.socket, address: Any) -> None:
        _check(address)
        real_connect(self, address)

    def connect_ex(self: socket.socket, address: Any) -> int:
        _check(address)
        return real_connect_ex(self, address)

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(host, str):
            host.encode("idna")  # a malformed name is a UnicodeError, as in the real function
        name = host.decode("ascii") if isinstance(host, bytes) else host
        if isinstance(name, str) and name.rstrip(".").endswith(".invalid"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        _check((host, 0))
        return real_getaddrinfo(host, *args, **kwargs)

    patches.setattr(socket.socket, "connect", connect)
    patches.setattr(socket.socket, "connect_ex", connect_ex)
    patches.setattr(socket, "getaddrinfo", getaddrinfo)


class _Surroundings:
    """The environment of all tests of this process: no settings, an empty home, one server for doctests."""

    def __init__(self, homes: Path) -> None:
        self.server = _ServerOfExamples()
        self._homes = homes
        self._numbers = itertools.count()
        self._home: Path | None = None

    def clear(self) -> None:
        """Remove the user's settings. Set a new home directory if a test has written into the present one."""
        for name in foreign_settings(list(os.environ)):
            del os.environ[name]
        os.environ["TINKER_LOCAL_DATA_DIR"] = "temporary"
        if self._home is None or os.environ.get("HOME") != str(self._home) or any(self._home.iterdir()):
            self._home = self._homes / str(next(self._numbers))
            self._home.mkdir()
            os.environ["HOME"] = os.environ["USERPROFILE"] = str(self._home)


@pytest.fixture(scope="session")
def _surroundings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Surroundings]:
    surroundings = _Surroundings(tmp_path_factory.mktemp("homes"))
    with pytest.MonkeyPatch.context() as patches:
        _stay_on_this_machine(patches)
        yield surroundings
    surroundings.server.release()


# The time for a thread to end after the test; on a busy machine it needs a moment.
GRACE_S = 1.0


def our_threads() -> set[threading.Thread]:
    """Return the living threads of the package."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("tinker-")}


@pytest.fixture(autouse=True)
def rules_of_every_test(request: pytest.FixtureRequest, _surroundings: _Surroundings) -> Iterator[None]:
    """Clear the environment before a test, and fail a test that breaks a rule.

    The rules: no connection to another machine, no running thread of the package at the end, and no lock that
    is taken under another one. One fixture checks all rules, because each fixture costs time in every test.
    """
    _surroundings.clear()
    _prepare_example(request.node, _surroundings.server)
    before = our_threads()
    leaf_locks.breaches.clear()
    _attempts.clear()
    yield
    # Clear the facts about servers, because the server of the next test may get the same port.
    handshake = sys.modules.get("tinker_sync.runtime.handshake")
    if handshake is not None:
        handshake._probed.clear()
    complaints = [f"locks are leaves, but {breach}" for breach in leaf_locks.breaches[:1]]
    if left := _threads_left(before):
        names = sorted(thread.name for thread in left)
        complaints.append(f"threads that outlive their test: {', '.join(names)}")
    if _attempts:
        complaints.append(f"the test tried to reach {_attempts!r}")
    if complaints:
        pytest.fail("\n".join(complaints), pytrace=False)


def _prepare_example(item: pytest.Item, server: _ServerOfExamples) -> None:
    """Let doctests share one embedded server. For other tests, stop it."""
    if not isinstance(item, DoctestItem):
        server.release()
        return
    example = item.dtest.docstring
    for optional in ("torch", "opentelemetry.sdk.trace"):
        if f"import tinker_sync, {optional}" in example:
            pytest.importorskip(optional)
    if "ServiceClient" in example:
        server.hold()


def _threads_left(before: set[threading.Thread]) -> set[threading.Thread]:
    """Return the threads of the package that still run some time after the test."""
    pause = threading.Event()
    for _ in range(int(GRACE_S / 0.002)):  # not `join`, which fails for a thread that is just being started
        left = our_threads() - before
        if not left:
            return left
        pause.wait(0.002)
    return our_threads() - before
