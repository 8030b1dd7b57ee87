"""The clients, their futures and the handles of losses, under module paths of the reference client."""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync": """
        APIFuture AdminClient LossHandle PerDatumLossFn QueueState RestClient RetryConfig SamplingClient
        ServiceClient TrainingClient
    """,
    "tinker_sync.lib.names": """
        AwaitableConcurrentFuture BackcompatSamplingClientFuture BackcompatTrainingClientFuture
    """,
}

_OTHER_PATHS = """
    admin_client api_future backcompat_sampling_client_future backcompat_training_client_future custom_loss
    rest_client sampling_client service_client training_client
"""

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES, other_paths=_OTHER_PATHS)
