"""What to do about the submit of a sample that was not taken: the common table, and what is special here."""

from __future__ import annotations

import random
from collections.abc import Callable

from attrs import frozen

from tinker_sync._policy import Meaning, Stage, delay_s, rule_for
from tinker_sync.errors import APIError, TinkerError
from tinker_sync.runtime.billing import BillingPause
from tinker_sync.runtime.rate_limiter import default_delay_s
from tinker_sync.transport import verdict
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.verdict import Judge


@frozen
class Retry:
    """Submit again after a pause."""

    delay_s: float


@frozen
class Throttled:
    """The server asks for less; submit again when the limiter lets us, which closes for so long."""

    delay_s: float


@frozen
class Refused:
    """There is no point in trying again."""

    error: Exception


Decide = Callable[[Reply | SendFailed, Call, int, int], "Retry | Throttled | Refused"]
"""What to do about an outcome that is no promise: (outcome, call, estimate of the prompt, most attempts)."""


class SampleJudge:
    """Decides about submits. Immutable; any thread may ask.

    A 429, and a 402 that is to be waited out, concern everybody: the limiter closes. What else the table
    calls passing is tried again, a bounded number of times.
    """

    def __init__(
        self, judge: Judge, billing: BillingPause, draw: Callable[[], float] = random.random
    ) -> None:
        self._judge = judge
        self._billing = billing
        self._draw = draw

    def __call__(
        self, outcome: Reply | SendFailed, call: Call, estimate_bytes: int, max_attempts: int
    ) -> Retry | Throttled | Refused:
        """What to do about this outcome of this call, whose `attempt` counts the tries so far."""
        meaning = None
        if isinstance(outcome, SendFailed):
            if isinstance(outcome.__cause__, TinkerError):
                return Refused(outcome.__cause__)  # no key, say: it was never sent, and it says why itself
            found: verdict.Verdict | None = self._judge.failure(outcome, call)
        else:
            meaning = rule_for(outcome.status, Stage.SUBMIT).meaning
            if meaning is Meaning.BLOCKED and self._billing.may_pause():
                return Throttled(default_delay_s(estimate_bytes))
            found = self._judge.reply(outcome, call, Stage.SUBMIT)
        if found is None or isinstance(found, verdict.Fatal):
            return Refused(_error_of(found, call))
        if meaning is Meaning.THROTTLED:
            return Throttled(default_delay_s(estimate_bytes) if found.after_s is None else found.after_s)
        if call.attempt >= (max_attempts if found.limit is None else min(max_attempts, found.limit + 1)):
            return Refused(found.error)
        return Retry(delay_s(call.attempt, hint_s=found.after_s, draw=self._draw()))


def _error_of(found: verdict.Fatal | None, call: Call) -> Exception:
    if found is not None:
        return found.error
    return APIError("the server sent us elsewhere", method=call.method, path=call.path, attempts=call.attempt)
