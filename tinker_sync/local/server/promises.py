"""Promises: requests under way, their results, and the long polls that wait for them.

Promises belong to the thread of the event loop. A long poll is a future in a set and a timer, and needs no
thread. Fetched results are kept up to a number of bytes, because the response may have been lost.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import attrs

from tinker_sync.wire import json as json_codec
from tinker_sync.wire.endpoints import JSON, PROTOBUF

if TYPE_CHECKING:
    from tinker_sync.local.server.problems import Category

_RETRIEVED_LIMIT = 20_000
"""The most fetched results to keep, however small they are."""


@attrs.frozen(eq=False)
class Failure:
    """The failure of a promise, with its reason."""

    error: str
    category: Category

    def plain(self) -> dict[str, str]:
        """Return the failure in the form of a response."""
        return {"error": self.error, "category": self.category}


@attrs.define(eq=False)
class Result:
    """A value and its forms on the wire, each made when it is first requested."""

    value: Any
    to_protobuf: Callable[[Any], bytes] | None = None
    _forms: dict[str, bytes] = attrs.field(factory=dict, init=False)

    def form(self, *, protobuf: bool) -> tuple[bytes, str]:
        """Return the bytes and their content type: protobuf if it is wanted and the value has that form."""
        kind = PROTOBUF if protobuf and self.to_protobuf is not None else JSON
        if kind not in self._forms:
            made = self.to_protobuf(self.value) if kind == PROTOBUF and self.to_protobuf else None
            self._forms[kind] = json_codec.dumps(self.value) if made is None else made
        return self._forms[kind], kind

    @property
    def size(self) -> int:
        """The bytes of the largest form made so far."""
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
        """Return True for an id that this or an earlier start of the server has made.

        If `get` does not find such an id, the promise was dropped.
        """
        head, _, number = request_id.rpartition("-")
        if not (head.startswith("req-") and number.isdigit()):
            return False
        return f"{head}-" != self._prefix or int(number) < self._next

    def settle(self, promise: Promise, outcome: Result | Failure) -> None:
        """Set the outcome of a promise and wake its waiters. A promise keeps its first outcome."""
        if promise.outcome is not None:
            return
        promise.outcome = outcome
        promise.cancel = None
        callbacks, promise.on_done = promise.on_done, []
        for callback in callbacks:
            callback(promise)
        for waiter in promise.waiters:
            wake(waiter)

    async def wait(self, promise: Promise, hold_s: float, gone: asyncio.Future[Any] | None = None) -> bool:
        """Wait for the outcome until `hold_s` have passed or `gone` is done.

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
        """Note that a client has fetched the outcome. Drop the promises fetched longest ago to make room."""
        name, size = promise.request_id, promise.outcome.size if isinstance(promise.outcome, Result) else 0
        self._retrieved_bytes += size - self._retrieved.pop(name, 0)
        self._retrieved[name] = size
        while self._retrieved_bytes > self._kept_bytes or len(self._retrieved) > _RETRIEVED_LIMIT:
            if len(self._retrieved) == 1:
                break
            oldest, freed = self._retrieved.popitem(last=False)
            self._retrieved_bytes -= freed
            self._promises.pop(oldest, None)

    def drop_session(self, session_id: str) -> None:
        """Drop the promises of a session that have an outcome. The others stay."""
        for name in [name for name, one in self._promises.items() if one.session_id == session_id]:
            if self._promises[name].outcome is not None:
                del self._promises[name]
                self._retrieved_bytes -= self._retrieved.pop(name, 0)

    def close(self) -> None:
        """Wake all waiters, whose polls then answer that the result is not ready."""
        self._closing = True
        for promise in self._promises.values():
            for waiter in promise.waiters:
                wake(waiter)

    def __len__(self) -> int:
        return len(self._promises)


async def held(waiter: asyncio.Future[None], hold_s: float, gone: asyncio.Future[Any] | None) -> None:
    """Wait until `waiter` is woken, `hold_s` have passed, or `gone` is done."""
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
    """Wake a waiter."""
    if not waiter.done():
        waiter.set_result(None)
