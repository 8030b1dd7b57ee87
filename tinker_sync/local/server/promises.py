"""Promises: requests under way, results, and the long polls that wait for them.

All of it belongs to the thread of the loop. A long poll is a future in a set and a timer, and takes no
thread. Fetched results are kept up to a budget in bytes, because the answer may have been lost on its way.
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
"""Fetched results that are kept, however small they are."""


@attrs.frozen(eq=False)
class Failure:
    """Why a promise was not kept."""

    error: str
    category: Category

    def plain(self) -> dict[str, str]:
        """As it is answered."""
        return {"error": self.error, "category": self.category}


@attrs.define(eq=False)
class Result:
    """A value and its forms on the wire, each made when it is first asked for."""

    value: Any
    to_protobuf: Callable[[Any], bytes] | None = None
    _forms: dict[str, bytes] = attrs.field(factory=dict, init=False)

    def form(self, *, protobuf: bool) -> tuple[bytes, str]:
        """The bytes and their content type: protobuf where that is wanted and there is such a form."""
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
    """One request under way, or its outcome.

    Attributes:
        kind: What was asked for, as `X-Tinker-Request-Type` has it.
        waits_for: Why it is not being worked on, if it is not.
        cancel: Stops the work, where that can be done.
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
        prefix: What ids begin with; another one for each start of the server, so that ids of before are
            known as such.
        kept_bytes: The budget for results that were fetched.
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
        """A new promise."""
        promise = Promise(f"{self._prefix}{self._next}", kind, session_id)
        self._next += 1
        self._promises[promise.request_id] = promise
        return promise

    def get(self, request_id: str) -> Promise | None:
        """The promise of an id, if there still is one."""
        return self._promises.get(request_id)

    def is_gone(self, request_id: str) -> bool:
        """Return True for an id of a dropped promise, also from before a restart."""
        head, _, number = request_id.rpartition("-")
        if not (head.startswith("req-") and number.isdigit()):
            return False
        return f"{head}-" != self._prefix or int(number) < self._next

    def settle(self, promise: Promise, outcome: Result | Failure) -> None:
        """Set the outcome and wake all waiters. The first outcome counts."""
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
        """Wait for the outcome, but no longer than `hold_s` or until `gone`; whether it is there."""
        if promise.outcome is None and hold_s > 0 and not self._closing:
            waiter = asyncio.get_running_loop().create_future()
            promise.waiters.add(waiter)
            try:
                await held(waiter, hold_s, gone)
            finally:
                promise.waiters.discard(waiter)
        return promise.outcome is not None

    def mark_retrieved(self, promise: Promise) -> None:
        """Its outcome has been fetched; it may go when there is no room."""
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
        """Drop the results of a session. Work under way ends by itself."""
        for name in [name for name, one in self._promises.items() if one.session_id == session_id]:
            if self._promises[name].outcome is not None:
                del self._promises[name]
                self._retrieved_bytes -= self._retrieved.pop(name, 0)

    def close(self) -> None:
        """Answer all who wait: not yet."""
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
    """Let a waiter go on."""
    if not waiter.done():
        waiter.set_result(None)
