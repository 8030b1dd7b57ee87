"""`FaultPlan`: the calls that go wrong, their faults, and the time that calls take.

A plan is immutable and any thread may read it. It does not count calls: `_scene` does, so several servers can
use one plan.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from tinker_sync._base.left_out import refuse_arguments
from tinker_sync.errors import InvalidInputError
from tinker_sync.testing.faults import Fault
from tinker_sync.wire.endpoints import ENDPOINTS, NEWER

if TYPE_CHECKING:
    from tinker_sync.testing.calls import RecordedCall

EVERY: Final = "*"
"""The name that matches every call, also one to an unknown path."""

Nth = int | Container[int] | None
When = Callable[["RecordedCall"], object]


@frozen
class FaultRule:
    """A part of a `FaultPlan`: a fault, and the calls of one endpoint, or of all, to which it happens."""

    endpoint: str
    fault: Fault
    nth: Nth = None
    """Numbers of the matching calls, from 1; None: every one."""
    when: When | None = None
    """A predicate on calls; the rule counts only calls for which it is true."""

    def matches(self, call: RecordedCall) -> bool:
        """Return True if the call is of the rule's endpoint and `when` is true for it."""
        return self.endpoint in (EVERY, call.endpoint) and (self.when is None or bool(self.when(call)))

    def strikes(self, number: int) -> bool:
        """Return True if the rule applies to the n-th matching call.

        >>> from tinker_sync.testing import faults
        >>> rule = FaultRule("asample", faults.reset(), nth=range(2, 4))
        >>> [rule.strikes(number) for number in (1, 2, 3, 4)]
        [False, True, True, False]
        """
        if self.nth is None:
            return True
        return number == self.nth if isinstance(self.nth, int) else number in self.nth


@frozen
class EndpointLatency:
    """A part of a `FaultPlan`: the delay before the server begins with a call of one endpoint, or of all."""

    endpoint: str
    seconds: float


@frozen
class FaultPlan:
    """The faults and latencies of one test. Immutable: `on` and `latency` return a longer plan.

    Endpoints have the names of `tinker_sync.wire.endpoints`; "*" is every call. If several rules apply to a
    call, the first one decides.

    >>> from tinker_sync.testing import FaultPlan, faults
    >>> plan = (
    ...     FaultPlan()
    ...     .on("asample", faults.too_many_requests(retry_after=3), nth=2)
    ...     .on("forward_backward", faults.lost_answer(), nth=range(1, 4))
    ...     .latency("*", 0.05)
    ... )
    >>> [rule.endpoint for rule in plan.rules]
    ['asample', 'forward_backward']
    >>> plan.on("assample", faults.reset())
    Traceback (most recent call last):
    tinker_sync.errors.InvalidInputError: no call is named 'assample'; did you mean 'asample'?
    """

    rules: tuple[FaultRule, ...] = field(default=(), kw_only=True)
    paces: tuple[EndpointLatency, ...] = field(default=(), kw_only=True)

    def __init__(
        self,
        *,
        rules: tuple[FaultRule, ...] = (),
        paces: tuple[EndpointLatency, ...] = (),
        **unknown: object,
    ) -> None:
        refuse_arguments("FaultPlan", unknown, unknown=True)
        self.__attrs_init__(rules=rules, paces=paces)  # type: ignore[attr-defined]  # attrs makes it

    def on(self, endpoint: str, fault: Fault, *, nth: Nth = None, when: When | None = None) -> FaultPlan:
        """Return this plan with one more fault.

        Args:
            endpoint: the endpoint whose calls go wrong.
            fault: a value of `tinker_sync.testing.faults`.
            nth: which of these calls, counted from 1: a number, or a range or collection of numbers. None:
                every call.
            when: a predicate on the recorded call; `nth` then counts only calls for which it is true.

        Raises:
            InvalidInputError: the endpoint does not exist, `nth` is not valid, or `fault` is not a fault.
        """
        if not isinstance(fault, Fault):
            raise InvalidInputError(
                f"{fault!r} is not a fault; use the functions of tinker_sync.testing.faults"
            )
        rule = FaultRule(check_endpoint(endpoint), fault, _check_nth(nth), when)
        return evolve(self, rules=(*self.rules, rule))

    def latency(self, endpoint: str, seconds: float) -> FaultPlan:
        """Return this plan with one more delay, before the server begins with a call of an endpoint.

        If several delays match a call, the first one counts.

        Args:
            endpoint: the endpoint.
            seconds: the delay.

        Raises:
            InvalidInputError: the endpoint does not exist, or the number is negative.
        """
        given: object = seconds  # 0.2 took functions too
        if not isinstance(given, (int, float)) or not given >= 0:
            raise InvalidInputError(f"a latency must be a number of seconds from 0, not {seconds!r}")
        return evolve(self, paces=(*self.paces, EndpointLatency(check_endpoint(endpoint), seconds)))

    def latency_of(self, endpoint: str) -> float:
        """Return the latency of the calls of an endpoint in seconds.

        >>> FaultPlan().latency("asample", 0.25).latency_of("asample")
        0.25
        """
        return next((pace.seconds for pace in self.paces if pace.endpoint in (EVERY, endpoint)), 0.0)


def check_endpoint(name: str) -> str:
    """Check the name of an endpoint and return it unchanged. "*" stands for every endpoint.

    Raises:
        InvalidInputError: there is no such endpoint; the text lists similar names, or else all.
    """
    known = (*ENDPOINTS, *NEWER)
    if name == EVERY or name in known:
        return name
    written = str(name).lower().rpartition("/")[2]  # the last part, in case it is a path
    close = difflib.get_close_matches(written, known, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {', '.join(known)}"
    raise InvalidInputError(f"no call is named {name!r}; {hint}")


def _check_nth(nth: Any) -> Nth:
    if isinstance(nth, (str, bytes)) or not (nth is None or isinstance(nth, (int, Container))):
        raise InvalidInputError(f"nth must be a number, or a range or collection of numbers, not {nth!r}")
    if isinstance(nth, range):
        if not nth or min(nth) < 1:
            raise InvalidInputError(f"calls are counted from 1, so there are no calls {nth!r}")
        return nth
    numbers = [nth] if isinstance(nth, int) else nth if isinstance(nth, (list, tuple, set, frozenset)) else []
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
        raise InvalidInputError(f"calls are counted from 1, so there is no call {nth!r}")
    # Copied, so that a later change of the list does not change the plan.
    return tuple(sorted(nth)) if isinstance(nth, (list, set)) else nth
