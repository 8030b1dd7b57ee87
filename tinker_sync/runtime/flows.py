"""Flows: the life of a call as a generator, from top to bottom, which the threads of the reactor resume.

    def fetch(call: Call, quota: Quota) -> Flow[Reply]:
        yield from quota.take(1000)
        try:
            while True:
                outcome = yield call           # the answer, or the failure to get one
                if isinstance(outcome, Reply):
                    return outcome
                yield 0.5                      # seconds
        finally:
            quota.give_back(1000)              # however the flow ends

    flows.start(fetch(call, quota), future)    # the future gets the value or the failure of the flow

What a flow may wait for, by `yield`:

    a `Call`      -> `Reply` or `SendFailed`: the outcome of one exchange. `transport` does not repeat it.
    a float       -> None, after a pause of so many seconds
    a `Moment`    -> its value, once it was told; at once if it was told before
    a `Task`      -> the value of another flow, when that one has ended; its failure is raised here
    `yield from`  another flow, such as `on_worker(...)` or `Quota.take(...)`

The rules that make this sound:

- One thread at a time resumes the flows of a client, from one queue in a loop, so flows share state without
  a lock. A resume never happens inside another one, so a thousand flows that end together do not recurse. The
  thread is that of the reactor, or a worker that helps it; never one of the user, unless the client has no
  other thread left.
- Code outside (public methods, `cancel`, callbacks, signal handlers, workers) only appends to the queue and
  wakes: `start`, `soon` and `Task.call_off` take no lock. A worker reports what it has found out by a step
  for `soon`, such as `flows.soon(moment.tell, value)`.
- A flow must not block: what may block runs `on_worker`.
- A flow ends by `return` or by an exception. When its future has ended in another way (cancel, deadline,
  close), or at `call_off`, `CalledOff` is raised at the present wait, which is called off; if the outcome of
  the wait is on its way already, the flow gets this outcome, and `CalledOff` is raised at the next wait. So a
  flow that has learnt of an accepted request can still note it. `with` and `finally` give back what the flow
  holds. They must not wait: each wait raises `CalledOff` again.
- No flow is ended by the garbage collector, which would run `finally` in any thread: `_under_way` keeps the
  flows until they end. So a flow that has nothing to do should end, because it keeps its client alive:
  a queue starts its flow with the first entry, and the flow ends with the last one.
- A forked child keeps the flows of its parent unclosed, because what they hold belongs to the parent.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from tinker_sync._base.log import Log
from tinker_sync.errors import TinkerError
from tinker_sync.runtime.workers import WorkersClosedError, no_thread
from tinker_sync.transport.call import Call

if TYPE_CHECKING:
    from tinker_sync.runtime.futures import APIFuture
    from tinker_sync.runtime.reactor import Reactor, Runner, Ticket
    from tinker_sync.runtime.workers import Workers

T = TypeVar("T")

Flow = Generator[Any, Any, T]
"""A flow whose value has the type `T`."""

Step = Callable[[Any], object]

# So that the reactor reads answers that have arrived while many flows begin.
_AT_ONCE: Final = 64
_NUMBERS: Final = (float, int)

_log = Log(__name__)

_under_way: set[Task] = set()
_inherited: list[set[Task]] = []


class CalledOff(BaseException):
    """Raised at the wait of a flow whose result nobody needs any more. No `except Exception` catches it."""


class Wait(Protocol):
    """What a flow can wait for, beside a `Call` and a time."""

    def begin(self, task: Task) -> None:
        """Begin the wait. At its end, `task.resume` is called once, unless the wait was called off."""

    def cancel(self) -> bool:
        """Call the wait off, and return True; or return False if it has ended."""


class Flows:
    """The flows of one client. Any thread may call the methods.

    Args:
        reactor: sends the calls, has the timers, and resumes the flows.
        workers: resume the flows while the reactor has no thread.
    """

    def __init__(self, reactor: Reactor, workers: Runner) -> None:
        self.reactor = reactor
        self._workers = workers
        self._closed = False  # final
        self._begin()

    def _begin(self) -> None:
        self._ready: deque[tuple[Step, Any]] = deque()
        self._turn: list[None] = [None]  # empty while a thread takes steps
        self._begun = 0  # written by that thread; how often one has begun to take steps
        self._asked = -1  # the value of `_begun` when a thread was last asked to begin

    def start(self, flow: Flow[T], future: APIFuture[T] | None = None) -> Task:
        """Start a flow. Its first step runs soon, but never within this call.

        Args:
            flow: the flow.
            future: gets the value of the flow, or its failure. If the future ends in another way, such as by
                a cancel, the flow is called off. None: a failure of the flow is logged, unless another flow
                waits for it.
        """
        task = Task(self, flow, future)
        try:
            if self._closed:
                raise WorkersClosedError
            self.soon(task._start, None)
        except RuntimeError as error:
            if future is None:
                raise
            future.fail(no_thread(error))
        return task

    def close(self) -> None:
        """Call off all flows, and start no others."""
        self._closed = True
        for task in list(_under_way):
            if task._flows is self:
                task.call_off()

    def soon(self, step: Step, value: Any = None) -> None:
        """Call `step(value)` soon, on the thread that resumes the flows.

        Steps are taken in the order of these calls. No step is missed: this method appends the step and then
        looks for a thread that takes steps, and that thread declares that it stops and then looks for more
        steps.

        Raises:
            WorkersClosedError: the client is closed.
            RuntimeError: there is no thread, and the system starts none.
        """
        item = step, value
        self._ready.append(item)
        begun = self._begun
        if self._asked == begun or not self._turn:
            return
        reactor = self.reactor
        if not reactor.follow(self.run) and not reactor.run_soon(self.run):
            try:
                self._workers.run(self.run)
            except RuntimeError:
                with suppress(ValueError):  # another thread has taken it
                    self._ready.remove(item)
                    raise
        # Last, because a signal handler may come before the request is made.
        self._asked = begun

    def act(self, step: Step, value: Any = None) -> None:
        """Call `step(value)` as `soon` does, for a thread of the reactor, which may take the step itself."""
        self._ready.append((step, value))
        if self._turn:  # otherwise the thread that takes steps takes this one too
            self.run()

    def run(self) -> None:
        """Take the steps that are due. If another thread is taking them, leave these to it."""
        ready = self._ready
        left = _AT_ONCE
        while True:
            try:
                self._turn.pop()
            except IndexError:
                return
            self._begun += 1  # also without steps, because `soon` asks again only after that
            try:
                while ready and left:
                    left -= 1
                    step, value = ready.popleft()
                    step(value)
            except Exception:  # noqa: BLE001  # a failure of one step must not end those of other flows
                _log.exception("a step of a flow failed")
            finally:
                self._turn.append(None)
            if not ready:
                return
            if not left:
                if self.reactor.run_soon(self.run):
                    return
                left = _AT_ONCE

    def on_worker(self, workers: Workers, work: Callable[[], T]) -> Flow[T]:
        """Return a flow that calls `work()` on a worker, and returns its value or raises its exception."""
        done = Moment()

        def job() -> None:
            try:
                outcome: tuple[Any, BaseException | None] = work(), None
            except BaseException as failure:  # noqa: BLE001  # raised in the flow
                outcome = None, failure
            with suppress(RuntimeError):  # the client is closed, and the flow has ended
                self.soon(done.tell, outcome)

        workers.run_call(job)
        value, failure = yield done
        if failure is not None:
            raise failure
        result: T = value
        return result

    def renew_after_fork(self) -> None:
        """Leave the flows of the parent to the parent."""
        global _under_way  # noqa: PLW0603  # it belongs to the process, which is new here
        if _under_way:
            _inherited.append(_under_way)
            _under_way = set()
        self._begin()


class Task:
    """A flow under way, for which another flow may wait, on the thread that resumes the flows."""

    __slots__ = ("_failure", "_flow", "_flows", "_future", "_parent", "_value", "_wait")

    def __init__(self, flows: Flows, flow: Flow[Any], future: APIFuture[Any] | None) -> None:
        self._flows = flows
        self._flow: Flow[Any] | None = flow
        self._future = future
        self._wait: Any = None
        self._value: Any = None
        self._failure: BaseException | None = None
        self._parent: Task | None = None

    @property
    def ended(self) -> bool:
        """True once the flow has ended."""
        return self._flow is None

    def resume(self, value: Any = None) -> None:
        """Resume the flow with the value of its wait. For threads of the reactor."""
        self._flows.act(self._advance, value)

    def throw(self, failure: BaseException) -> None:
        """Resume the flow, and raise the failure of its wait in it. For threads of the reactor."""
        self._flows.act(self._raise, failure)

    def call_off(self, _: object = None) -> None:
        """End the flow, because nobody needs it any more. Any thread may call this."""
        if self._flow is not None:
            try:
                self._flows.soon(self._throw, CalledOff())
            except RuntimeError:  # the client is closed, and no other thread is left
                self._flows.act(self._throw, CalledOff())

    # The callback of the future is the task itself, because a bound method would be one object more.
    __call__ = call_off

    # ------------------------------------------------------------------ on the thread that resumes the flows

    def begin(self, task: Task) -> None:
        """Let another flow wait for the end of this one."""
        self._parent = task
        if self._flow is None:
            self._tell_parent()

    def cancel(self) -> bool:
        """Call off the wait of the other flow. This flow goes on."""
        waits, self._parent = self._parent is not None, None
        return waits

    def _start(self, _: None) -> None:
        _under_way.add(self)
        future = self._future
        if future is not None:
            if future._outcome is not None:
                self._end(None, CalledOff())
                return
            future._when_done(self)
        self._advance(None)

    def _throw(self, failure: BaseException) -> None:
        flow, wait = self._flow, self._wait
        if flow is None or self._failure is not None:
            return
        self._failure = failure
        # If it cannot be called off, its outcome is on its way, and the flow goes on to its next wait.
        if wait is not None and wait.cancel():
            self._advance(failure, flow.throw)

    def _advance(self, value: Any, go: Callable[[Any], Any] | None = None) -> None:
        """Resume the flow with `go(value)`, in general its `send`, and begin its next wait."""
        flow, flows, self._wait = self._flow, self._flows, None
        assert flow is not None  # noqa: S101  # a wait ends once, and the flow was at it
        go = go or flow.send
        try:
            while True:
                wish = go(value)
                if self._failure is not None:
                    go, value = flow.throw, self._failure
                    continue
                try:
                    if type(wish) is Call:
                        self._wait = flows.reactor.start(wish, self.resume)
                    elif type(wish) in _NUMBERS:
                        self._wait = flows.reactor.pause(wish, self.resume)
                    else:
                        self._wait = wish
                        wish.begin(self)
                except Exception as error:  # noqa: BLE001  # the flow decides what it means
                    go, value = flow.throw, error
                else:
                    return
        except StopIteration as end:
            self._end(end.value, None)
        except BaseException as failure:  # noqa: BLE001  # raised where the future is waited for
            self._end(None, failure)

    def _end(self, value: Any, failure: BaseException | None) -> None:
        _under_way.discard(self)
        future, self._future, self._flow = self._future, None, None
        self._value, self._failure = value, failure
        if isinstance(failure, TinkerError):
            failure.__traceback__ = None  # it holds the frames of the flow, and those all that the flow knows
        if future is not None:
            if failure is None:
                future.resolve(value)
            elif type(failure) is not CalledOff:
                future.fail(failure)
        elif self._parent is None and failure is not None and type(failure) is not CalledOff:
            _log.error("a flow failed", exc_info=failure)
        if self._parent is not None:
            self._tell_parent()

    def _tell_parent(self) -> None:
        parent, self._parent = self._parent, None
        if parent is not None:
            if self._failure is None:
                parent.resume(self._value)
            else:
                parent.throw(self._failure)

    def _raise(self, failure: BaseException) -> None:
        if self._flow is not None:
            self._advance(failure, self._flow.throw)


class Moment:
    """A one-shot event for which one flow may wait. For the thread that resumes the flows.

    Code on other threads passes `tell` to `Flows.soon`.

    Args:
        limit_s: the longest wait; at its end, the value is None.
    """

    __slots__ = ("_limit_s", "_task", "_timer", "_told", "_value")

    def __init__(self, limit_s: float = math.inf) -> None:
        self._limit_s = limit_s
        self._told = False
        self._value: Any = None
        self._task: Task | None = None
        self._timer: Ticket | None = None

    def tell(self, value: Any = None) -> bool:
        """Note that it has happened. Return False, without effect, if it had happened before."""
        if self._told:
            return False
        self._told, self._value = True, value
        task, self._task = self._task, None
        if task is not None:
            self._stop_timer()
            task.resume(value)
        return True

    def begin(self, task: Task) -> None:
        """Let a flow wait."""
        if self._told:
            task.resume(self._value)
            return
        self._task = task
        if self._limit_s < math.inf:
            self.limit(self._limit_s)

    def limit(self, limit_s: float) -> None:
        """Limit the wait of the flow from now on, unless it is limited already."""
        if self._timer is None and self._task is not None:
            self._timer = self._task._flows.reactor.after(limit_s, self.expire)

    @property
    def limited(self) -> bool:
        """True if the wait has a limit."""
        return self._timer is not None

    def expire(self) -> None:
        """End the wait, on a thread of the reactor."""
        task = self._task
        if task is not None:
            task._flows.act(self.tell)

    def cancel(self) -> bool:
        """Call the wait off."""
        waits, self._task = self._task is not None, None
        self._stop_timer()
        return waits

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


class Quota:
    """A FIFO semaphore that counts what the flows of a client hold, such as bytes.

    For the thread that resumes the flows. The rule is that of the reference client: a flow may take any
    amount while the balance is not negative. So a request larger than the whole quota may enter too, and then
    keeps all others out until it gives back.

    Args:
        limit: the balance at first.
    """

    def __init__(self, limit: int) -> None:
        self.free = limit
        """The balance; negative while the quota is overdrawn."""
        self._line: deque[tuple[Moment, int]] = deque()  # empty while the balance is not negative

    def take(self, size: int, limit_s: float = math.inf) -> Flow[bool]:
        """Wait at most `limit_s` for room, take `size`, and return True; or return False."""
        if self.free >= 0:
            self.free -= size
            return True
        entry = Moment(limit_s), size
        self._line.append(entry)
        taken = False
        try:
            taken = bool((yield entry[0]))
        finally:
            if not taken and entry in self._line:
                self._line.remove(entry)
        return taken

    def give_back(self, size: int) -> None:
        """Put `size` back, and let in those who wait."""
        self.free += size
        while self._line and self.free >= 0:
            moment, wanted = self._line.popleft()
            if moment.tell(True):
                self.free -= wanted
