"""`Scene`: counts the calls to a test server, chooses their faults by a plan, and records the calls.

The event loop of the server and the threads of a test use it. The lock is held only to count, to copy, and to
check the condition of `wait_until`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from attrs import frozen

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import TinkerError
from tinker_sync.testing.calls import RecordedCall
from tinker_sync.testing.faults import Fault, FixedReply, SessionExpired
from tinker_sync.testing.plan import FaultPlan, FaultRule
from tinker_sync.wire.endpoints import find

# Fields that name the session of a call; ids of models and samplers begin with the id of their session.
_OWNERS: Final = ("session_id", "model_id", "sampling_session_id")
_OWNERS_IN_PATHS: Final = ("session", "sampler", "model", "run")
_GONE: Final = FixedReply(410, b'{"detail": "the session has expired"}')


@frozen
class Decision:
    """A recorded call, with the latency and the fault that `Scene.enter` has chosen for it."""

    call: RecordedCall
    latency_s: float
    fault: Fault | None


class Scene:
    """The plan of a test server, the calls it has received, and the sessions that have expired. Thread-safe.

    Args:
        plan: the faults and latencies.
        clock: the clock for `RecordedCall.at_s`.
    """

    def __init__(self, plan: FaultPlan, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._began_s = clock.now()
        self._changed = threading.Condition()
        self._calls: list[RecordedCall] = []  # guarded by _changed
        self._numbers: Counter[str] = Counter()  # guarded by _changed; calls of each endpoint
        self._sessions: set[str] = set()  # guarded by _changed
        self._expired: set[str] = set()  # guarded by _changed
        self._failures: list[BaseException] = []  # guarded by _changed
        self._begin_plan(plan)

    def _begin_plan(self, plan: FaultPlan) -> None:
        self._plan = plan  # guarded by _changed
        self._counts = [0] * len(plan.rules)  # guarded by _changed; calls that match each rule
        self._used = [0] * len(plan.rules)  # guarded by _changed; calls that each rule has decided on

    # -------------------------------------------------------------------------------------- for tests

    @property
    def plan(self) -> FaultPlan:
        """The present plan."""
        with self._changed:
            return self._plan

    def follow(self, plan: FaultPlan) -> None:
        """Replace the plan. The new plan counts calls from 1."""
        with self._changed:
            self._begin_plan(plan)

    def forget(self) -> None:
        """Drop the recorded calls and failures, and let expired sessions work again."""
        with self._changed:
            self._calls = []
            self._numbers.clear()
            self._expired.clear()
            self._failures.clear()

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls in order of arrival."""
        with self._changed:
            return list(self._calls)

    @property
    def pending(self) -> tuple[FaultRule, ...]:
        """The rules of the plan whose fault has not happened to any call yet."""
        with self._changed:
            pairs = zip(self._plan.rules, self._used, strict=True)
            return tuple(rule for rule, used in pairs if not used)

    @property
    def failures(self) -> list[BaseException]:
        """The exceptions that predicates of the plan have raised."""
        with self._changed:
            return list(self._failures)

    def wait_until(self, condition: Callable[[list[RecordedCall]], bool], timeout_s: float) -> bool:
        """Wait until a condition on the calls is true, and return True; return False after the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self._calls), timeout_s)

    # -------------------------------------------------------------------------------------- for the server

    def enter(
        self, *, method: str, path: str, query: str, headers: Iterable[tuple[str, str]], content: bytes
    ) -> Decision:
        """Record a request that has arrived, and choose its latency and its fault."""
        found = find(method, path)
        name, ids = (found[0].name, found[1]) if found else ("", {})
        with self._changed:
            self._numbers[name] += 1
            order, number = len(self._calls) + 1, self._numbers[name]
            call = RecordedCall(
                order=order,
                number=number,
                endpoint=name,
                ids=ids,
                method=method,
                path=path,
                query=query,
                headers=headers,
                content=content,
                at_s=self._clock.now() - self._began_s,
            )
            self._calls.append(call)
            self._changed.notify_all()
            plan = self._plan
        call.fault = self._refuse_expired(call) or self._choose_fault(call, plan)
        return Decision(call, plan.latency_of(name), call.fault)

    def _choose_fault(self, call: RecordedCall, plan: FaultPlan) -> Fault | None:
        # Predicates of the test run here, so without the lock. Only the thread of the event loop calls this.
        matching = [index for index, rule in enumerate(plan.rules) if self._matches(rule, call)]
        with self._changed:
            if self._plan is not plan:  # a test has replaced it meanwhile
                return None
            for index in matching:
                self._counts[index] += 1
            for index in matching:
                rule = plan.rules[index]
                if rule.strikes(self._counts[index]):
                    self._used[index] += 1
                    if isinstance(rule.fault, SessionExpired):
                        self._expired |= self._sessions
                        return _GONE
                    return rule.fault
        return None

    def _matches(self, rule: FaultRule, call: RecordedCall) -> bool:
        try:
            return rule.matches(call)
        except Exception as failure:  # noqa: BLE001  # the server's `close` raises it
            with self._changed:
                self._failures.append(failure)
            return False

    def _refuse_expired(self, call: RecordedCall) -> Fault | None:
        with self._changed:
            expired = set(self._expired)
        if not expired or not call.endpoint:
            return None
        owners = {owner for owner in _find_owners(call) if owner}
        gone = any(owner == one or owner.startswith(f"{one}:") for owner in owners for one in expired)
        return _GONE if gone else None

    def note_session(self, session_id: str) -> None:
        """Record a session that the server has created."""
        with self._changed:
            self._sessions.add(session_id)


def _find_owners(call: RecordedCall) -> list[str]:
    """Return the ids of the session, model or sampler that a call names."""
    found = [call.ids.get(name, "") for name in _OWNERS_IN_PATHS]
    try:
        body: Any = call.body
    except (ValueError, RecursionError, TinkerError):  # the server refuses such a body itself
        return found
    for part in (body, body.get("target") if isinstance(body, Mapping) else None):
        if isinstance(part, Mapping):
            found += [value for name in _OWNERS if isinstance(value := part.get(name), str)]
    return found
