"""Promises: requests under way, their results, and the long polls that wait for them.

Promises belong to the thread of the event loop. A long poll is a future in a set and a timer, and needs no
thread. Fetched results are kept up to a number of bytes, because the response may have been lost.

The calls return one result, announce which samples have ended, or cancel a request. Several processes may
share a sampler. Each of them is a *clone*, and asks only for its own samples.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import attrs

from tinker_sync.local.server.calls import Calls, Refused
from tinker_sync.local.server.http import Answer
from tinker_sync.types.completion import (
    FutureFailed,
    FutureFinished,
    FuturesRetrieveRequest,
    FuturesRetrieveResponse,
)
from tinker_sync.types.future import FutureRetrieveRequest, QueueState
from tinker_sync.wire import json as json_codec
from tinker_sync.wire.endpoints import JSON, PROTOBUF

if TYPE_CHECKING:
    from tinker_sync.local.server.calls import Ask, Category
    from tinker_sync.local.server.state import LiveSampler, Service
    from tinker_sync.types.completion import FutureCompletion

_REQUEST_ID: Final = re.compile(r"(req-.*-)([0-9]{1,18})", re.DOTALL)
_RETRIEVED_LIMIT = 20_000
"""The most fetched results to keep, however small they are."""


@attrs.frozen(eq=False)
class Failure:
    """The outcome of a promise whose work failed: a message, and the side at fault."""

    error: str
    category: Category

    def plain(self) -> dict[str, str]:
        """Return the failure in the form of a response."""
        return {"error": self.error, "category": self.category}


@attrs.define(eq=False)
class Result:
    """The outcome of a promise whose work succeeded: a value, in JSON or protobuf.

    Each form is encoded when it is first requested.
    """

    value: Any
    to_protobuf: Callable[[Any], bytes] | None = None
    _forms: dict[str, bytes] = attrs.field(factory=dict, init=False)

    def form(self, *, protobuf: bool) -> tuple[bytes, str]:
        """Return the encoded value and its content type: protobuf if wanted and possible, else JSON."""
        kind = PROTOBUF if protobuf and self.to_protobuf is not None else JSON
        if kind not in self._forms:
            made = self.to_protobuf(self.value) if kind == PROTOBUF and self.to_protobuf else None
            self._forms[kind] = json_codec.dumps(self.value) if made is None else made
        return self._forms[kind], kind

    @property
    def size(self) -> int:
        """The size in bytes of the largest form that is encoded so far; 0 before the first."""
        return max(map(len, self._forms.values()), default=0)


@attrs.define(eq=False)
class Promise:
    """One accepted request, and its outcome when the work has ended.

    Attributes:
        kind: the kind of the request, as in `X-Tinker-Request-Type`.
        waits_for: the reason for which the work has not begun, such as a missing number; else None.
        cancel: stops the work; None if it cannot be stopped.
        on_done: functions to call with the promise when it has its outcome.
        waiters: a future for each long poll.
    """

    request_id: str
    kind: str
    session_id: str | None = None
    outcome: Result | Failure | None = None
    waits_for: str | None = None
    cancel: Callable[[], None] | None = None
    on_done: list[Callable[[Promise], None]] = attrs.Factory(list)
    waiters: set[asyncio.Future[None]] = attrs.Factory(set)


class Promises:
    """All promises of a server, by id.

    Args:
        prefix: the beginning of the ids. Each start of the server has its own prefix, which distinguishes
            its ids from those of earlier starts.
        kept_bytes: the most bytes of fetched results to keep.
    """

    def __init__(self, prefix: str, *, kept_bytes: int) -> None:
        self._prefix = prefix
        self._kept_bytes = kept_bytes
        self._promises: dict[str, Promise] = {}
        self._retrieved: OrderedDict[str, int] = OrderedDict()
        self._retrieved_bytes = 0
        self._next = 0
        self._closing = False

    def open(self, kind: str, session_id: str | None = None) -> Promise:
        """Make a promise with a new id."""
        promise = Promise(f"{self._prefix}{self._next}", kind, session_id)
        self._next += 1
        self._promises[promise.request_id] = promise
        return promise

    def get(self, request_id: str) -> Promise | None:
        """Return the promise of an id, or None if it is gone or never existed."""
        return self._promises.get(request_id)

    def is_gone(self, request_id: str) -> bool:
        """Return True if an id that `get` does not find had a promise, which was dropped.

        This server has made the id, or the form of the id shows that an earlier start has.
        """
        found = _REQUEST_ID.fullmatch(request_id)
        return found is not None and (found[1] != self._prefix or int(found[2]) < self._next)

    def settle(self, promise: Promise, outcome: Result | Failure) -> None:
        """Set the outcome of a promise and wake its waiters. A promise keeps its first outcome."""
        if promise.outcome is not None:
            return
        promise.outcome = outcome
        promise.cancel = None
        for waiter in promise.waiters:  # first, because a callback may raise
            wake(waiter)
        callbacks, promise.on_done = promise.on_done, []
        for callback in callbacks:
            callback(promise)

    async def wait(self, promise: Promise, hold_s: float, gone: asyncio.Future[Any] | None = None) -> bool:
        """Wait for the outcome until `hold_s` have passed, `gone` is done, or the server closes.

        Returns:
            True if the promise has its outcome.
        """
        if promise.outcome is None and hold_s > 0 and not self._closing:
            waiter = asyncio.get_running_loop().create_future()
            promise.waiters.add(waiter)
            try:
                await held(waiter, hold_s, gone)
            finally:
                promise.waiters.discard(waiter)
        return promise.outcome is not None

    def mark_retrieved(self, promise: Promise) -> None:
        """Note that a client has fetched the outcome.

        If the fetched results exceed a limit, drop the promises that were fetched longest ago.
        """
        name, size = promise.request_id, promise.outcome.size if isinstance(promise.outcome, Result) else 0
        self._retrieved_bytes += size - self._retrieved.pop(name, 0)
        self._retrieved[name] = size
        while self._retrieved_bytes > self._kept_bytes or len(self._retrieved) > _RETRIEVED_LIMIT:
            if len(self._retrieved) == 1:
                break
            oldest, freed = self._retrieved.popitem(last=False)
            self._retrieved_bytes -= freed
            self._promises.pop(oldest, None)

    def drop_session(self, session_id: str) -> list[Promise]:
        """Drop the promises of a session that have an outcome. Return the others, which stay."""
        found = [one for one in self._promises.values() if one.session_id == session_id]
        for promise in found:
            if promise.outcome is not None:
                self.drop(promise)
        return [promise for promise in found if promise.outcome is None]

    def drop(self, promise: Promise) -> None:
        """Drop a promise."""
        self._promises.pop(promise.request_id, None)
        self._retrieved_bytes -= self._retrieved.pop(promise.request_id, 0)

    def close(self) -> None:
        """Wake all waiters, whose polls then answer that the result is not ready."""
        self._closing = True
        for promise in self._promises.values():
            for waiter in promise.waiters:
                wake(waiter)

    def __len__(self) -> int:
        return len(self._promises)


async def held(waiter: asyncio.Future[None], hold_s: float, gone: asyncio.Future[Any] | None) -> None:
    """Wait until `wake(waiter)` is called, `hold_s` have passed, or `gone` is done."""
    timer = asyncio.get_running_loop().call_later(hold_s, wake, waiter)

    def gone_now(_: Any) -> None:
        wake(waiter)

    if gone is not None:
        gone.add_done_callback(gone_now)
    try:
        await waiter
    finally:
        timer.cancel()
        if gone is not None:
            gone.remove_done_callback(gone_now)


def wake(waiter: asyncio.Future[None]) -> None:
    """End the wait for `waiter`. Idempotent."""
    if not waiter.done():
        waiter.set_result(None)


# --------------------------------------------------------------------------------------- the calls that wait


calls = Calls()

CLONE = 10**9
"""The sequence numbers of clone 1 of a sampler begin here, and those of clone 2 at twice this number."""
_LOG = 100_000
"""The most ended requests that are remembered for each clone."""


@calls.of("retrieve_future")
async def retrieve_future(service: Service, ask: Ask) -> Any:
    """Return the outcome of a request: its result, its failure, or only the size of a large result.

    If there is no outcome within `Flags.hold_s` seconds, answer with status 408.
    """
    request = ask.read(FutureRetrieveRequest)
    promise = find(service, request.request_id)
    if not await service.promises.wait(promise, service.flags.hold_s, ask.gone):
        return _not_yet(promise)
    return _outcome(service, ask, promise, allow_metadata_only=request.allow_metadata_only)


def find(service: Service, request_id: str) -> Promise:
    """Return the promise of a request. Raises `Refused` if it is gone or never existed."""
    promise = service.promises.get(request_id)
    if promise is not None:
        return promise
    if service.promises.is_gone(request_id):
        raise Refused(410, "the result is gone: it was fetched long ago, or the server was started anew")
    raise Refused(404, "there is no such request")


def _not_yet(promise: Promise) -> Answer:
    tree = {"detail": "not ready yet", "queue_state": QueueState.ACTIVE.value}
    if promise.waits_for:
        tree |= {"queue_state": QueueState.PAUSED_CAPACITY.value, "queue_state_reason": promise.waits_for}
    return Answer(json_codec.dumps(tree), 408)


def _outcome(service: Service, ask: Ask, promise: Promise, *, allow_metadata_only: bool) -> Answer:
    outcome = promise.outcome
    if isinstance(outcome, Failure):
        service.promises.mark_retrieved(promise)
        if service.flags.json_only:
            return Answer(
                json_codec.dumps({"detail": outcome.error}), 400 if outcome.category == "user" else 500
            )
        return Answer(json_codec.dumps(outcome.plain()))
    assert outcome is not None  # noqa: S101
    protobuf = ask.wants_protobuf and not service.flags.json_only
    body, content_type = outcome.form(protobuf=protobuf)
    if allow_metadata_only and len(body) > service.flags.metadata_over_bytes and not service.flags.json_only:
        return Answer(json_codec.dumps({"status": "complete_metadata", "response_payload_size": len(body)}))
    service.promises.mark_retrieved(promise)
    return Answer(body, content_type=content_type)


@calls.of("retrieve_futures")
async def retrieve_futures(service: Service, ask: Ask) -> Any:
    """Return the sample requests of one process that have ended since a cursor, without their results.

    If none has ended, first wait for one, at most the time that the request and `Flags.hold_s` allow. The
    request also names the results that the process has fetched; these are not returned again.
    """
    request = ask.read(FuturesRetrieveRequest)
    sampler = await service.sampler(request.target.sampling_session_id)
    clone = request.target.cloned_sampler_id
    for request_id in request.retrieved_request_ids:
        promise = service.promises.get(request_id)
        if promise is not None and promise.outcome is not None:
            service.promises.mark_retrieved(promise)
    _forget(sampler, clone, set(request.retrieved_request_ids))
    if not _since(sampler, clone, request.prev_cursor):
        hold_s = service.flags.hold_s
        if request.timeout is not None:
            hold_s = min(hold_s, max(0.0, request.timeout))
        await _news(service, sampler, clone, request.prev_cursor, hold_s, ask)
    found = _since(sampler, clone, request.prev_cursor)
    cursor = max((number for number, _ in found), default=request.prev_cursor)
    return FuturesRetrieveResponse(completions=[completion for _, completion in found], cursor=cursor)


async def _news(
    service: Service, sampler: LiveSampler, clone: int, cursor: int, hold_s: float, ask: Ask
) -> None:
    """Wait until a sample request of process `clone` ends, `hold_s` have passed, or the client is gone."""
    loop = asyncio.get_running_loop()
    until = loop.time() + hold_s
    while not (_since(sampler, clone, cursor) or loop.time() >= until or (ask.gone and ask.gone.done())):
        waiter = loop.create_future()
        sampler.news.add(waiter)
        try:
            await held(waiter, until - loop.time(), ask.gone)
        finally:
            sampler.news.discard(waiter)
        if service.closing:
            return


def _since(sampler: LiveSampler, clone: int, cursor: int) -> list[tuple[int, FutureCompletion]]:
    """Return the ended requests of process `clone` since a cursor, or all if this sampler has not given it.

    Such a cursor is from before the clock was set back and the sampler was made again.
    """
    if cursor > sampler.cursor:
        cursor = 0
    return [entry for entry in sampler.finished.get(clone, ()) if entry[0] > cursor]


def _forget(sampler: LiveSampler, clone: int, fetched: set[str]) -> None:
    """Drop the ended requests of process `clone` whose ids are in `fetched`."""
    log = sampler.finished.get(clone)
    if log and fetched:
        kept = [entry for entry in log if entry[1].request_id not in fetched]
        log.clear()
        log.extend(kept)


def note_finished(service: Service, sampler: LiveSampler, clone: int, promise: Promise) -> None:
    """Note that a sample request has ended, and wake the `retrieve_futures` calls that wait for this.

    Do nothing if the settings for clients turn `retrieve_futures` off.

    Args:
        service: the state of the server.
        sampler: the sampler of the request.
        clone: the number of the process that sent the request, among those that share the sampler.
        promise: the promise of the request.
    """
    if not service.flags.client.sample_use_retrieve_futures:
        return
    completion: FutureCompletion
    if isinstance(promise.outcome, Result):
        size = len(promise.outcome.form(protobuf=True)[0])
        completion = FutureFinished(request_id=promise.request_id, response_payload_uncompressed_size=size)
    else:
        completion = FutureFailed(request_id=promise.request_id)
    # A client keeps its cursor when the sampler is made again, as after a restart. The time makes the cursors
    # of the new one higher.
    sampler.cursor = max(sampler.cursor + 1, int(service.clock.time() * 1e6))
    sampler.finished.setdefault(clone, deque(maxlen=_LOG)).append((sampler.cursor, completion))
    for waiter in sampler.news:
        wake(waiter)


@calls.of("cancel_future")
async def cancel_future(service: Service, ask: Ask) -> Any:
    """Cancel a request. Finished work and work that cannot be stopped stay as they are."""
    request_id = ask.tree("request_id").get("request_id")
    if not isinstance(request_id, str):
        raise Refused(422, "request_id must be text")
    promise = service.promises.get(request_id)
    if promise is None:
        find(service, request_id)
    elif promise.cancel is not None:
        promise.cancel()
    return {}
