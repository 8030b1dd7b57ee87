"""A look at rate limiters."""

from __future__ import annotations

from tinker_sync.runtime.rate_limiter import RateLimiter


def closed_s(limiter: RateLimiter) -> float:
    """Return the seconds until the pause of a limiter is over; 0 without a pause."""
    return limiter.pause_left_s()
