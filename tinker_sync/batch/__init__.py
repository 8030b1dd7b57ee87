"""Many calls at once: bounded samples of any number of prompts, and waits for many futures.

    samples     `map_samples`, behind `SamplingClient.map`: a window over the prompts, an item for each
    item        `BatchItem`: a prompt with its response or its error
    results     `ResultsFile`: JSON lines that survive a kill, and are read again by a restart
    waiting     `as_completed` and `gather`
    bar         progress bars, where tqdm and a terminal are there

Threads: the caller's own pulls prompts, starts samples and yields items. The callback workers of the client
read results and write the file. This package knows a client by its method `sample` only.
"""

from __future__ import annotations

from tinker_sync.batch.item import BatchItem
from tinker_sync.batch.waiting import as_completed, gather

__all__ = ["BatchItem", "as_completed", "gather"]
