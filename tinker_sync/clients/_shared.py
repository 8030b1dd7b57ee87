"""Runtimes that several clients of one process share, and what each client shows of its runtime."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import TYPE_CHECKING

from tinker_sync.runtime import _fork
from tinker_sync.runtime.lazy import Shared

if TYPE_CHECKING:
    from tinker_sync.runtime.client_runtime import ClientRuntime


class BaseClient:
    """The base class of all clients, which gives access to the client's runtime."""

    _runtime: ClientRuntime

    def get_telemetry(self) -> None:
        """Return None, because this client reports nothing to the service. Existing scripts use this name.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     service.get_telemetry()
        """

    @property
    def holder(self) -> ClientRuntime:
        """The runtime of this client: its connections, its threads and its session.

        All clients of one service client share a runtime. So do all REST clients that are made without a
        service client, for the same server and key.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     rest = tinker_sync.RestClient(service.holder)
        ...     rest.holder is service.holder
        True
        """
        return self._runtime

    def __repr__(self) -> str:
        runtime = getattr(self, "_runtime", None)  # None if the constructor has failed
        address = f" {runtime.settings.base_url}" if runtime else ""
        return f"<{type(self).__name__}{address}>"


class SharedRuntimes:
    """A table with one open runtime for each place. Thread-safe.

    A place is a key of the table, such as an address with an API key.

    Args:
        runtimes: the mapping that holds the runtimes; a dictionary keeps them, and a weak mapping drops those
            that no client uses.
    """

    def __init__(self, runtimes: MutableMapping[Hashable, ClientRuntime]) -> None:
        self._shared = Shared(
            runtimes, is_usable=lambda runtime: not runtime.closed, discard=lambda runtime: runtime.close()
        )

    def get(self, place: Hashable, make: Callable[[], ClientRuntime]) -> ClientRuntime:
        """Return the open runtime of a place. Call `make`, which sends no request, if no runtime is open."""
        return self._shared.get((place, _fork.generation()), make)
