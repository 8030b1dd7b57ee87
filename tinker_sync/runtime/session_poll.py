"""One long poll for all the samples of a sampling session, where the server offers that.

A sample waits here until the poll announces it, and is fetched then, once. Where the server does not offer
the poll, or the poll keeps failing, the fetcher polls for each sample alone. A completion may come before its
sample waits here: the newest ones are kept, the others forgotten.

The server keeps a completion until a poll reports it as retrieved. Where no sample waits, that poll asks for
an answer at once (`timeout: 0`). It is a courtesy and is not repeated for long: a server that holds it has
read it, and one that keeps failing does without.

No thread of its own: the poll is a request like any other on the poller. The lock is held for container work
only.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._policy import Stage, delay_s, rule_for
from tinker_sync.errors import WireError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import hush
from tinker_sync.runtime.fetcher import Decode, Fetch, Fetcher, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.completion import (
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)
from tinker_sync.wire import json as wire_json

PATH: Final = "/api/v1/retrieve_futures"
# A completion may be announced before the answer to the submit has been read.
_EARLY_KEPT: Final = 10_000
_FAILURES_BEFORE_SINGLES: Final = 3
# A poll that only acknowledges is answered at once.
_ACKNOWLEDGE_S: Final = 5.0

_log = logging.getLogger(__name__)


class SessionPoll:
    """Stands in for `Fetcher.fetch` for the samples of one client. Thread-safe.

    Args:
        fetcher: fetches what is done, and all of it where there is no such poll.
        sampling_session_id: whose samples.
        clone_id: which copy of the client this is; 0 for the original.
    """

    def __init__(
        self, fetcher: Fetcher, sampling_session_id: str, clone_id: int, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._fetcher = fetcher
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiter] = {}  # guarded by _lock
        self._early: OrderedDict[str, int] = OrderedDict()  # guarded by _lock; request id to size
        self._retrieved: set[str] = set()  # guarded by _lock; not acknowledged yet
        self._polling = False  # guarded by _lock; a poll is under way, or a pause before the next
        self._singles = False  # guarded by _lock; final: there is no such poll
        # Only the steps of the poll touch these, and they follow each other.
        self._cursor = 0
        self._failures = 0
        _fork.renew_in_child(self)

    def fetch(
        self,
        promise: Promise,
        future: APIFuture[Any],
        decode: Decode[Any],
        *,
        deadline_at: float = math.inf,
        on_gone: Callable[[Exception], object] | None = None,
    ) -> _Waiter | Fetch[Any]:
        """Resolve `future` once its promise is announced as done; arguments as for `Fetcher.fetch`."""
        waiter = _Waiter(self, promise, future, decode, deadline_at, on_gone)
        with self._lock:
            singles = self._singles
            size = self._early.pop(promise.request_id, None)
            if not singles and size is None:
                self._waiting[promise.request_id] = waiter
            start = self._wanted_locked()
        if singles:
            waiter.fetch_alone(None)
        elif size is not None:
            waiter.fetch_alone(size)
        if start:
            self._begin()
        return waiter

    def renew_after_fork(self) -> None:
        """Forget the parent's samples, which the parent fetches."""
        self._lock = threading.Lock()
        self._waiting, self._retrieved, self._polling = {}, set(), False

    def __repr__(self) -> str:
        with self._lock:
            mode = "singly" if self._singles else "together"
            return f"<SessionPoll {len(self._waiting)} waiting {mode}, cursor {self._cursor}>"

    # -------------------------------------------------------------------------------------- for waiters

    def done_with(self, request_id: str) -> None:
        """Acknowledge this with the next poll: its result has arrived, or is not wanted any more."""
        with self._lock:
            self._waiting.pop(request_id, None)
            if self._singles:
                return
            self._retrieved.add(request_id)
            start = self._wanted_locked()
        if start:
            self._begin()

    def _wanted_locked(self) -> bool:
        """Return True if a poll must start now, which then counts as started."""
        if self._polling or self._singles or not (self._waiting or self._retrieved):
            return False
        self._polling = True
        return True

    # -------------------------------------------------------------------------------------- the poll

    def _begin(self) -> None:
        """Send the first poll after a rest; at once, unless the last ones failed."""
        if self._failures:
            self._fetcher.poller.after(delay_s(self._failures, draw=1.0), self._poll)
        else:
            self._poll()

    def _poll(self) -> None:
        with self._lock:
            reported = sorted(self._retrieved)
            overdue = self._take_overdue_locked()
            awaited = bool(self._waiting)
        for waiter in overdue:  # each asks once more by itself, which raises its deadline error
            self._fetcher.poller.after(0.0, partial(waiter.fetch_alone, None))
        if awaited or reported:
            call = self._call(reported, awaited=awaited)
            self._fetcher.poller.start(call, partial(self._on_outcome, reported, awaited))
        else:
            self._go_on()

    def _call(self, reported: list[str], *, awaited: bool) -> Call:
        request = FuturesRetrieveRequest(
            target=self._target,
            prev_cursor=self._cursor,
            timeout=None if awaited else 0.0,
            retrieved_request_ids=reported,
        )
        longest_s = self._fetcher.read_timeout_s
        return Call(
            method="POST",
            path=PATH,
            body=wire_json.encode(request),
            read_s=longest_s if awaited else min(longest_s, _ACKNOWLEDGE_S),
            max_retries=0,
        )

    def _take_overdue_locked(self) -> list[_Waiter]:
        """Remove and return those whose deadline has passed."""
        now = self._clock.now()
        overdue = [waiter for waiter in self._waiting.values() if waiter.deadline_at <= now]
        for waiter in overdue:
            del self._waiting[waiter.promise.request_id]
        return overdue

    def last_call(self) -> Call | None:
        """Return the call that acknowledges what is left to acknowledge; no poll is sent after it.

        For the end of the client, which sends it before it closes its connections.
        """
        with self._lock:
            reported, self._retrieved = sorted(self._retrieved), set()
            silent, self._singles = self._singles, True
        return None if silent or not reported else self._call(reported, awaited=False)

    def _on_outcome(self, reported: list[str], awaited: bool, outcome: Reply | SendFailed) -> None:
        if isinstance(outcome, Reply) and outcome.ok:
            try:
                self._on_completions(wire_json.decode(outcome.body, FuturesRetrieveResponse), reported)
            except WireError as error:
                self._give_up(str(hush(error, outcome.body, self._fetcher.secrets())))
            return
        if isinstance(outcome, SendFailed) and outcome.timed_out and outcome.maybe_received:
            if not awaited:
                self._forget(reported)
            self._go_on()  # the server holds polls longer than this client listens
        elif self._is_passing(outcome):
            self._failures += 1
            if not awaited and self._failures >= _FAILURES_BEFORE_SINGLES:
                self._forget(reported)
            self._failed()
        else:
            self._give_up(str(outcome) if isinstance(outcome, SendFailed) else f"status {outcome.status}")

    def _is_passing(self, outcome: Reply | SendFailed) -> bool:
        if isinstance(outcome, SendFailed):
            return not outcome.final
        return rule_for(outcome.status, Stage.SESSION_POLL).passes

    def _on_completions(self, answer: FuturesRetrieveResponse, reported: list[str]) -> None:
        self._failures = 0
        self._cursor = answer.cursor
        ready: list[tuple[_Waiter, int]] = []
        with self._lock:
            self._retrieved.difference_update(reported)
            for completion in answer.completions:
                size = 0
                if isinstance(completion, FutureFinished):
                    size = completion.response_payload_uncompressed_size or 0
                waiter = self._waiting.pop(completion.request_id, None)
                if waiter is None:
                    self._early[completion.request_id] = size
                else:
                    ready.append((waiter, size))
            while len(self._early) > _EARLY_KEPT:
                self._early.popitem(last=False)
        for waiter, size in ready:
            waiter.fetch_alone(size)
        self._go_on()

    def _forget(self, reported: list[str]) -> None:
        """Count these as acknowledged."""
        with self._lock:
            self._retrieved.difference_update(reported)

    def _go_on(self) -> None:
        with self._lock:
            self._polling = False
            start = self._wanted_locked()
        if start:
            self._begin()

    def _failed(self) -> None:
        """Ask again in a while; samples that wait since before are fetched one by one."""
        if self._failures == _FAILURES_BEFORE_SINGLES:
            self._release_all()
        self._go_on()

    def _give_up(self, why: str) -> None:
        _log.info("samples are asked for one by one, because asking for all at once failed: %s", why)
        with self._lock:
            self._singles = True
            self._polling = False
            self._early.clear()
            self._retrieved.clear()
        self._release_all()

    def _release_all(self) -> None:
        with self._lock:
            released, self._waiting = list(self._waiting.values()), {}
        for waiter in released:
            waiter.fetch_alone(None)


class _Waiter:
    """A sample that waits for its announcement, and then its fetch."""

    def __init__(
        self,
        owner: SessionPoll,
        promise: Promise,
        future: APIFuture[Any],
        decode: Decode[Any],
        deadline_at: float,
        on_gone: Callable[[Exception], object] | None,
    ) -> None:
        self.promise = promise
        self.deadline_at = deadline_at
        self._owner = owner
        self._future = future
        self._decode = decode
        self._on_gone = on_gone
        self._fetch: Fetch[Any] | None = None
        future.when_done(lambda _: owner.done_with(promise.request_id))

    def fetch_alone(self, size: int | None) -> None:
        """Fetch this result. `size` is the announced one; None if none was announced."""
        announced = Promise(
            self.promise.request_id,
            self.promise.request_type,
            self.promise.wants_proto,
            self.promise.roundtrip_s,
            size,
            self.promise.sdk_method,
        )
        self._fetch = self._owner._fetcher.fetch(
            announced, self._future, self._decode, deadline_at=self.deadline_at, on_gone=self._gone
        )

    def abandon(self) -> None:
        """Stop the fetch, if it has begun."""
        fetch = self._fetch
        if fetch is not None:
            fetch.abandon()

    def _gone(self, error: Exception) -> None:
        self._owner.done_with(self.promise.request_id)
        if self._on_gone is not None:
            self._on_gone(error)
        else:
            self._future.fail(error)
