"""Names of the reference client for objects that have another name, or no separate name, in this package."""

from __future__ import annotations

from tinker_sync.clients.sampling import SamplingClient as BackcompatSamplingClientFuture
from tinker_sync.clients.training import TrainingClient as BackcompatTrainingClientFuture
from tinker_sync.errors import APIConnectionError as _TransportError
from tinker_sync.runtime.answers import merge_outputs as combine_fwd_bwd_output_results
from tinker_sync.runtime.futures import APIFuture as _APIFuture
from tinker_sync.types._console import api_key_url as api_key_console_url
from tinker_sync.types._console import checkpoint_url as checkpoint_console_url
from tinker_sync.types._console import new_api_key_url as new_api_key_console_url
from tinker_sync.types._console import playground_url as checkpoint_playground_url
from tinker_sync.types._console import session_url as session_console_url
from tinker_sync.types._console import sessions_url as sessions_console_url
from tinker_sync.types._console import training_run_url as training_run_console_url

__all__ = [
    "BackcompatSamplingClientFuture",
    "BackcompatTrainingClientFuture",
    "_APIFuture",
    "_TransportError",
    "api_key_console_url",
    "checkpoint_console_url",
    "checkpoint_playground_url",
    "combine_fwd_bwd_output_results",
    "new_api_key_console_url",
    "session_console_url",
    "sessions_console_url",
    "training_run_console_url",
]
