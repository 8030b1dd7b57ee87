"""`serve`: a server that stays, in this process."""

from __future__ import annotations

import errno
import ipaddress
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinker_sync._secret import Secret, mask_repr
from tinker_sync.errors import ConfigurationError
from tinker_sync.launch import known
from tinker_sync.launch.server import KnownServer

if TYPE_CHECKING:
    from tinker_sync.local.launch.running import Stop

DEFAULT_DATA_DIR: Final = "~/.tinker/local"
LOOPBACK: Final = "127.0.0.1"


def serve(
    *,
    port: int = 0,
    data_dir: str | Path | None = None,
    model: str | Path | None = None,
    key: str | Secret | None = None,
    json_only: bool = False,
    host: str = LOOPBACK,
    allow_remote: bool = False,
    ready: Callable[[str, Secret], object] | None = None,
    begun: Callable[[Stop], object] | None = None,
) -> None:
    """Run an embedded server until SIGTERM or Ctrl-C.

    Processes of the same user on the same machine find its key by its address, so that
    `ServiceClient(base_url="http://127.0.0.1:PORT")` is enough for them.

    Args:
        port: where to listen; 0 is a free one.
        data_dir: where sessions and checkpoints are kept; None: `~/.tinker/local`. One server at a time.
        model: a Hugging Face directory, offered under its name beside the built-in model.
        key: what clients have to send; None: a random one.
        json_only: be like older servers, which speak JSON alone.
        host: the address to listen on.
        allow_remote: let it be one that other machines reach.
        ready: called with the address and the key once requests are taken.
        begun: given a function that ends the server, for other threads.

    Raises:
        ConfigurationError: something of that cannot be used.
        MissingExtraError: something is not installed that the server needs.
    """
    secret = key if isinstance(key, Secret) else Secret(mask_repr(key) or f"tml-local-{os.urandom(24).hex()}")
    key = None
    _check_host(host, allow_remote)
    from tinker_sync.local.launch.assembly import assembled
    from tinker_sync.local.launch.running import run

    directory = Path(data_dir if data_dir is not None else DEFAULT_DATA_DIR).expanduser().absolute()
    flags = {"json_only": json_only}
    with (
        _Published(secret) as published,
        assembled(directory, key=secret.reveal(), model=model, flags=flags) as app,
    ):

        def listens(actual: int) -> None:
            url = f"http://{_in_url(host)}:{actual}"
            published.at(url)
            if ready is not None:
                ready(url, secret)

        with _as_configuration(host, port):
            run(app, host=host, port=port, ready=listens, begun=begun)


class _Published:
    """The key file of a server, as long as it runs."""

    def __init__(self, key: Secret) -> None:
        self._key = key
        self._place: Path | None = None

    def at(self, url: str) -> None:
        """It listens there. A machine without a place for such files does without."""
        if url.startswith(f"http://{LOOPBACK}:"):
            with suppress(ConfigurationError):
                self._place = known.publish(KnownServer(url, self._key, os.getpid()))

    def __enter__(self) -> _Published:
        return self

    def __exit__(self, *_: object) -> None:
        if self._place is not None:
            shutil.rmtree(self._place, ignore_errors=True)


def _check_host(host: str, allow_remote: bool) -> None:
    if allow_remote or host == "localhost":
        return
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise ConfigurationError(
            f"{host!r} can be reached from other machines, and whoever has the key can use the server; "
            "say so with allow_remote=True (--allow-remote) if that is meant"
        )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextmanager
def _as_configuration(host: str, port: int) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        why = str(problem.strerror or problem)
        if problem.errno == errno.EADDRINUSE:
            why = "another program uses the port; choose another one (--port), or 0 for one that is free"
        raise ConfigurationError(f"{host}:{port} cannot be listened on: {why}") from problem
