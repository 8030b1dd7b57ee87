"""Module paths from which scripts written for the reference client import, and what only such scripts need.

Each such path is another name of this package or of `public_interfaces`, so every public name can be imported
from it.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync": "APIFuture ExperimentalWarning QueueState RetryConfig",
    "tinker_sync.clients.sampling": "is_retryable_status_code",
    "tinker_sync.lib.names": """
        AwaitableConcurrentFuture _APIFuture _TransportError api_key_console_url checkpoint_console_url
        checkpoint_playground_url combine_fwd_bwd_output_results new_api_key_console_url session_console_url
        sessions_console_url training_run_console_url
    """,
    "tinker_sync.lib.public_interfaces": "",
}

_OTHER_PATHS = "api_future_impl chunked_fwdbwd_helpers console_urls experimental retry_handler"

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES, other_paths=_OTHER_PATHS)
