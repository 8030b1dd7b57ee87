"""`ServiceClient` and how often its sampling clients try."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.clients.retry_config import RetryConfig as RetryConfig
    from tinker_sync.clients.service import ServiceClient as ServiceClient

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.clients.retry_config": ("RetryConfig",),
    "tinker_sync.clients.service": ("ServiceClient",),
}

__all__ = ["RetryConfig", "ServiceClient"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
