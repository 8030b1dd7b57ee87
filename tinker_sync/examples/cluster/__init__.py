"""Example programs that sample in many processes. Each is under sixty lines, except the last.

    python -m tinker_sync.examples.cluster.processes      processes of this machine
    python -m tinker_sync.examples.cluster.joblib_lots    workers of joblib
    python -m tinker_sync.examples.cluster.dask_lots      `client.map` of Dask
    python -m tinker_sync.examples.cluster.data_loader    workers of a torch DataLoader
    python -m tinker_sync.examples.cluster.ray_rollouts   reinforcement learning on Ray

They have the options of the other examples; `--steps N` sets the number of lots, except on Ray. A *lot* is a
group of sums that one process answers. Each process gets a copy of a client as an argument. The copy carries
no key: its process finds one as a new client does, in `TINKER_API_KEY` or in the credentials file.
"""
