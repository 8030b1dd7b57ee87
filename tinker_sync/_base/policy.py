"""The policy for failures: the meaning of each status at each stage, and the pause before a retry.

One table has the meanings for all stages. The code of each stage keeps its own clock, counts and deadlines,
and looks up each status here. The `Rule` of a status decides if a request may be retried, unless a header of
the answer decides it; the stages keep no lists of such statuses. Pure functions: any thread may call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple


class Stage(Enum):
    """The kind of request that a status answers."""

    CALL = "a call whose answer is its result"
    SUBMIT = "a sample that is submitted; the answer is a promise"
    RETRIEVE = "a poll for the result of one promise"
    SESSION_POLL = "a poll for all promises of a sampling session"
    FILE = "a part of a file, at a signed address"


class Meaning(Enum):
    """The meaning of a status for the request that it answers."""

    FINAL = "another try would end the same way"
    RETRY = "it may pass; the server may have begun the work"
    UNTOUCHED = "it may pass; the server has probably not begun the work"
    THROTTLED = "the server asks for less; every request of this kind pauses"
    BLOCKED = "the account is blocked; it is waited for as long as the server allows"
    NO_NEWS = "a long poll has ended without news"
    NOT_READY = "the result is not ready"
    SUSPECT = "a refusal that a machine in between may have made; a few tries tell"
    FORGOTTEN = "the server has forgotten the promise"
    MOVED = "the address is no longer valid; a new one may be"
    UNWANTED = "the server does not offer or does not want this; it is not asked again"


class Rule(NamedTuple):
    """An entry of the table: the meaning of a status, and the most retries after it; None sets no limit."""

    meaning: Meaning
    limit: int | None = None

    @property
    def passes(self) -> bool:
        """True for a failure that may pass. The stages handle other meanings, such as `SUSPECT`."""
        return self.meaning in (Meaning.RETRY, Meaning.UNTOUCHED, Meaning.THROTTLED, Meaning.BLOCKED)


_FINAL: Final = Rule(Meaning.FINAL)
_RETRY: Final = Rule(Meaning.RETRY)
_UNTOUCHED: Final = Rule(Meaning.UNTOUCHED)
_THROTTLED: Final = Rule(Meaning.THROTTLED)
_BLOCKED: Final = Rule(Meaning.BLOCKED)
_NO_NEWS: Final = Rule(Meaning.NO_NEWS)
_NOT_READY: Final = Rule(Meaning.NOT_READY)
_FORGOTTEN: Final = Rule(Meaning.FORGOTTEN)
_MOVED: Final = Rule(Meaning.MOVED)
_UNWANTED: Final = Rule(Meaning.UNWANTED)

# The conflict may be a short lock. A conflict that persists is real.
_CONFLICT: Final = Rule(Meaning.RETRY, 2)
# The server probably fails at this request again. Calls that training needs are retried for longer.
_BROKEN: Final = Rule(Meaning.RETRY, 4)
# The server states a reason; a 400 without one comes from a proxy that refused the connection.
_NO_REASON: Final = Rule(Meaning.UNTOUCHED, 4)
_BAD_POLL: Final = Rule(Meaning.SUSPECT, 3)
# Right after a submit, another machine of the server may not have the promise yet.
_UNKNOWN_YET: Final = Rule(Meaning.SUSPECT, 3)

# A request fails with the third answer that cannot be read; fewer may come from a proxy on the way.
_ODD: Final = Rule(Meaning.RETRY, 2)

BLOCKED_PAUSE_S: Final = 5.0
"""The pause before another try after a 402, at every stage: the user may pay meanwhile."""

EMPTY_400: Final = -400
"""The key in the table for a 400 without a body."""
UNREADABLE: Final = -1
"""The key in the table for an answer that cannot be read."""

_STAGES: Final = tuple(Stage)
_4XX: Final = 4
_5XX: Final = 5

#              CALL        SUBMIT      RETRIEVE      SESSION_POLL  FILE
TABLE: Final[Mapping[int, tuple[Rule, ...]]] = {
    UNREADABLE: (_ODD, _ODD, _ODD, _ODD, _ODD),
    EMPTY_400: (_NO_REASON, _NO_REASON, _RETRY, _UNWANTED, _MOVED),
    400: (_FINAL, _FINAL, _BAD_POLL, _UNWANTED, _MOVED),
    401: (_FINAL, _FINAL, _FINAL, _UNWANTED, _MOVED),
    402: (_BLOCKED, _BLOCKED, _BLOCKED, _RETRY, _FINAL),
    403: (_FINAL, _FINAL, _FINAL, _UNWANTED, _MOVED),
    404: (_FINAL, _FINAL, _UNKNOWN_YET, _UNWANTED, _MOVED),
    405: (_FINAL, _FINAL, _FINAL, _UNWANTED, _FINAL),
    408: (_UNTOUCHED, _UNTOUCHED, _NO_NEWS, _RETRY, _UNTOUCHED),
    409: (_CONFLICT, _CONFLICT, _FINAL, _RETRY, _FINAL),
    410: (_FINAL, _FINAL, _FORGOTTEN, _UNWANTED, _MOVED),
    422: (_FINAL, _FINAL, _BAD_POLL, _UNWANTED, _FINAL),
    425: (_UNTOUCHED, _UNTOUCHED, _NOT_READY, _RETRY, _UNTOUCHED),
    429: (_UNTOUCHED, _THROTTLED, _RETRY, _RETRY, _UNTOUCHED),
    500: (_BROKEN, _RETRY, _RETRY, _RETRY, _RETRY),
    501: (_FINAL, _FINAL, _RETRY, _RETRY, _FINAL),
    503: (_UNTOUCHED, _UNTOUCHED, _RETRY, _RETRY, _UNTOUCHED),
    505: (_FINAL, _FINAL, _RETRY, _RETRY, _FINAL),
    507: (_RETRY, _RETRY, _RETRY, _RETRY, _FINAL),
    # All other statuses of the same hundred.
    _4XX: (_FINAL, _FINAL, _FINAL, _UNWANTED, _FINAL),
    _5XX: (_RETRY, _RETRY, _RETRY, _RETRY, _RETRY),
}
_ANY_OTHER: Final = (_FINAL, _FINAL, _FINAL, _UNWANTED, _FINAL)

NO_SUCH_CALL: Final = frozenset({404, 405, 501})
"""Statuses with which a server answers a call that it does not offer."""


def rule_for(status: int, stage: Stage) -> Rule:
    """Return the rule for a status at a stage.

    >>> rule_for(503, Stage.CALL).meaning, rule_for(404, Stage.FILE).meaning
    (<Meaning.UNTOUCHED: 'it may pass; the server has probably not begun the work'>, \
<Meaning.MOVED: 'the address is no longer valid; a new one may be'>)
    >>> rule_for(503, Stage.CALL).passes, rule_for(501, Stage.CALL).passes
    (True, False)

    Args:
        status: the status of the answer, or `EMPTY_400` for a 400 without a body.
        stage: the stage of the request at which the status arrives.
    """
    row = TABLE.get(status) or TABLE.get(status // 100) or _ANY_OTHER
    return row[_STAGES.index(stage)]


class Ledger:
    """The failures of one request at a stage, counted by status. For one thread at a time.

    >>> ledger = Ledger(Stage.CALL)
    >>> [ledger.is_spent(409) for _ in range(3)], ledger.is_spent(503), ledger.count(409)
    ([False, False, True], False, 3)
    """

    __slots__ = ("_counts", "stage")

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._counts: dict[int, int] | None = None  # most requests have no failure

    def is_spent(self, status: int) -> bool:
        """Count a failure, and return True if the table allows no further retry after this status."""
        self._counts = self._counts or {}
        self._counts[status] = count = self.count(status) + 1
        limit = rule_for(status, self.stage).limit
        return limit is not None and count > limit

    def count(self, *statuses: int) -> int:
        """Return how many failures had one of these statuses."""
        counts = self._counts or {}
        return sum(counts.get(status, 0) for status in statuses)

    def forget(self) -> None:
        """Count from the beginning, because the request has made progress."""
        self._counts = None


# Gateways send the others too, and a gateway may have passed the request on before.
_REFUSALS: Final = frozenset({400, 401, 402, 403, 404, 405, 409, 410, 415, 422})
_TOO_LARGE: Final = 413


def proves_refusal(status: int, body: object) -> bool:
    """Return True if an answer proves that the server has not carried out the request that it answers.

    The server's own code refuses a request with a JSON error. Whoever answers 413 has passed nothing on.

    >>> proves_refusal(422, {"detail": "no such loss"}), proves_refusal(403, "<h1>Forbidden</h1>")
    (True, False)
    >>> proves_refusal(503, {"detail": "upstream reset"})
    False

    Args:
        status: the status of the answer.
        body: the body of the answer: parsed JSON, else text, else None.
    """
    return status == _TOO_LARGE or (status in _REFUSALS and isinstance(body, dict) and bool(body))


EQUAL_ERRORS: Final = 8
"""A poll of an open server fails with this many answers 500 in a row that have one JSON error: the result
cannot be sent. Fewer, over a minute, may come from a short outage. The vendor's servers are behind gateways,
whose errors are equal in an outage too, so their polls go on for as long as trouble may last.
"""

FIRST_S: Final = 0.5
# Long enough to spare the server in an outage of minutes, short enough to resume soon after its end.
LONGEST_S: Final = 30.0
# Delays are shortened by up to a quarter, so that clients that failed together do not retry together.
_JITTER: Final = 0.25
# The pause that a server requests is a lower bound; it is lengthened by up to a tenth, at most a second.
_HINT_JITTER: Final = 0.1
_HINT_JITTER_S: Final = 1.0
# Larger exponents overflow a float (2.0 ** 2000); the longest delay applies long before.
_MAX_EXPONENT: Final = 20


def delay_s(
    failures: int,
    *,
    draw: float,
    hint_s: float | None = None,
    first_s: float = FIRST_S,
    longest_s: float = LONGEST_S,
) -> float:
    """Return the seconds to wait after a failure, before the next try.

    Args:
        failures: the failures in a row so far, from 1.
        draw: a random number from 0 to 1. The result grows with it: from `hint_s` to a tenth (at most a
            second) more, or without `hint_s` from three quarters of the delay to the whole delay.
        hint_s: the pause that the server asked for, if it did. It replaces the delay, even if it is longer
            than `longest_s`.
        first_s: the delay after the first failure. The delay doubles with each further failure.
        longest_s: the longest delay.

    >>> [delay_s(n, draw=1.0) for n in (1, 2, 3, 7, 100)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    >>> delay_s(1, draw=0.0), delay_s(1, hint_s=100.0, draw=0.0), delay_s(1, hint_s=100.0, draw=1.0)
    (0.375, 100.0, 101.0)
    """
    if hint_s is not None and hint_s > 0:
        return hint_s + min(hint_s * _HINT_JITTER, _HINT_JITTER_S) * draw
    exponent = min(max(failures, 1) - 1, _MAX_EXPONENT)
    return min(first_s * 2.0**exponent, longest_s) * (1 - _JITTER + _JITTER * draw)
