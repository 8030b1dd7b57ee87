"""`SessionPoll`: one long poll for all the samples of a sampling session, if the server offers that.

A sample waits until the poll announces its result, which is then fetched, once. If the server does not offer
the poll, or the poll keeps failing, each sample is polled for alone. The poll may announce a result before
the sample waits for it: the newest such announcements are kept, and older ones are dropped. Two samples under
one request id are both fetched alone.

The server may hold a poll for longer than the deadline of a sample, so a timer ends the wait of a sample
whose deadline is near. If a server answers at once without news, the next poll follows after a pause.

The server keeps the announcement of a result until a poll acknowledges the result as retrieved. If no sample
waits, that poll asks for an answer at once (`timeout: 0`). Such a poll only helps the server, so it is
given up after a few failures, and not repeated after a timeout, because the server has received it then.
After failures, an acknowledgement shows whether the poll works again.

A server that was started anew announces nothing of earlier samples. So after polls that were held and brought
nothing, the sample that waits longest is fetched alone. For each one that the server has forgotten, the next
two are: so all forgotten ones are found in a few rounds, and of the others only a few are fetched alone.

The poll is a flow, which runs while a sample waits or a result is to be acknowledged.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final, TypeVar

from attrs import evolve

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.log import Log
from tinker_sync._base.numbers import numbers
from tinker_sync._base.policy import Ledger, Stage, delay_s, rule_for
from tinker_sync.errors import WireError
from tinker_sync.runtime.calls import redact_exception
from tinker_sync.runtime.flows import Flow, Moment
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.polls import FLOOR_S, Decode, GoneError, Polls, Promise, poll
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.types.completion import (
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
    SamplingSessionFuturesTarget,
)
from tinker_sync.wire import json as wire_json

T = TypeVar("T")

PATH: Final = "/api/v1/retrieve_futures"
# The server may announce a completion before the client has read the answer to the submit.
EARLY_KEPT: Final = 10_000
_FAILURES_BEFORE_SINGLES: Final = 3
# A server answers at once if a poll only acknowledges.
_ACKNOWLEDGE_S: Final = 5.0
_LONGEST_QUICK_PAUSE_S: Final = 1.0
_SILENT_POLLS_BEFORE_PROBE: Final = 2
_PROBED_AFTER_GONE: Final = 2

_log = Log(__name__)


class SessionPoll:
    """One long poll that announces the results of all samples of a client.

    For the thread that resumes the flows, except `last_call`.

    Args:
        polls: what the polls of the client share.
        sampling_session_id: the sampling session of the samples.
        clone_id: the number of this copy of the client; 0 for the original.
        clock: measures time.
    """

    def __init__(
        self, polls: Polls, sampling_session_id: str, clone_id: int, *, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._polls = polls
        self._target = SamplingSessionFuturesTarget(
            sampling_session_id=sampling_session_id, cloned_sampler_id=clone_id
        )
        self._clock = clock
        self._next_number = numbers().__next__  # for samples and probes, to show their order
        self._waiting: dict[str, _Waiter] = {}
        self._deadlines: list[tuple[float, int, _Waiter]] = []  # a heap; also has waits that have ended
        self._early: OrderedDict[str, int] = OrderedDict()  # request id to size
        self._retrieved: set[str] = set()  # not acknowledged yet; replaced as a whole by `last_call`
        self._polling = False  # a poll is under way, or a pause before the next
        self._singles = False  # final: there is no such poll
        self._cursor = 0
        self._failures = 0
        self._ledger = Ledger(Stage.SESSION_POLL)
        self._quick_polls = 0
        self._silent_polls = 0

    def fetch(
        self, promise: Promise, future: APIFuture[Any], decode: Decode[T], deadline_at: float = math.inf
    ) -> Flow[T]:
        """Fetch the result of a promise, in general once the poll announces it.

        It is fetched at once if the poll does not work or has announced the result already, or if another
        sample with the same request id waits. Arguments and errors are those of `polls.poll`.
        """
        request_id = promise.request_id
        waiter = _Waiter(deadline_at, self._next_number())
        try:
            size = yield from self._announcement(request_id, waiter)
            promise = evolve(promise, announced_bytes=size)
            value: T = yield from poll(self._polls, promise, future, decode, deadline_at)
        except GoneError:
            self._probe_more(waiter)  # the server may have forgotten the others too
            raise
        finally:
            if not self._singles:
                self._retrieved.add(request_id)  # its result has arrived, or is not needed any more
                self._go_on()
        return value

    def _announcement(self, request_id: str, waiter: _Waiter) -> Flow[int | None]:
        """Wait until a result is announced, and return its size, or None to ask for it without waiting."""
        size = self._early.pop(request_id, None)
        namesake = self._waiting.pop(request_id, None)
        if namesake is not None:
            namesake.tell(size)
        alone = self._singles or self._failures >= _FAILURES_BEFORE_SINGLES
        if alone or size is not None or namesake is not None:
            self._go_on()
            return size
        self._waiting[request_id] = waiter
        if waiter.deadline_at < math.inf:
            self._watch(waiter)
        self._go_on()
        try:
            announced: int | None = yield waiter
        finally:
            if self._waiting.get(request_id) is waiter:
                del self._waiting[request_id]
        return announced

    def __repr__(self) -> str:
        mode = "singly" if self._singles else "together"
        return f"<SessionPoll {len(self._waiting)} waiting {mode}, cursor {self._cursor}>"

    # -------------------------------------------------------------------------------------- the poll

    def _go_on(self) -> None:
        """Let the poll run, if there is something to ask or to acknowledge."""
        if not self._polling and not self._singles and (self._waiting or self._retrieved):
            self._polling = True
            self._polls.flows.start(self._poll_while_needed())

    def _poll_while_needed(self) -> Flow[None]:
        """Send one poll after the other."""
        try:
            while not self._singles and (self._waiting or self._retrieved):
                if self._failures:
                    yield delay_s(self._failures, draw=1.0)
                reported, awaited = sorted(self._retrieved), bool(self._waiting)
                if not (reported or awaited):
                    continue
                self._limit_waits()
                asked_at = self._clock.now()
                outcome = yield self._call(reported, awaited=awaited)
                if self._on_outcome(outcome, reported, awaited=awaited, held_s=self._clock.now() - asked_at):
                    self._quick_polls = 0
                    continue
                self._quick_polls += 1
                yield delay_s(self._quick_polls, draw=1.0, first_s=FLOOR_S, longest_s=_LONGEST_QUICK_PAUSE_S)
        except Exception as failure:  # noqa: BLE001  # the samples wait for this flow
            self._give_up(f"{type(failure).__name__}: {failure}")
        finally:
            self._polling = False

    def _watch(self, waiter: _Waiter) -> None:
        heapq.heappush(self._deadlines, (waiter.deadline_at, waiter.number, waiter))
        if len(self._deadlines) > 2 * len(self._waiting) + EARLY_KEPT:
            waiting = set(self._waiting.values())
            self._deadlines = [each for each in self._deadlines if each[2] in waiting]
            heapq.heapify(self._deadlines)

    def _limit_waits(self) -> None:
        """Start timers for the samples whose deadlines may come while the server holds a poll."""
        now = self._clock.now()
        while self._deadlines and self._deadlines[0][0] <= now + self._polls.read_timeout_s:
            deadline_at, _, waiter = heapq.heappop(self._deadlines)
            # The sample is then asked for once more, and fails.
            waiter.limit(max(deadline_at - now, 0.0))

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
        Any thread may call this.
        """
        retrieved, self._retrieved = self._retrieved, set()
        silent, self._singles = self._singles, True
        return None if silent or not retrieved else self._call(sorted(retrieved), awaited=False)

    def _on_outcome(
        self, outcome: Reply | SendFailed, reported: list[str], *, awaited: bool, held_s: float
    ) -> bool:
        """Act on the outcome of a poll. Return False if the next poll must follow after a pause."""
        if isinstance(outcome, Reply) and outcome.ok:
            try:
                answer = wire_json.decode(outcome.body, FuturesRetrieveResponse)
            except WireError as error:
                self._give_up(str(redact_exception(error, outcome.body, self._polls.secrets())))
                return True
            return self._on_completions(answer, reported, awaited=awaited, quick=held_s < FLOOR_S)
        if isinstance(outcome, SendFailed) and outcome.timed_out and outcome.maybe_received:
            # The server holds polls longer than the read timeout.
            if awaited:
                self._note_silence()
            else:
                self._retrieved.difference_update(reported)
        elif self._may_pass(outcome):
            self._failures += 1
            if self._failures >= _FAILURES_BEFORE_SINGLES:
                if not awaited:
                    self._retrieved.difference_update(reported)
                self._release(list(self._waiting))
        else:
            self._give_up(str(outcome) if isinstance(outcome, SendFailed) else f"status {outcome.status}")
        return True

    def _may_pass(self, outcome: Reply | SendFailed) -> bool:
        if isinstance(outcome, SendFailed):
            return not outcome.final
        status = outcome.status
        return rule_for(status, Stage.SESSION_POLL).passes and not self._ledger.is_spent(status)

    def _on_completions(
        self, answer: FuturesRetrieveResponse, reported: list[str], *, awaited: bool, quick: bool
    ) -> bool:
        self._failures = 0
        self._ledger.forget()
        moved, self._cursor = answer.cursor != self._cursor, answer.cursor
        self._retrieved.difference_update(reported)
        ready = 0
        for completion in answer.completions:
            size = 0
            if isinstance(completion, FutureFinished):
                size = completion.response_payload_uncompressed_size or 0
            waiter = self._waiting.pop(completion.request_id, None)
            if waiter is None:
                self._early[completion.request_id] = size
            else:
                ready += waiter.tell(size)
        while len(self._early) > EARLY_KEPT:
            self._early.popitem(last=False)
        if answer.completions:
            self._silent_polls = 0
        elif awaited and not quick:
            self._note_silence()
        return not awaited or not quick or bool(ready) or (moved and bool(answer.completions))

    def _note_silence(self) -> None:
        """Count a poll that was held and brought nothing. After some, fetch the oldest sample alone.

        A sample with a timer is fetched alone at its deadline in any case.
        """
        self._silent_polls += 1
        if self._silent_polls >= _SILENT_POLLS_BEFORE_PROBE:
            self._silent_polls = 0
            untimed = (each for each, waiter in self._waiting.items() if not waiter.limited)
            self._release(itertools.islice(untimed, 1), self._next_number())

    def _probe_more(self, gone: _Waiter) -> None:
        """Fetch the two samples alone that wait longest, if the promise of a probed sample is gone.

        Samples that began to wait after the first probe, such as those that are sent again, are left out.
        """
        older = (each for each, waiter in self._waiting.items() if waiter.number < gone.probed_at)
        self._release(itertools.islice(older, _PROBED_AFTER_GONE), gone.probed_at)

    def _release(self, request_ids: Iterable[str], probed_at: int = 0) -> None:
        """Let samples be fetched without an announcement."""
        for request_id in list(request_ids):
            waiter = self._waiting.pop(request_id)
            waiter.probed_at = probed_at
            waiter.tell(None)

    def _give_up(self, why: str) -> None:
        _log.info("samples are asked for one by one, because asking for all at once failed: %s", why)
        self._singles = True
        self._early.clear()
        self._retrieved.clear()
        self._release(list(self._waiting))


class _Waiter(Moment):
    """The moment at which the poll announces the result of a sample. Its value is the size, or None."""

    __slots__ = ("deadline_at", "number", "probed_at")

    def __init__(self, deadline_at: float, number: int) -> None:
        super().__init__()
        self.deadline_at = deadline_at
        self.number = number
        self.probed_at = 0
        """The number of the first probe that led to this one; 0 while the sample is not probed."""
