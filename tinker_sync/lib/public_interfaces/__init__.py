"""The clients, their futures and the handles of losses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.clients.rest import AdminClient as AdminClient
    from tinker_sync.clients.rest import RestClient as RestClient
    from tinker_sync.clients.retry_config import RetryConfig as RetryConfig
    from tinker_sync.clients.sampling import SamplingClient as SamplingClient
    from tinker_sync.clients.service import ServiceClient as ServiceClient
    from tinker_sync.clients.training import TrainingClient as TrainingClient
    from tinker_sync.lib.other_names import AwaitableConcurrentFuture as AwaitableConcurrentFuture
    from tinker_sync.lib.other_names import BackcompatSamplingClientFuture as BackcompatSamplingClientFuture
    from tinker_sync.lib.other_names import BackcompatTrainingClientFuture as BackcompatTrainingClientFuture
    from tinker_sync.losses.handle import LossHandle as LossHandle
    from tinker_sync.losses.handle import PerDatumLossFn as PerDatumLossFn
    from tinker_sync.runtime.futures import APIFuture as APIFuture

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync": (
        "APIFuture",
        "AdminClient",
        "LossHandle",
        "PerDatumLossFn",
        "RestClient",
        "RetryConfig",
        "SamplingClient",
        "ServiceClient",
        "TrainingClient",
    ),
    "tinker_sync.lib.other_names": (
        "AwaitableConcurrentFuture",
        "BackcompatSamplingClientFuture",
        "BackcompatTrainingClientFuture",
    ),
}
_OTHER_PATHS = (
    "admin_client",
    "api_future",
    "backcompat_sampling_client_future",
    "backcompat_training_client_future",
    "custom_loss",
    "rest_client",
    "sampling_client",
    "service_client",
    "training_client",
)

__all__ = [
    "APIFuture",
    "AdminClient",
    "AwaitableConcurrentFuture",
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "LossHandle",
    "PerDatumLossFn",
    "RestClient",
    "RetryConfig",
    "SamplingClient",
    "ServiceClient",
    "TrainingClient",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES, other_paths=_OTHER_PATHS)
