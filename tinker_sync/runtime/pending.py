"""The calls that change something at the server. A client that ends waits for them for a bounded time.

Any thread may call the methods without a lock: adding a call, removing it and copying the names are atomic in
the interpreter. Reading the newest call is not, and is repeated if another thread has changed the calls
meanwhile.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from tinker_sync._base.clock import Wake
from tinker_sync._base.log import Log
from tinker_sync._base.naming import current
from tinker_sync.runtime.futures import APIFuture

PENDING_LIMIT_S: Final = 60.0
"""The longest time that the end of a client waits for these calls, unless `close` gets another time."""
NOTICE_AFTER_S: Final = 2.0
_LOOK_S: Final = 1.0

_log = Log("tinker_sync.session")


class PendingChanges:
    """The calls of one client that change something at the server and have not ended. Thread-safe.

    >>> changes = PendingChanges()
    >>> changes.add(APIFuture(), "save_state"), changes.add(APIFuture(), "optim_step")
    (None, None)
    >>> changes.describe()
    'save_state, optim_step'
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._names: dict[APIFuture[Any], str] = {}
        self._news = Wake()
        self._given_up = False
        self._now = now

    def add(self, future: APIFuture[Any], name: str = "") -> None:
        """Keep a call among the pending ones until its future ends.

        Args:
            future: the future of the call.
            name: the name of the call; "" stands for the public method that runs in this thread.
        """
        self._names[future] = name or current().rpartition(".")[2] or "a call"
        future._when_done(self._on_ended)

    def __len__(self) -> int:
        return len(self._names)

    def under_way(self) -> bool:
        """Return True if a call has not ended.

        This looks at the newest calls first, because thousands may wait. It forgets the ended calls that it
        meets; a Ctrl-C in `add` may have left them here.
        """
        names = self._names
        while names:
            try:
                newest = next(reversed(names))
            except (RuntimeError, StopIteration):  # another thread has changed the names in between
                continue
            if not newest.done():
                return True
            names.pop(newest, None)
        return False

    def describe(self) -> str:
        """Return the names of the calls, each with its count if that is not 1."""
        counts = Counter(list(self._names.values()))
        return ", ".join(name if count == 1 else f"{count} {name}" for name, count in counts.items())

    def wait(self, limit_s: float) -> None:
        """Wait until no call is left, the time is up, or `give_up` was called.

        After two seconds, name the calls in a line on stderr. At the end, log the calls that are left, and
        forget them.

        Args:
            limit_s: the longest time.
        """
        try:
            self._wait(limit_s)
        finally:  # Ctrl-C may end the wait
            self._report()

    def _wait(self, limit_s: float) -> None:
        began_at = self._now()
        noticed = False
        while self._names and not self._given_up:
            waited_s = self._now() - began_at
            if waited_s >= limit_s:
                break
            if not noticed and waited_s >= NOTICE_AFTER_S:
                noticed = True
                self._notify(limit_s)
            next_s = limit_s if noticed else min(limit_s, NOTICE_AFTER_S)
            self._news.wait(min(next_s - waited_s, _LOOK_S))
            self._forget_ended()

    def give_up(self) -> None:
        """Make `wait` return at once, also if it is called later."""
        self._given_up = True
        self._news.set()

    def forget(self) -> None:
        """Drop the calls in a forked child, because they belong to the parent."""
        self._names, self._news, self._given_up = {}, Wake(), False

    def _forget_ended(self) -> None:
        """Remove ended calls that have no callback to remove them, because Ctrl-C interrupted `add`."""
        for future in [each for each in list(self._names) if each.done()]:
            self._names.pop(future, None)

    def _on_ended(self, future: APIFuture[Any]) -> None:
        self._names.pop(future, None)
        self._news.set()

    def _notify(self, limit_s: float) -> None:
        text = f"tinker_sync: waiting for {self.describe()}, {limit_s:.0f} s at most; Ctrl-C leaves at once\n"
        with suppress(OSError, ValueError, AttributeError):  # a closed or missing stderr
            sys.stderr.write(text)
            sys.stderr.flush()

    def _report(self) -> None:
        names = self.describe()
        if names:
            self._names = {}
            _log.warning("the client ends before the server has answered, so these may be lost: %s", names)
