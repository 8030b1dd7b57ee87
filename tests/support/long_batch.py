"""One run of `SamplingClient.map` in its own process, which tests kill and start again.

    python -m support.long_batch MODEL FILE COUNT [DIE_AFTER]

Environment variables name the server. After every tenth item the process prints the number of items so far.
Its last line is "end" with two figures: its peak memory in MB after a tenth of the items, and at the end.
With DIE_AFTER the process writes that many lines to FILE, and kills itself in the middle of the next line.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Iterator
from typing import Any

import tinker_sync
from tinker_sync.batch.results import ResultsFile


def prompts(count: int) -> Iterator[list[int]]:
    """Yield seven prompts again and again, so that only their positions distinguish equal prompts."""
    for index in range(count):
        yield [1, 2 + index % 7]


def say(*words: object) -> None:
    """Write a line to standard output, which the test reads."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def memory_mb() -> int:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def die_in_line(number: int) -> None:
    """Make this process kill itself in the middle of a line of the results file, after `number` lines."""
    add = ResultsFile.add
    left = [number]

    def torn(self: ResultsFile, *arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            with self._lock:  # so that no other thread adds a line before this process is dead
                self._file.write(b'{"index":9,"key"')
                os.kill(os.getpid(), signal.SIGKILL)
        add(self, *arguments)

    ResultsFile.add = torn  # type: ignore[method-assign]


def main(model: str, path: str, count: int) -> None:
    """Run the batch, and print the lines that the module describes."""
    with tinker_sync.ServiceClient() as service:
        sampling = service.create_sampling_client(base_model=model)
        params = tinker_sync.SamplingParams(max_tokens=1)
        early = 0
        for done, item in enumerate(sampling.map(prompts(count), params, save_to=path), 1):
            assert item.ok, item
            if done % 10 == 0:
                say(done)
            if done == count // 10:
                early = memory_mb()
        say("end", early, memory_mb())


if __name__ == "__main__":
    if len(sys.argv) > 4:
        die_in_line(int(sys.argv[4]))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
