"""`SessionPoll`: one long poll for all the samples of a sampling session, if the server offers that.

A sample waits until the poll announces its result, which is then fetched, once. If the server does not offer
the poll, or the poll keeps failing, each sample is polled for alone. The poll may announce a result
before the sample waits for it. The newest such announcements are kept, and older ones are dropped. Two
samples under one request id are both fetched alone.

The server may hold a poll for longer than the deadline of a sample, so a timer ends the wait of a sample
whose deadline is near. If a server answers at once without news, the next poll follows after a pause.

The server keeps the announcement of a result until a poll acknowledges the result as retrieved. If no sample
waits, that poll asks for an answer at once (`timeout: 0`). Such a poll only helps the server, so it is
given up after a few failures, and not repeated after a timeout, because the server has received it then.
After failures, an acknowledgement shows whether the poll works again.

A server that was started anew announces nothing of earlier samples. So after polls that were held and brought
nothing, the sample that waits longest is fetched alone. For each one that the server has forgotten, the next
two are: so all forgotten ones are found in a few rounds, and of the others only a few are fetched alone.

The poll has no thread of its own; it is a request like others on the poller. The lock is held for container
work only.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.numbers import numbers
from tinker_sync._base.policy import Stage, delay_s, rule_for
from tinker_sync.errors import WireError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.failures import redact_exception
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.polls import Decode, Polls, Promise
from tinker_sync.runtime.retrieval import FLOOR_S
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.completion import (
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)
from tinker_sync.wire import json as wire_json

if TYPE_CHECKING:
    from tinker_sync.runtime.tickets import Ticket

PATH: Final = "/api/v1/retrieve_futures"
# The server may announce a completion before the client has read the answer to the submit.
EARLY_KEPT: Final = 10_000
_FAILURES_BEFORE_SINGLES: Final = 3
# A server answers at once if a poll only acknowledges.
_ACKNOWLEDGE_S: Final = 5.0
_LONGEST_QUICK_PAUSE_S: Final = 1.0
_SILENT_POLLS_BEFORE_PROBE: Final = 2
_PROBED_AFTER_GONE: Final = 2

_log = logging.getLogger(__name__)


class SessionPoll:
    """One long poll that announces the results of all samples of a client. Thread-safe.

    `fetch` replaces `Polls.fetch`.

    Args:
        polls: fetches each announced result; polls for each sample alone if the server has no session poll
            or the poll keeps failing.
        sampling_session_id: the sampling session of the samples.
        clone_id: the number of this copy of the client; 0 for the original.
        clock: measures time.
    """

    def __init__(
        self, polls: Polls, sampling_session_id: str, clone_id: int, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._polls = polls
        self._poller = polls.flows.poller
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._clock = clock
        self.next_number = numbers().__next__
        """Returns consecutive numbers for samples and probes, which show their order."""
        self._lock = threading.Lock()
        self._waiting: dict[str, _Waiter] = {}  # guarded by _lock
        self._early: OrderedDict[str, int] = OrderedDict()  # guarded by _lock; request id to size
        self._retrieved: set[str] = set()  # guarded by _lock; not acknowledged yet
        self._polling = False  # guarded by _lock; a poll is under way, or a pause before the next
        self._singles = False  # guarded by _lock; final: there is no such poll
        # Only the steps of the poll change these, and they run one after the other.
        self._cursor = 0
        self._failures = 0
        self._quick_polls = 0
        self._silent_polls = 0
        self._asked_at = 0.0
        _fork.renew_in_child(self)

    def fetch(
        self,
        promise: Promise,
        future: APIFuture[Any],
        decode: Decode[Any],
        *,
        deadline_at: float = math.inf,
        on_gone: Callable[[Exception], object] | None = None,
    ) -> _Waiter:
        """Fetch the result of a promise into `future`, in general once the poll announces the result.

        The fetch begins at once if the poll does not work or has announced the result already, or if another
        sample with the same request id waits.

        The arguments are those of `Polls.fetch`.
        """
        waiter = _Waiter(self, promise, future, decode, deadline_at, on_gone)
        with self._lock:
            alone = self._singles or self._failures >= _FAILURES_BEFORE_SINGLES
            size = self._early.pop(promise.request_id, None)
            namesake = self._waiting.pop(promise.request_id, None)
            waits = not alone and size is None and namesake is None
            if waits:
                self._waiting[promise.request_id] = waiter
            start = self._wanted_locked()
        if waits:
            self._arm(waiter)
        else:
            waiter.fetch_alone(size)
        if namesake is not None:
            namesake.fetch_alone(size)
        if start:
            self._begin()
        return waiter

    def renew_after_fork(self) -> None:
        """Drop the parent's samples in a forked child, because the parent fetches them."""
        self._lock = threading.Lock()
        self._waiting, self._retrieved, self._polling = {}, set(), False

    def __repr__(self) -> str:
        with self._lock:
            mode = "singly" if self._singles else "together"
            return f"<SessionPoll {len(self._waiting)} waiting {mode}, cursor {self._cursor}>"

    # -------------------------------------------------------------------------------------- for waiters

    def done_with(self, waiter: _Waiter) -> None:
        """Acknowledge a sample with the next poll: its result has arrived, or is not needed any more."""
        request_id, timer = waiter.promise.request_id, waiter.timer
        if timer is not None:
            timer.cancel()
        with self._lock:
            if self._waiting.get(request_id) is waiter:
                del self._waiting[request_id]
            if self._singles:
                return
            self._retrieved.add(request_id)
            start = self._wanted_locked()
        if start:
            self._begin()

    def _arm(self, waiter: _Waiter) -> None:
        """Start a timer for a sample whose deadline may come while the server holds a poll."""
        left_s = waiter.deadline_at - self._clock.now()
        if waiter.timer is None and left_s <= self._polls.read_timeout_s:
            waiter.timer = self._poller.after(max(left_s, 0.0), partial(self._expire, waiter))

    def _expire(self, waiter: _Waiter) -> None:
        request_id = waiter.promise.request_id
        with self._lock:
            waits = self._waiting.get(request_id) is waiter
            if waits:
                del self._waiting[request_id]
        if waits:
            waiter.fetch_alone(None)  # this asks once more and then fails the sample at its deadline

    def _wanted_locked(self) -> bool:
        """Return True if a poll must start now, and note that it is under way. The caller then starts it."""
        if self._polling or self._singles or not (self._waiting or self._retrieved):
            return False
        self._polling = True
        return True

    # -------------------------------------------------------------------------------------- the poll

    def _begin(self) -> None:
        """Send the next poll: at once, or after a pause if the last one failed."""
        if self._failures:
            self._poller.pause(delay_s(self._failures, draw=1.0), self._poll)
        else:
            self._poll()

    def _poll(self) -> None:
        with self._lock:
            reported = sorted(self._retrieved)
            waiting = list(self._waiting.values())
        for waiter in waiting:
            self._arm(waiter)
        awaited = bool(waiting)
        if awaited or reported:
            self._asked_at = self._clock.now()
            call = self._call(reported, awaited=awaited)
            self._poller.start(call, partial(self._on_outcome, reported, awaited))
        else:
            self._go_on()

    def _call(self, reported: list[str], *, awaited: bool) -> Call:
        request = FuturesRetrieveRequest(
            target=self._target,
            prev_cursor=self._cursor,
            timeout=None if awaited else 0.0,
            retrieved_request_ids=reported,
        )
        longest_s = self._polls.read_timeout_s
        return Call(
            method="POST",
            path=PATH,
            body=wire_json.encode(request),
            read_s=longest_s if awaited else min(longest_s, _ACKNOWLEDGE_S),
            max_retries=0,
        )

    def last_call(self) -> Call | None:
        """Return the call that acknowledges the results not acknowledged yet, or None if no call is needed.

        The end of the client sends this call before it closes the connections. No poll is sent after that.
        """
        with self._lock:
            reported, self._retrieved = sorted(self._retrieved), set()
            silent, self._singles = self._singles, True
        return None if silent or not reported else self._call(reported, awaited=False)

    def _on_outcome(self, reported: list[str], awaited: bool, outcome: Reply | SendFailed) -> None:
        if isinstance(outcome, Reply) and outcome.ok:
            try:
                answer = wire_json.decode(outcome.body, FuturesRetrieveResponse)
                self._on_completions(answer, reported, awaited=awaited)
            except WireError as error:
                self._give_up(str(redact_exception(error, outcome.body, self._polls.secrets())))
            return
        if isinstance(outcome, SendFailed) and outcome.timed_out and outcome.maybe_received:
            if awaited:
                self._note_silence()
            else:
                self._forget(reported)
            self._go_on()  # the server holds polls longer than the read timeout
        elif self._is_passing(outcome):
            self._failures += 1
            if self._failures >= _FAILURES_BEFORE_SINGLES:
                if not awaited:
                    self._forget(reported)
                self._release_all()  # each is polled for
            self._go_on()
        else:
            self._give_up(str(outcome) if isinstance(outcome, SendFailed) else f"status {outcome.status}")

    def _is_passing(self, outcome: Reply | SendFailed) -> bool:
        if isinstance(outcome, SendFailed):
            return not outcome.final
        return rule_for(outcome.status, Stage.SESSION_POLL).passes

    def _on_completions(self, answer: FuturesRetrieveResponse, reported: list[str], *, awaited: bool) -> None:
        self._failures = 0
        moved = answer.cursor != self._cursor
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
            while len(self._early) > EARLY_KEPT:
                self._early.popitem(last=False)
        for waiter, size in ready:
            waiter.fetch_alone(size)
        quick = self._clock.now() - self._asked_at < FLOOR_S
        if answer.completions:
            self._silent_polls = 0
        elif awaited and not quick:
            self._note_silence()
        if not awaited or not quick or ready or (moved and answer.completions):
            self._quick_polls = 0
            self._go_on()
            return
        self._quick_polls += 1
        pause_s = delay_s(self._quick_polls, draw=1.0, first_s=FLOOR_S, longest_s=_LONGEST_QUICK_PAUSE_S)
        self._poller.pause(pause_s, self._go_on)

    def _note_silence(self) -> None:
        """Count a poll that was held and brought nothing. After some, fetch the oldest sample alone.

        A sample with a timer is fetched alone at its deadline in any case.
        """
        self._silent_polls += 1
        if self._silent_polls < _SILENT_POLLS_BEFORE_PROBE:
            return
        self._silent_polls = 0
        with self._lock:
            untimed = (each for each in self._waiting.values() if each.timer is None)
            probed = self._take_locked(list(itertools.islice(untimed, 1)), self.next_number())
        for waiter in probed:
            waiter.fetch_alone(None)

    def probe_more(self, gone: _Waiter) -> None:
        """Fetch the two samples alone that wait longest, if the promise of a probed sample is gone.

        Samples that began to wait after the first probe, such as those that are sent again, are left out.
        """
        with self._lock:
            older = (each for each in self._waiting.values() if each.number < gone.probed_at)
            probed = self._take_locked(list(itertools.islice(older, _PROBED_AFTER_GONE)), gone.probed_at)
        for waiter in probed:
            waiter.fetch_alone(None)

    def _take_locked(self, waiters: list[_Waiter], probed_at: int) -> list[_Waiter]:
        for waiter in waiters:
            del self._waiting[waiter.promise.request_id]
            waiter.probed_at = probed_at
        return waiters

    def _forget(self, reported: list[str]) -> None:
        """Count the reported samples as acknowledged."""
        with self._lock:
            self._retrieved.difference_update(reported)

    def _go_on(self) -> None:
        with self._lock:
            self._polling = False
            start = self._wanted_locked()
        if start:
            self._begin()

    def _give_up(self, why: str) -> None:
        _log.info("samples are asked for one by one, because asking for all at once failed: %s", why)
        with self._lock:
            self._singles = True
            self._polling = False
            self._early.clear()
            self._retrieved.clear()
        self._release_all()

    def _release_all(self) -> None:
        """Fetch each sample that waits alone."""
        with self._lock:
            released, self._waiting = list(self._waiting.values()), {}
        for waiter in released:
            waiter.fetch_alone(None)


class _Waiter:
    """A sample that waits until the session poll announces its result, which is then fetched."""

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
        self.timer: Ticket | None = None
        """The timer that ends the wait at the deadline; set when that is near."""
        self.number = owner.next_number()
        self.probed_at = 0
        """The number of the first probe that led to this one; 0 while the sample is not probed."""
        future._when_done(lambda _: owner.done_with(self))

    def fetch_alone(self, size: int | None) -> None:
        """Fetch this result. `size` is the announced size, or None without an announcement."""
        announced = evolve(self.promise, announced_bytes=size)
        self._owner._polls.fetch(
            announced, self._future, self._decode, deadline_at=self.deadline_at, on_gone=self._on_gone_promise
        )

    def _on_gone_promise(self, error: Exception) -> None:
        self._owner.done_with(self)
        self._owner.probe_more(self)  # the server may have forgotten the others too
        if self._on_gone is not None:
            self._on_gone(error)
        else:
            self._future.fail(error)
