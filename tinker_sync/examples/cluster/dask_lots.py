"""Dask: `client.map` with a sampling client as an argument."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tinker_sync.examples._shared import connect, draw, parse, write
from tinker_sync.examples.cluster.processes import make_sums, score


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Score each lot of sums in a worker of a new Dask cluster. Return the shares of right answers by lot.

    For an existing cluster, give `Client` the address of its scheduler.
    """
    from dask.distributed import Client, LocalCluster

    options = parse(argv, __doc__, steps=8)
    here = LocalCluster(n_workers=2, threads_per_worker=2, host="127.0.0.1", dashboard_address=None)
    with connect(options) as service, here as cluster, Client(cluster) as client:
        sampling = service.create_sampling_client(base_model=options.model).result()
        # `pure=False`: sample equal lots again, because samples are random.
        futures = client.map(partial(score, sampling), make_sums(options.seed, options.steps), pure=False)
        shares: list[float] = client.gather(futures)
    write(f"{sum(shares) / len(shares):.0%} of the sums were right")
    draw("share of right answers", shares)
    return shares


if __name__ == "__main__":
    main()
