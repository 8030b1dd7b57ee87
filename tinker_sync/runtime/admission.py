"""`Admission`: the one queue in which the samples of a service wait for their turn.

A sample is admitted when four limits allow it: the slots for samples under way, the number and the bytes of
those being sent, the rate limiter that it shares with other clients, and the capacity of its model. Samples
are admitted by arrival, and a sample that is sent again keeps its place by arrival. Those of a model without
capacity stand aside, so that the others can go meanwhile.

While the limiter is closed, one worker waits at its gate, and passes on the permit that it gets.

The first samples at a server come in steps, each twice the one before and one round trip after it. Those that
wait would then need up to three more round trips for a new connection. So unless the server is near, their
connections are opened while they wait.

Unless a method says otherwise, only the thread that resumes the flows may use this module.
"""

from __future__ import annotations

import heapq
import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tinker_sync._base.clock import Clock
from tinker_sync._base.numbers import numbers
from tinker_sync.errors import TinkerError
from tinker_sync.runtime.rate_limiter import SENT_AT_ONCE
from tinker_sync.runtime.workers import no_thread
from tinker_sync.transport.call import OPEN_AHEAD

if TYPE_CHECKING:
    from tinker_sync.runtime.flows import Flow, Flows, Task
    from tinker_sync.runtime.rate_limiter import Gate, Permit
    from tinker_sync.runtime.reactor import Ticket
    from tinker_sync.runtime.workers import Workers

# For a while after a refusal the weight of a prompt is multiplied by this, so that few large ones go at once.
_WEIGHT_AFTER_REFUSAL: Final = 20
# The most samples admitted at once, because the thread reads no answers meanwhile.
_ADMITTED_AT_ONCE: Final = 16
# While any sample waits, the heap of deadlines also has those that wait no more, and several entries of those
# that came back. It loses both when it has this many more entries than twice those that were left last time.
_STALE_DEADLINES: Final = 1024
_EARLY_S: Final = 0.001
_LOOK_EVERY_S: Final = 60.0
# A server that accepts none of a burst for so long is too far away to open connections only when needed.
_NEAR_S: Final = 0.02


class ModelPause:
    """The time until which a model has no capacity, and its samples that stand aside until then."""

    def __init__(self) -> None:
        self.until_s = -math.inf
        self.aside: list[Turn] = []

    def begin(self, clock: Clock, pause_s: float) -> None:
        """Hold back the samples of the model for some seconds, because the server has no capacity for it."""
        self.until_s = clock.now() + clock.shorten(pause_s)


class Admission:
    """The queue of the samples of one service client, and of the clients that it makes.

    Args:
        flows: the flows that wait here.
        workers: one of them waits while the limiter is closed.
        gate: the gate to the shared rate limiter.
        slots: the most samples under way.
        sending_bytes: the limit on the bytes of the prompts that are being sent. A sample may enter unless
            those before it exceed the limit.
        clock: measures time.
    """

    def __init__(
        self,
        flows: Flows,
        workers: Workers,
        gate: Gate,
        slots: int,
        sending_bytes: int,
        clock: Clock,
    ) -> None:
        self.gate = gate
        self._flows = flows
        self._workers = workers
        self._most_slots = slots
        self._most_bytes = sending_bytes
        self._clock = clock
        self.slots = self._most_slots
        """The slots that are free."""
        self.bytes = self._most_bytes
        """The bytes that are free; negative while the last sample to enter exceeds the limit."""
        self._sending = 0  # the samples in their send phase
        self._queue: list[tuple[int, Turn]] = []  # a heap by arrival; also has turns that were called off
        self._deadlines: list[tuple[float, int, Turn]] = []  # a heap
        self._most_deadlines = _STALE_DEADLINES
        self._timer: tuple[float, Ticket | None] = math.inf, None  # for the first deadline
        self._next_arrival = numbers().__next__
        self._permit: Permit | None = None  # from the gate, for the next sample
        self._at_gate = False  # a worker waits at the gate
        self._aside = 0  # the samples that stand aside
        self._pumping = False  # another round follows
        self._looks_ahead = False  # a look at the burst follows
        self._opened_ahead = 0

    # -------------------------------------------------------------------------------------- the queue

    def enter(self, turn: Turn) -> None:
        """Queue a sample at its place by arrival."""
        if turn.arrival is None:
            turn.arrival = self._next_arrival()
        heapq.heappush(self._queue, (turn.arrival, turn))
        self.pump()
        if turn.task is not None and turn.deadline_at < math.inf:
            self._watch(turn, turn.arrival)

    def pump(self, _: object = None) -> None:  # noqa: C901  # one condition for each limit
        """Admit the samples that the limits allow now."""
        queue, gate = self._queue, self.gate
        left = _ADMITTED_AT_ONCE
        while queue:
            turn = queue[0][1]
            if turn.task is None:
                heapq.heappop(queue)
            elif turn.pause.until_s > self._clock.now():
                heapq.heappop(queue)
                self._set_aside(turn)
            elif self.slots <= 0 or self.bytes < 0:
                return
            elif self._sending >= gate.limiter.sent_at_once:
                self._look_ahead()
                return
            elif left == 0:
                self._pump_soon()
                return
            else:
                try:
                    permit, self._permit = self._permit, None
                    if permit is None or not gate.lets_pass(permit):
                        permit = gate.try_acquire()
                except TinkerError:  # the client is closed; the end of the futures ends the waits
                    return
                if permit is None:
                    self._wait_at_gate()
                    return
                heapq.heappop(queue)
                left -= 1
                size = max(turn.size, 1)
                if gate.limiter.recently_closed():
                    size *= _WEIGHT_AFTER_REFUSAL
                self.slots -= 1
                self.bytes -= size
                self._sending += 1
                turn.admit(permit, size)
        if not self._aside:  # no sample waits
            self._deadlines.clear()

    def _pump_soon(self) -> None:
        """Go on after the answers that have arrived meanwhile."""
        if not self._pumping:
            self._pumping = True
            if not self._flows.reactor.run_soon(self._pump_again):
                self._flows.soon(self._go_on)

    def _pump_again(self) -> None:
        self._flows.act(self._go_on)

    def _go_on(self, _: None) -> None:
        self._pumping = False
        self.pump()

    # -------------------------------------------------------------------------------------- connections

    def _look_ahead(self) -> None:
        """Open connections for the samples that wait, unless one of the burst is accepted soon."""
        at_once = self.gate.limiter.sent_at_once
        if at_once < SENT_AT_ONCE and not self._looks_ahead:
            self._looks_ahead = True

            def look() -> None:
                self._flows.act(self._open_ahead, at_once)

            self._flows.reactor.after(_NEAR_S, look)

    def _open_ahead(self, at_once: int) -> None:
        self._looks_ahead = False
        limiter, reactor = self.gate.limiter, self._flows.reactor
        if limiter.sent_at_once > at_once or limiter.recently_closed():
            return
        wanted = min(len(self._queue), self.slots, SENT_AT_ONCE) - self._opened_ahead
        for _ in range(min(wanted, reactor.room)):
            self._opened_ahead += 1
            self._flows.start(_open_connection())

    # -------------------------------------------------------------------------------------- the limiter

    def _wait_at_gate(self) -> None:
        if self._at_gate:
            return
        self._at_gate = True
        try:
            self._workers.run(self._wait_for_permit)
        except RuntimeError as error:
            self._at_gate = False
            self._fail_all(no_thread(error))

    def _wait_for_permit(self) -> None:
        """Wait for a permit, on a worker."""
        with suppress(TinkerError, RuntimeError):  # the client is closed
            self._flows.soon(self._get_permit, self.gate.acquire())

    def _get_permit(self, permit: Permit | None) -> None:
        self._at_gate = False
        self._permit = permit
        self.pump()

    def _fail_all(self, error: Exception) -> None:
        queue, self._queue = self._queue, []
        for _, turn in queue:
            turn.fail(error)

    # -------------------------------------------------------------------------------------- deadlines

    def _watch(self, turn: Turn, arrival: int) -> None:
        heapq.heappush(self._deadlines, (turn.deadline_at, arrival, turn))
        if len(self._deadlines) > self._most_deadlines:
            waiting = {entry[1]: entry for entry in self._deadlines if entry[2].task is not None}
            self._deadlines = list(waiting.values())
            heapq.heapify(self._deadlines)
            self._most_deadlines = 2 * len(self._deadlines) + _STALE_DEADLINES
        self._set_timer()

    def _set_timer(self) -> None:
        first_s = self._deadlines[0][0] if self._deadlines else math.inf
        now = self._clock.now()
        # A timer keeps the reactor's thread, so one that is not needed any more should end soon.
        look_at_s = min(first_s, now + _LOOK_EVERY_S)
        at_s, timer = self._timer
        if first_s == math.inf or look_at_s >= at_s:
            return
        if timer is not None:
            timer.cancel()

        def expire() -> None:
            self._flows.act(self._expire)

        self._timer = look_at_s, self._flows.reactor.after(look_at_s - now, expire)

    def _expire(self, _: None) -> None:
        self._timer = math.inf, None
        # The reactor runs timers early if it has no thread.
        now = self._clock.now() + _EARLY_S
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].task is None):
            heapq.heappop(self._deadlines)[2].expire()
        self._set_timer()

    # -------------------------------------------------------------------------------------- capacity

    def _set_aside(self, turn: Turn) -> None:
        pause = turn.pause
        turn.last_words = "the server has no capacity for the model"
        pause.aside.append(turn)
        self._aside += 1
        if len(pause.aside) == 1:
            self._wait_for_capacity(pause)

    def _wait_for_capacity(self, pause: ModelPause) -> None:
        def end_of_pause() -> None:
            self._flows.act(self._end_pause, pause)

        self._flows.reactor.after(pause.until_s - self._clock.now(), end_of_pause)

    def _end_pause(self, pause: ModelPause) -> None:
        if pause.until_s > self._clock.now():
            self._wait_for_capacity(pause)
            return
        back, pause.aside = pause.aside, []
        self._aside -= len(back)
        for turn in back:
            if turn.arrival is not None:
                heapq.heappush(self._queue, (turn.arrival, turn))
        self.pump()


def _open_connection() -> Flow[None]:
    yield OPEN_AHEAD  # if this fails, the sample that needs the connection tells why


class Turn:
    """The turn of one sample: a flow waits for it, and then holds a slot, bytes and a permit.

    Args:
        admission: the queue.
        size: the estimated size of the prompt in bytes.
        deadline_at: the deadline for the wait, in seconds of the clock.
        pause: the pause of the model.
    """

    __slots__ = (
        "_admission",
        "_bytes",
        "_permit",
        "_slot",
        "arrival",
        "deadline_at",
        "last_words",
        "pause",
        "size",
        "task",
    )

    def __init__(self, admission: Admission, size: int, deadline_at: float, pause: ModelPause) -> None:
        self._admission = admission
        self.size = size
        self.deadline_at = deadline_at
        self.pause = pause
        self.arrival: int | None = None
        """The position among the samples, by the order of the calls; None until it waits."""
        self.last_words = ""
        """What the sample has met last, for the error of a deadline."""
        self.task: Task | None = None
        """The flow while it waits."""
        self._slot = False
        self._bytes = 0
        self._permit: Permit | None = None

    # -------------------------------------------------------------------------------------- the wait

    def begin(self, task: Task) -> None:
        """Let a flow wait until the sample is admitted, or until its deadline. The value is True or False."""
        self.task = task
        self._admission.enter(self)

    def cancel(self) -> bool:
        """Leave the queue."""
        waits, self.task = self.task is not None, None
        return waits

    def admit(self, permit: Permit, size: int) -> None:
        """Resume the flow, which holds a slot, `size` bytes and a permit now."""
        self._slot, self._bytes, self._permit = True, size, permit
        task, self.task = self.task, None
        assert task is not None  # noqa: S101  # it waits
        task.resume(True)

    def expire(self) -> None:
        """Resume the flow at its deadline."""
        task, self.task = self.task, None
        if task is not None:
            task.resume(False)

    def fail(self, error: Exception) -> None:
        """Resume the flow with an error."""
        task, self.task = self.task, None
        if task is not None:
            task.throw(error)

    # -------------------------------------------------------------------------------------- what it holds

    def may_pass(self) -> bool:
        """Return True unless the limiter has closed since it gave the permit. Ask right before sending."""
        return self._permit is not None and self._admission.gate.lets_pass(self._permit)

    def sent(self, *, accepted: bool = False) -> None:
        """Give back the permit and the bytes, because the request is over."""
        if self._permit is not None and accepted:
            self._admission.gate.succeeded(self._permit)
        self._let_go()

    def throttled(self, pause_s: float | None) -> None:
        """Close the limiter, because the server asks for fewer requests."""
        permit, self._permit = self._permit, None
        if permit is not None:
            self._admission.gate.throttled(permit, pause_s)

    def give_back(self) -> None:
        """Give back the slot and all else that the sample holds."""
        slot, self._slot = self._slot, False
        if slot:
            self._admission.slots += 1
            self._let_go()

    def _let_go(self) -> None:
        admission, self._permit = self._admission, None
        if self._bytes:
            admission._sending -= 1
            admission.bytes += self._bytes
            self._bytes = 0
        if admission._queue:
            admission.pump()
