"""Many calls at once: samples of any number of prompts in bounded memory, and waits for many futures.

    samples     `map_samples`, the implementation of `SamplingClient.map`: a window over the prompts
    item        `BatchItem`: a prompt with its response or its error
    results     `ResultsFile`: JSON lines that survive a killed process, for the next run to read
    waiting     `as_completed` and `gather`; progress bars, if tqdm is installed and there is a terminal

Threads: the caller's thread pulls prompts, starts samples and yields items. The callback workers of the
client usually read results and write the file. This package uses only the methods `sample` and
`get_tokenizer` of a client.
"""

from __future__ import annotations

from tinker_sync.batch.item import BatchItem
from tinker_sync.batch.waiting import as_completed, gather

__all__ = ["BatchItem", "as_completed", "gather"]
