"""Samples from many processes of a Ray cluster (extra `ray`).

    pool        `SamplerPool`, `map`: worker processes that sample the prompts of the driver
    worker      the side of such a process
    asking      `RayConnection`: calls of actors, which end with Ray
    data        `Sampler`: a map stage of Ray Data
    sharing     `share_limits`, `cluster_usage`: one rate limit and one count of tokens for the cluster, with
                the board, a named actor that keeps them

Pass a sampling client to tasks and actors as an argument. Its copies in one process share a connection
pool, a poller and a session. The copies carry no key: set `TINKER_API_KEY` where the workers run, for example
with ``ray.init(runtime_env={"env_vars": {...}})``.

Threads: the threads `tinker-ray-N` of a pool wait for its workers; the thread `tinker-board` of each process
follows the board. This package imports Ray at once; the rest of `tinker_sync` does not import it.
"""

from __future__ import annotations

from tinker_sync.errors import ConfigurationError

try:
    import ray as _ray  # noqa: F401  # to raise an error with advice if it is missing
except ImportError as error:
    raise ConfigurationError("tinker_sync.ray needs Ray: pip install 'ray[data]'") from error

from tinker_sync.ray.data import Sampler
from tinker_sync.ray.pool import SamplerPool, map  # noqa: A004  # used as `tinker_sync.ray.map`
from tinker_sync.ray.sharing import cluster_usage, share_limits

__all__ = ["Sampler", "SamplerPool", "cluster_usage", "map", "share_limits"]
