"""`RestClient`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.clients.rest import RestClient as RestClient

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.clients.rest": ("RestClient",),
}

__all__ = ["RestClient"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
