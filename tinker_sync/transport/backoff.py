"""How long to wait before the next try: pure arithmetic.

The caller brings the random draw, so a test knows every delay beforehand.
"""

from __future__ import annotations

from typing import Final

FIRST_S: Final = 0.5
# Long enough to be gentle over minutes of outage, short enough to be back soon after its end.
LONGEST_S: Final = 30.0
# Delays are shortened by up to a quarter, so that clients which failed together do not return together.
_JITTER: Final = 0.25
# A server's own wish is a lower bound: it is only ever lengthened, by a tenth and at most a second.
_HINT_JITTER: Final = 0.1
_HINT_JITTER_S: Final = 1.0
# 2 ** 1000 is a float, 2 ** 2000 is not; long before that the cap decides.
_MAX_EXPONENT: Final = 20


def delay_s(failures: int, *, hint_s: float | None = None, draw: float) -> float:
    """Seconds to wait after the n-th failure in a row.

    Args:
        failures: How often it has failed, from 1.
        hint_s: What the server asked for; None or nothing positive when it did not.
        draw: A random number from 0 to 1.

    >>> [delay_s(n, draw=1.0) for n in (1, 2, 3, 7, 100)]
    [0.5, 1.0, 2.0, 30.0, 30.0]
    >>> delay_s(1, draw=0.0), delay_s(1, hint_s=100.0, draw=0.0), delay_s(1, hint_s=100.0, draw=1.0)
    (0.375, 100.0, 101.0)
    """
    if hint_s is not None and hint_s > 0:
        return hint_s + min(hint_s * _HINT_JITTER, _HINT_JITTER_S) * draw
    exponent = min(max(failures, 1) - 1, _MAX_EXPONENT)
    return min(FIRST_S * 2.0**exponent, LONGEST_S) * (1 - _JITTER + _JITTER * draw)
