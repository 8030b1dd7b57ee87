"""The numbered requests of one model, carried out one after another in the order of their numbers.

Requests arrive in any order: a client sends several at once, and sends the first chunk of a pass last. A
request that arrives before its turn waits. A repeated request gets the promise of the first one. A request
with the number of another one is refused. A number that does not arrive is skipped after a time, because the
client may have failed to send it.

After a refusal, some clients never use the number of the refused call again, and others use it for their next
call. Both work, because a lane skips a refused number at once, and still accepts the next valid call with it,
in order of arrival. A status of 500 and more is no refusal: it asks the client to send the same call again.
If the number of a refused call cannot be read, because its body is damaged or too large, it is a number that
does not arrive.

A lane belongs to the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import attrs

from tinker_sync.local.server.calls import Refused
from tinker_sync.local.server.promises import Promise

if TYPE_CHECKING:
    from typing import TypeAlias

Work: TypeAlias = Callable[[], Awaitable[Any]]

REMEMBERED = 10_000
"""The number of requests that are remembered, to recognise a repeated one."""


@attrs.frozen(eq=False)
class Step:
    """One request in a `Lane`: its promise, and the work whose result settles the promise."""

    promise: Promise
    work: Work
    to_protobuf: Callable[[Any], bytes] | None = None


class Seen:
    """The latest numbered requests: for each number, the digest of the request and the answer to it.

    A repeated request gets the same answer again. Any key can stand for the number.

    >>> seen = Seen(limit=2)
    >>> seen.add(1, b"a", "first")
    >>> seen.get(1, b"a"), seen.get(2, b"b")
    ('first', None)
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._found: OrderedDict[Any, tuple[bytes, Any]] = OrderedDict()

    def get(self, number: Any, digest: bytes) -> Any:
        """Return the earlier answer to the same request, or None if the number is new.

        Raises:
            Refused: the number was used for another request.
        """
        found = self._found.get(number)
        if found is None:
            return None
        if found[0] != digest:
            raise Refused(409, f"number {number} was used for another request")
        return found[1]

    def add(self, number: Any, digest: bytes, answer: Any) -> None:
        """Remember the answer to a request; beyond the limit, forget the oldest one."""
        self._found[number] = digest, answer
        if len(self._found) > self._limit:
            self._found.popitem(last=False)

    def forget(self, number: Any) -> None:
        """Forget a request, so that its number can be used again."""
        self._found.pop(number, None)


class Lane:
    """The queue of one model, which carries out its requests one at a time, in the order of their numbers.

    Args:
        run: carries out one step and settles its promise; raises nothing but `CancelledError`.
        patience_s: the time to wait for a missing number. It begins anew when the lane accepts a numbered
            request, and when another number is the next one.
    """

    def __init__(self, run: Callable[[Step], Awaitable[None]], *, patience_s: float) -> None:
        self._run = run
        self._patience_s = patience_s
        self._expected = 1
        self._early: dict[int, Step] = {}
        self._ready: deque[Step] = deque()
        self._seen = Seen()
        self._refused: OrderedDict[int, None] = OrderedDict()
        """The numbers of refused requests, or of gaps for them, that no accepted request has used."""
        self._worker: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def known(self, number: int | None, digest: bytes) -> str | None:
        """Return the id of the promise that the same request got before, or None for a new request.

        Raises:
            Refused: the number was used for another request, or was skipped because it had not arrived.
        """
        if not number:
            return None
        request_id: str | None = self._seen.get(number, digest)
        if request_id is None and number < self._expected and number not in self._refused:
            raise Refused(409, f"seq_id {number} comes too late; {self._expected} is next")
        return request_id

    def add(self, number: int | None, digest: bytes, step: Step) -> None:
        """Add a new request, which waits if its number is not the next.

        A request without a number is ready at once, behind those that are ready. So is one with a number that
        the lane has passed, which is that of a refused request.
        """
        if not number:
            self._ready.append(step)
        else:
            self._seen.add(number, digest, step.promise.request_id)  # the id only, so that results are freed
            self._refused.pop(number, None)
            if number < self._expected:
                self._ready.append(step)
            else:
                self._early[number] = step
            self._advance()
        self._work()

    def refuse(self, number: int) -> None:
        """Skip the number of a refused request."""
        if number >= self._expected and number not in self._early:
            self._refused[number] = None
            if len(self._refused) > REMEMBERED:
                self._refused.popitem(last=False)
        self._advance(refused=True)
        self._work()

    def _advance(self, *, refused: bool = False) -> None:
        """Make the steps ready whose turn has come. If others wait, set the timer that skips the gap.

        A refused request that leaves the gap as it is also leaves the timer.
        """
        expected = self._expected
        self._step_up()
        if refused and self._expected == expected:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._early:
            missing = f"waiting for seq_id {self._expected} of this model, which has not arrived"
            for step in self._early.values():
                step.promise.waits_for = missing
            self._timer = asyncio.get_running_loop().call_later(self._patience_s, self._skip)

    def _step_up(self) -> None:
        while self._expected in self._early or self._expected in self._refused:
            step = self._early.pop(self._expected, None)
            if step is not None:
                step.promise.waits_for = None
                self._ready.append(step)
            self._expected += 1

    def _skip(self) -> None:
        self._timer = None
        if self._early:
            self._expected = min(self._early)
            self._advance()
            self._work()

    def _work(self) -> None:
        if self._ready and self._worker is None:
            self._worker = asyncio.get_running_loop().create_task(self._work_off())

    async def _work_off(self) -> None:
        try:
            while self._ready:
                await self._run(self._ready.popleft())
        finally:
            self._worker = None

    def drop_early(self) -> list[Promise]:
        """Drop the steps that wait for a missing number, and return their promises."""
        if self._timer is not None:
            self._timer.cancel()
        dropped = [step.promise for step in self._early.values()]
        self._early.clear()
        return dropped

    async def close(self) -> list[Promise]:
        """Cancel the current step and drop the later ones. Return the promises of the dropped steps."""
        undone = [*(step.promise for step in self._ready), *self.drop_early()]
        self._ready.clear()
        if self._worker is not None:
            self._worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._worker
        return undone
