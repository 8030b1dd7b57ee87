"""One call for many checkpoints: a limited number in parallel, and an outcome for each checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from attrs import field, frozen

from tinker_sync._base.naming import carried
from tinker_sync.errors import NotFoundError, TinkerError
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.workers import Workers

if TYPE_CHECKING:
    from tinker_sync.types import Checkpoint

# The number that the command line of the reference client has under way.
PARALLEL = 32


@frozen
class CheckpointOutcome:
    """The outcome for one checkpoint in a call for many: success, or an error.

    >>> CheckpointOutcome("tinker://run/weights/a", None).ok
    True
    """

    tinker_path: str
    error: TinkerError | None = field(default=None)
    """The failure, or None."""

    @property
    def ok(self) -> bool:
        """True if the call succeeded."""
        return self.error is None


@frozen(kw_only=True)
class BulkProgress:
    """The state of a call for many checkpoints, as reported to the listener `progress`.

    >>> BulkProgress(done=3, failed=1, total=10).total
    10
    """

    done: int
    """The number of checkpoints with an outcome, failed ones included."""
    failed: int
    total: int


Paths: TypeAlias = "Iterable[str | Checkpoint]"
Listener = Callable[[BulkProgress], object]


class Bulk:
    """One call for many checkpoints, under way. Each of its workers takes one path after another."""

    def __init__(
        self,
        wanted: Sequence[str],
        call: Callable[[str], CheckpointOutcome],
        parallel: int,
        progress: Listener | None,
        future: APIFuture[list[CheckpointOutcome]],
    ) -> None:
        self._wanted = wanted
        self._call = call
        self._progress = progress
        self._future = future
        paths = list(dict.fromkeys(wanted))
        self._total = len(paths)
        self._workers = Workers("bulk", min(parallel, max(self._total, 1)))
        self._count = min(parallel, self._total)
        self._lock = threading.Lock()
        self._left = iter(paths)  # guarded by _lock
        self._outcomes: dict[str, CheckpointOutcome] = {}  # guarded by _lock
        self._failed = 0  # guarded by _lock
        self._run: Callable[[Callable[[], object]], object]

    def start(self, run: Callable[[Callable[[], object]], object]) -> None:
        """Start the workers. They use `run` to call the listener on another thread."""
        self._run = run
        if not self._total:
            self._future.resolve([])
        try:
            for _ in range(self._count):
                self._workers.run_call(carried(self._work))
        except TinkerError as error:
            self._future.fail(error)
        self._workers.close(0, drop=False)

    def _work(self) -> None:
        while not self._future.done():  # cancelled, or the client closed
            with self._lock:
                path = next(self._left, None)
            if path is None:
                return
            try:
                outcome = self._call(path)
            except Exception as error:  # noqa: BLE001  # the future raises it
                self._future.fail(error)
                return
            with self._lock:
                self._outcomes[path] = outcome
                self._failed += not outcome.ok
                state = BulkProgress(done=len(self._outcomes), failed=self._failed, total=self._total)
            if self._progress is not None:
                self._run(partial(self._progress, state))
            if state.done == self._total:
                self._future.resolve([self._outcomes[wanted] for wanted in self._wanted])


def gone_by_us(error: TinkerError) -> bool:
    """Return True if a retry got a 404: an earlier try has probably deleted the checkpoint."""
    return isinstance(error, NotFoundError) and (error.attempts or 1) > 1
