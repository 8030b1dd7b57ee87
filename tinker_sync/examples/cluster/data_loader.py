"""torch DataLoader: its worker processes sample while the main process uses an earlier batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tinker_sync.examples._shared import connect, draw, parse, write
from tinker_sync.examples.cluster.processes import make_sums, score

if TYPE_CHECKING:
    import tinker_sync as tinker


class ScoredLots:
    """A data set for torch. Each item is the share of right answers to a lot of sums."""

    def __init__(self, sampling: tinker.SamplingClient, lots: Sequence[Sequence[tuple[int, int]]]) -> None:
        self._sampling = sampling
        self._lots = lots

    def __len__(self) -> int:
        return len(self._lots)

    def __getitem__(self, index: int) -> float:
        """Sample answers to a lot, and return the share of right ones. Runs in a worker of the loader."""
        return score(self._sampling, self._lots[index])


def main(argv: Sequence[str] | None = None, *, start_method: str = "fork") -> list[float]:
    """Score lots of sums in two workers, two lots in a batch. Return the shares of right answers by lot."""
    from torch.utils.data import DataLoader

    options = parse(argv, __doc__, steps=8)
    with connect(options) as service:
        sampling = service.create_sampling_client(base_model=options.model).result()
        lots = ScoredLots(sampling, make_sums(options.seed, options.steps))
        loader = DataLoader(lots, batch_size=2, num_workers=2, multiprocessing_context=start_method)
        shares = [float(share) for batch in loader for share in batch]
    write(f"{sum(shares) / len(shares):.0%} of the sums were right")
    draw("share of right answers", shares)
    return shares


if __name__ == "__main__":
    main()
