"""`FaultPlan`: which calls go wrong, and how; and how long each takes. Immutable; any thread may read it.

A plan only says what is to happen. Counting calls is the server's business, so one plan may be used by many.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.testing.faults import Fault
from tinker_sync.testing.latency import Latency, drawn
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.testing.calls import RecordedCall

EVERY: Final = "*"
"""Stands for every call of the protocol."""

Nth = int | Container[int] | None
When = Callable[["RecordedCall"], object]


@frozen
class Rule:
    """Something goes wrong with some calls of one endpoint."""

    endpoint: str
    fault: Fault
    nth: Nth = None
    """Which of the calls that fit, from 1; None: each of them."""
    when: When | None = None
    """Says of a call whether it is meant."""

    def concerns(self, call: RecordedCall) -> bool:
        """Whether a call is one of those that are counted."""
        return self.endpoint in (EVERY, call.endpoint) and (self.when is None or bool(self.when(call)))

    def strikes(self, number: int) -> bool:
        """Whether the fault happens to the n-th of them.

        >>> from tinker_sync.testing import faults
        >>> rule = Rule("asample", faults.reset(), nth=range(2, 4))
        >>> [rule.strikes(number) for number in (1, 2, 3, 4)]
        [False, True, True, False]
        """
        if self.nth is None:
            return True
        return number == self.nth if isinstance(self.nth, int) else number in self.nth


@frozen
class Pace:
    """Calls of one endpoint take this long before the server begins."""

    endpoint: str
    seconds: Latency


@frozen
class FaultPlan:
    """What goes wrong, in the words of a test. Immutable: each method gives a new plan with one thing more.

    Endpoints are named as in `tinker_sync.wire.endpoints`; "*" is every call. Where several rules fit a call,
    the one written first decides.

    Args:
        seed: for times that are drawn from a distribution.

    >>> from tinker_sync.testing import FaultPlan, faults, latency
    >>> plan = (
    ...     FaultPlan(seed=1)
    ...     .on("asample", faults.too_many_requests(retry_after=3), nth=2)
    ...     .on("forward_backward", faults.lost_answer(), nth=range(1, 4))
    ...     .latency("*", latency.exponential(0.05))
    ... )
    >>> [rule.endpoint for rule in plan.rules]
    ['asample', 'forward_backward']
    >>> plan.on("assample", faults.reset())
    Traceback (most recent call last):
    tinker_sync.errors.InvalidInputError: no call is named 'assample'; did you mean 'asample'?
    """

    seed: int = 0
    rules: tuple[Rule, ...] = field(default=(), kw_only=True)
    paces: tuple[Pace, ...] = field(default=(), kw_only=True)

    def on(self, endpoint: str, fault: Fault, *, nth: Nth = None, when: When | None = None) -> FaultPlan:
        """The same plan, with a fault more.

        Args:
            endpoint: the call that is to go wrong.
            fault: how; see `tinker_sync.testing.faults`.
            nth: which of these calls, counted from 1: a number, or a range or collection of numbers.
                None: each.
            when: says of a recorded call whether it is meant; `nth` then counts only those.

        Raises:
            InvalidInputError: there is no such endpoint, or no such call of it.
        """
        if not isinstance(fault, Fault):
            raise InvalidInputError(f"{fault!r} is no fault; tinker_sync.testing.faults makes them")
        rule = Rule(check_endpoint(endpoint), fault, _nth(nth), when)
        return evolve(self, rules=(*self.rules, rule))

    def latency(self, endpoint: str, seconds: Latency) -> FaultPlan:
        """The same plan, with calls that take some time before the server begins with them.

        Args:
            endpoint: the call.
            seconds: how long; a number, or a distribution of `tinker_sync.testing.latency`.
        """
        if not callable(seconds) and not seconds >= 0:
            raise InvalidInputError(f"a latency is a number of seconds from 0, not {seconds!r}")
        return evolve(self, paces=(*self.paces, Pace(check_endpoint(endpoint), seconds)))

    def latency_of(self, endpoint: str, number: int) -> float:
        """How long the n-th call of an endpoint takes. Equal seeds, equal times, whatever else goes on.

        >>> FaultPlan().latency("asample", 0.25).latency_of("asample", 1)
        0.25
        """
        for pace in self.paces:
            if pace.endpoint in (EVERY, endpoint):
                # Test data, not a secret.
                generator = random.Random(f"{self.seed} {endpoint} {number}")  # noqa: S311
                return drawn(pace.seconds, generator)
        return 0.0


def check_endpoint(name: str) -> str:
    """The name of an endpoint, if there is such a one.

    Raises:
        InvalidInputError: there is none; the text says which are near.
    """
    if name == EVERY or name in ENDPOINTS:
        return name
    written = str(name).lower().rpartition("/")[2]  # a path, perhaps
    close = difflib.get_close_matches(written, ENDPOINTS, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"there are {', '.join(ENDPOINTS)}"
    raise InvalidInputError(f"no call is named {name!r}; {hint}")


def _nth(nth: Any) -> Nth:
    if isinstance(nth, (str, bytes)) or not (nth is None or isinstance(nth, (int, Container))):
        raise InvalidInputError(f"nth is a number, or a range or collection of numbers, not {nth!r}")
    if isinstance(nth, range):
        if not nth or min(nth) < 1:
            raise InvalidInputError(f"calls are counted from 1, so there are no calls {nth!r}")
        return nth
    numbers = [nth] if isinstance(nth, int) else nth if isinstance(nth, (list, tuple, set, frozenset)) else []
    if any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in numbers):
        raise InvalidInputError(f"calls are counted from 1, so there is no call {nth!r}")
    # A plan must not change when a list does.
    return tuple(sorted(nth)) if isinstance(nth, (list, set)) else nth
