"""`assemble`: the application of an embedded server, with its store (the state) and host (the threads)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tinker_sync.errors import ConfigurationError, InvalidInputError

if TYPE_CHECKING:
    from tinker_sync.local.server.http1 import Asgi

_ADVICE: Final = "; name another directory (--data-dir, or TINKER_LOCAL_DATA_DIR for base_url='local')"
KEEP: Final = "name another directory (base_url='local:PATH' or TINKER_LOCAL_DATA_DIR)"


class UnusableDirectory(ConfigurationError):
    """The error for a directory that cannot hold the state of a server."""


@contextmanager
def assemble(
    data_dir: Path,
    *,
    key: str,
    models: Sequence[str],
    flags: Mapping[str, Any] | None = None,
    most_bytes: int | None = None,
    note: Callable[[str], object] = lambda _: None,
) -> Iterator[Asgi]:
    """Open a store, make a host, yield the application that uses both, and close the store after the block.

    The store keeps the state of the server on disk; the host has the computing threads. The application
    closes the host when it shuts down.

    Args:
        data_dir: the directory for the state of the server.
        key: the key that clients send.
        models: the base models to offer, see `load_base_model`.
        flags: settings of the server, by name, see `tinker_sync.local.server.flags`.
        most_bytes: delete the oldest checkpoints beyond this size; None: delete none.
        note: called with a sentence for the user if some were deleted.

    Raises:
        UnusableDirectory: the directory cannot be used.
        ConfigurationError: a model or a setting cannot be used.
    """
    # Imported here because they take most of the time that a server needs to start.
    from tinker_sync.local.host.host import Host
    from tinker_sync.local.process.models import load_base_model
    from tinker_sync.local.server.app import build
    from tinker_sync.local.server.flags import Flags
    from tinker_sync.local.store import Store, StoreError

    try:
        loaded = [load_base_model(name) for name in models]
    except InvalidInputError as problem:
        raise ConfigurationError(str(problem)) from problem
    chosen = Flags.of(**(flags or {}))
    try:
        store = Store(data_dir)
    except StoreError as problem:
        advice = _ADVICE if problem.kind in ("unwritable", "full") else ""
        raise UnusableDirectory(f"{problem}{advice}") from problem
    with store:
        if most_bytes is not None:
            with suppress(StoreError):  # a full disk; the next start tries again
                if deleted := store.prune(most_bytes):
                    note(
                        f"{data_dir} had more than {most_bytes / (1 << 30):g} GiB of checkpoints, so the "
                        f"oldest were deleted: {deleted}; to keep all, {KEEP}"
                    )
        yield build(store, Host(loaded), key=key, flags=chosen)
