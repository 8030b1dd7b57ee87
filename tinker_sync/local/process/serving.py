"""`serve`: an embedded server that a user starts, in this process, until a signal or another thread ends it.

`serve` blocks the thread that calls it. On a loopback address it publishes its key in a file, from which
clients of the same user read it.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tinker_sync._base.secret import Secret
from tinker_sync._embedded import DEFAULT_DATA_DIR
from tinker_sync.errors import ConfigurationError
from tinker_sync.local.process import key_files
from tinker_sync.local.process.server import BUILT_IN_MODEL, ServerRecord

if TYPE_CHECKING:
    from tinker_sync.local.process.running import Stop

LOOPBACK: Final = key_files.HOST
SHORTEST_REMOTE_KEY: Final = 16
"""The fewest characters of a key that other machines can try."""


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
    secret = key if isinstance(key, Secret) else Secret(key or f"tml-local-{os.urandom(24).hex()}")
    _check_host(host, allow_remote, secret)
    from tinker_sync.local.process.assembly import assemble
    from tinker_sync.local.process.running import run

    directory = Path(data_dir if data_dir is not None else DEFAULT_DATA_DIR).expanduser().absolute()
    flags = {"json_only": json_only}
    models = [BUILT_IN_MODEL, *([] if model is None else [str(model)])]
    with ExitStack() as cleanup, assemble(directory, key=secret.reveal(), models=models, flags=flags) as app:

        def announce(actual: int) -> None:
            url = f"http://{f'[{host}]' if ':' in host else host}:{actual}"
            if key_files.is_loopback(host):
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
        place, alive = key_files.publish(record)
        cleanup.callback(alive.close)
        cleanup.callback(shutil.rmtree, place, ignore_errors=True)


def _check_host(host: str, allow_remote: bool, key: Secret) -> None:
    if key_files.is_loopback(host):
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
