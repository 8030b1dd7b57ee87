"""The clients, their futures and handles of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.clients.rest import AdminClient as AdminClient
    from tinker_sync.clients.rest import RestClient as RestClient
    from tinker_sync.clients.sampling import SamplingClient as SamplingClient
    from tinker_sync.clients.service import ServiceClient as ServiceClient
    from tinker_sync.clients.training import TrainingClient as TrainingClient
    from tinker_sync.lib.public_interfaces.api_future import APIFuture as APIFuture
    from tinker_sync.lib.public_interfaces.api_future import (
        AwaitableConcurrentFuture as AwaitableConcurrentFuture,
    )
    from tinker_sync.losses.handle import LossHandle as LossHandle
    from tinker_sync.losses.handle import PerDatumLossFn as PerDatumLossFn

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.clients.rest": (
        "AdminClient",
        "RestClient",
    ),
    "tinker_sync.clients.sampling": ("SamplingClient",),
    "tinker_sync.clients.service": ("ServiceClient",),
    "tinker_sync.clients.training": ("TrainingClient",),
    "tinker_sync.lib.public_interfaces.api_future": (
        "APIFuture",
        "AwaitableConcurrentFuture",
    ),
    "tinker_sync.losses.handle": (
        "LossHandle",
        "PerDatumLossFn",
    ),
}

__all__ = [
    "APIFuture",
    "AdminClient",
    "AwaitableConcurrentFuture",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
