"""What a plan is applied to: counts calls, says which goes wrong, and writes down what was asked.

The server's loop asks it, and the threads of a test; the one lock is held for counting only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from attrs import frozen

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import TinkerError
from tinker_sync.testing.calls import RecordedCall
from tinker_sync.testing.faults import Answered, Fault, SessionExpired
from tinker_sync.testing.plan import FaultPlan, Rule
from tinker_sync.wire.endpoints import find

# Where a call names the session it belongs to; ids of models and samplers begin with that of their session.
_OWNERS: Final = ("session_id", "model_id", "sampling_session_id")
_OWNERS_IN_PATHS: Final = ("session", "sampler", "model", "run")
_GONE: Final = Answered(410, b'{"detail": "the session has expired"}')


@frozen
class Decision:
    """What is to happen to a call."""

    call: RecordedCall
    latency_s: float
    fault: Fault | None


class Scene:
    """The state of a server under test. Thread-safe.

    Args:
        plan: what is to go wrong.
        clock: what time it is.
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
        self._planned: Counter[str] = Counter()  # guarded by _changed; calls of each endpoint under this plan
        self._counts = [0] * len(plan.rules)  # guarded by _changed; calls that fit each rule
        self._struck = [0] * len(plan.rules)  # guarded by _changed; how often each has decided

    # -------------------------------------------------------------------------------------- for tests

    @property
    def plan(self) -> FaultPlan:
        """What is to go wrong."""
        with self._changed:
            return self._plan

    def follow(self, plan: FaultPlan) -> None:
        """Another plan from now on; its counting begins anew."""
        with self._changed:
            self._begin_plan(plan)

    def forget(self) -> None:
        """As if nothing had been asked yet; what has expired lives again."""
        with self._changed:
            self._calls = []
            self._numbers.clear()
            self._expired.clear()
            self._failures.clear()

    @property
    def calls(self) -> list[RecordedCall]:
        """What was asked, in order of arrival."""
        with self._changed:
            return list(self._calls)

    @property
    def pending(self) -> tuple[Rule, ...]:
        """The rules of the plan that have not decided about any call yet."""
        with self._changed:
            pairs = zip(self._plan.rules, self._struck, strict=True)
            return tuple(rule for rule, struck in pairs if not struck)

    @property
    def failures(self) -> list[BaseException]:
        """What was raised by predicates of plans."""
        with self._changed:
            return list(self._failures)

    def wait_until(self, fits: Callable[[list[RecordedCall]], bool], timeout_s: float) -> bool:
        """Wait until the calls are as wanted; whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: fits(self._calls), timeout_s)

    # -------------------------------------------------------------------------------------- for the server

    def enter(
        self, *, method: str, path: str, query: str, headers: Iterable[tuple[str, str]], content: bytes
    ) -> Decision:
        """A request has arrived: write it down, and say what is to happen to it."""
        found = find(method, path)
        name, ids = (found[0].name, found[1]) if found else ("", {})
        with self._changed:
            self._numbers[name] += 1
            self._planned[name] += 1
            order, number, planned = len(self._calls) + 1, self._numbers[name], self._planned[name]
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
        call.fault = self._refusal_of_expired(call) or self._fault_for(call, plan)
        return Decision(call, plan.latency_of(name, planned), call.fault)

    def _fault_for(self, call: RecordedCall, plan: FaultPlan) -> Fault | None:
        # A test's own code runs in here, so the lock is free; only the loop's thread ever comes in.
        concerned = [index for index, rule in enumerate(plan.rules) if self._concerns(rule, call)]
        with self._changed:
            if self._plan is not plan:  # it has just been replaced
                return None
            for index in concerned:
                self._counts[index] += 1
            for index in concerned:
                rule = plan.rules[index]
                if rule.strikes(self._counts[index]):
                    self._struck[index] += 1
                    if isinstance(rule.fault, SessionExpired):
                        self._expired |= self._sessions
                        return _GONE
                    return rule.fault
        return None

    def _concerns(self, rule: Rule, call: RecordedCall) -> bool:
        try:
            return rule.concerns(call)
        except Exception as failure:  # noqa: BLE001  # raised to the test, by the server's end
            with self._changed:
                self._failures.append(failure)
            return False

    def _refusal_of_expired(self, call: RecordedCall) -> Fault | None:
        with self._changed:
            expired = set(self._expired)
        if not expired or not call.endpoint:
            return None
        owners = {owner for owner in _owners(call) if owner}
        gone = any(owner == one or owner.startswith(f"{one}:") for owner in owners for one in expired)
        return _GONE if gone else None

    def opened(self, session_id: str) -> None:
        """The server has made a session."""
        with self._changed:
            self._sessions.add(session_id)


def _owners(call: RecordedCall) -> list[str]:
    """Ids of the session, model or sampler that a call is about."""
    found = [call.ids.get(name, "") for name in _OWNERS_IN_PATHS]
    try:
        body: Any = call.body
    except (ValueError, TinkerError):  # the server will say what is wrong with it
        return found
    for part in (body, body.get("target") if isinstance(body, Mapping) else None):
        if isinstance(part, Mapping):
            found += [value for name in _OWNERS if isinstance(value := part.get(name), str)]
    return found
