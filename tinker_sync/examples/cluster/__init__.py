"""Example programs that sample in many processes.

    python -m tinker_sync.examples.cluster.processes      processes; also joblib, Dask and torch
    python -m tinker_sync.examples.cluster.ray_rollouts   reinforcement learning on Ray

Each process gets a copy of a client as an argument. The copy carries no key: its process finds one as a new
client does, in `TINKER_API_KEY` or in the credentials file.
"""
