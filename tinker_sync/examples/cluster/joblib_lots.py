"""joblib: each of its worker processes answers groups of sums, called lots."""

from __future__ import annotations

from collections.abc import Sequence

from tinker_sync.examples._shared import connect, draw, parse, write
from tinker_sync.examples.cluster.processes import make_sums, score


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Score each lot of sums in a worker of joblib. Return the shares of right answers by lot."""
    from joblib import Parallel, delayed

    options = parse(argv, __doc__, steps=8)
    with connect(options) as service:
        sampling = service.create_sampling_client(base_model=options.model).result()
        lots = make_sums(options.seed, options.steps)
        shares: list[float] = Parallel(n_jobs=2)(delayed(score)(sampling, lot) for lot in lots)
    write(f"{sum(shares) / len(shares):.0%} of the sums were right")
    draw("share of right answers", shares)
    return shares


if __name__ == "__main__":
    main()
