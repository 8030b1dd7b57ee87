"""Samples from many processes of a Ray cluster (extra `ray`).

    pool        `SamplerPool`, `map`: prompts of the driver go to worker processes, responses come back
    data        `Sampler`: a map stage of Ray Data
    sharing     `share_limits`, `cluster_usage`: one rate limit and one count of tokens for the cluster
    board       the named actor behind them

A sampling client goes into tasks and actors as an argument. Its copies in one process share a connection
pool, a poller and a session. The copies carry no key: set `TINKER_API_KEY` where the workers run, for example
with ``ray.init(runtime_env={"env_vars": {...}})``.

Threads: `tinker-ray-N` of a pool wait for its workers; `tinker-board` of each process follows the board.
This package imports Ray when it is imported; the rest of `tinker_sync` does not.
"""

from __future__ import annotations

from tinker_sync.errors import ConfigurationError

try:
    import ray as _ray  # noqa: F401  # its absence gets an error with advice
except ImportError as error:
    raise ConfigurationError("tinker_sync.ray needs Ray: pip install 'tinker-sync[ray]'") from error

from tinker_sync.ray.data import Sampler
from tinker_sync.ray.pool import SamplerPool, map  # noqa: A004  # used as `tinker_sync.ray.map`
from tinker_sync.ray.sharing import cluster_usage, share_limits

__all__ = ["Sampler", "SamplerPool", "cluster_usage", "map", "share_limits"]
