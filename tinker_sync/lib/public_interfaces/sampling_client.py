"""`SamplingClient` and how often it tries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.clients.retry_config import RetryConfig as RetryConfig
    from tinker_sync.clients.sampling import SamplingClient as SamplingClient

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.clients.retry_config": ("RetryConfig",),
    "tinker_sync.clients.sampling": ("SamplingClient",),
}

__all__ = ["RetryConfig", "SamplingClient"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
