"""The wait after a 402 (payment required).

The server answers 402 while the account cannot pay. Most calls are repeated for a limited time, in which the
user may pay, and then fail.
"""

from __future__ import annotations

import threading
from typing import Final

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.log import Log

_LOG_EVERY_S: Final = 60.0
# After this long without a 402 the incident is over, and the next 402 begins a new one.
_INCIDENT_ENDS_AFTER_S: Final = 300.0

_log = Log("tinker_sync.billing")


class BillingPause:
    """The decision about calls with an answer 402: repeat the call after a pause, or fail it. Thread-safe.

    Args:
        max_pause_s: the time after the first 402 in which calls are repeated. After five minutes without a
            402, the next one counts as the first again.
        clock: measures time.

    >>> BillingPause(3600).may_pause()
    True
    >>> BillingPause(0).may_pause()
    False
    """

    def __init__(self, max_pause_s: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_at: float | None = None  # guarded by _lock
        self._seen_at: float | None = None  # guarded by _lock
        self._logged_at: float | None = None  # guarded by _lock

    def may_pause(self) -> bool:
        """Record and log a 402. Return True if the call should be repeated after a pause, else False.

        While calls are repeated, this logs at most once a minute.
        """
        now = self._clock.now()
        with self._lock:
            if self._seen_at is None or now - self._seen_at > _INCIDENT_ENDS_AFTER_S:
                self._began_at = self._logged_at = None
            self._seen_at = now
            began_at = self._began_at = now if self._began_at is None else self._began_at
            over = now - began_at >= self.max_pause_s
            say = over or self._logged_at is None or now - self._logged_at >= _LOG_EVERY_S
            if say:
                self._logged_at = now
        if over:
            _log.error("the account is still blocked after %.0f s; not waiting any longer", now - began_at)
        elif say:
            _log.warning("the account is blocked; waiting up to %.0f s for that to change", self.max_pause_s)
        return not over
