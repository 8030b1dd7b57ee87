"""Cores that several clients of one process share, and what each client shows of its core."""

from __future__ import annotations

from collections.abc import Callable, Hashable, MutableMapping
from typing import TYPE_CHECKING, Any

from tinker_sync.runtime import _fork
from tinker_sync.runtime.lazy import Shared

if TYPE_CHECKING:
    from tinker_sync.runtime.client_runtime import ClientRuntime


class CoreClient:
    """The base of all clients, each of which has a core."""

    _runtime: ClientRuntime

    def get_telemetry(self) -> Any:
        """Return the telemetry reporter of the service client, or None if telemetry is off.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
        ...     training.get_telemetry() is service.get_telemetry()
        True
        """
        return self._runtime.lifecycle.owned_observer

    @property
    def holder(self) -> ClientRuntime:
        """The core that this client shares with those of its service client, or of its server and key.

        >>> import tinker_sync
        >>> with tinker_sync.ServiceClient(base_url="local") as service:
        ...     rest = tinker_sync.RestClient(service.holder)
        ...     rest.holder is service.holder
        True
        """
        return self._runtime

    def __repr__(self) -> str:
        runtime = getattr(self, "_core", None)  # None if the constructor has failed
        return (
            f"<{type(self).__name__} {runtime.settings.base_url}>" if runtime else f"<{type(self).__name__}>"
        )


class SharedCores:
    """A table with one open core for each place, which is a key such as address and API key. Thread-safe.

    Args:
        cores: the mapping that holds the cores; a dictionary keeps them, and a weak mapping drops those that
            no client uses.
    """

    def __init__(self, cores: MutableMapping[Hashable, ClientRuntime]) -> None:
        self._shared = Shared(
            cores, is_usable=lambda runtime: not runtime.closed, discard=lambda runtime: runtime.close()
        )

    def get(self, place: Hashable, make: Callable[[], ClientRuntime]) -> ClientRuntime:
        """Return the open core of a place. Call `make`, which sends no request, if no core is open."""
        return self._shared.get((place, _fork.generation()), make)
