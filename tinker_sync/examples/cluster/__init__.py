"""Example programs that sample in many processes. Each is under sixty lines, except the last.

    python -m tinker_sync.examples.cluster.processes      processes of this machine
    python -m tinker_sync.examples.cluster.joblib_lots    workers of joblib
    python -m tinker_sync.examples.cluster.dask_lots      `client.map` of Dask
    python -m tinker_sync.examples.cluster.data_loader    workers of a torch DataLoader
    python -m tinker_sync.examples.cluster.ray_rollouts   reinforcement learning on Ray

They have the options of the other examples. Each process gets a client as an argument. The copies carry no
key: a process finds it as a new client does, in `TINKER_API_KEY` or in the credentials file.
"""
