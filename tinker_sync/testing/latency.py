"""The time that a call takes: a constant, or a distribution to draw from.

Everything is immutable and pure. The functions that make a distribution raise InvalidInputError for times
that are not valid. The caller passes the random generator, so equal seeds give equal times.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from attrs import frozen

from tinker_sync.errors import InvalidInputError

Latency = float | Callable[[random.Random], float]
"""Seconds, or a function that draws seconds from a generator."""


@frozen
class Uniform:
    """A uniform distribution: any time from `low_s` to `high_s`."""

    low_s: float
    high_s: float

    def __call__(self, generator: random.Random) -> float:
        return generator.uniform(self.low_s, self.high_s)


@frozen
class Exponential:
    """An exponential distribution: mostly short times, sometimes several times the mean."""

    mean_s: float

    def __call__(self, generator: random.Random) -> float:
        return generator.expovariate(1.0) * self.mean_s


@frozen
class LogNormal:
    """A log-normal distribution, as of a busy service: around a median, with a long tail."""

    median_s: float
    sigma: float

    def __call__(self, generator: random.Random) -> float:
        return generator.lognormvariate(0.0, self.sigma) * self.median_s


def uniform(low_s: float, high_s: float) -> Uniform:
    """Return a uniform distribution: any time from `low_s` to `high_s`.

    >>> 0.1 <= uniform(0.1, 0.3)(random.Random(7)) <= 0.3
    True
    """
    if not 0 <= low_s <= high_s:
        raise InvalidInputError(f"times from {low_s!r} to {high_s!r} are not a range of numbers from 0")
    return Uniform(low_s, high_s)


def exponential(mean_s: float) -> Exponential:
    """Return an exponential distribution: mostly short times, sometimes several times the mean.

    >>> round(exponential(2.0)(random.Random(7)), 3)
    0.783
    """
    return Exponential(_check_not_negative(mean_s, "mean_s"))


def lognormal(median_s: float, sigma: float = 0.5) -> LogNormal:
    """Return a log-normal distribution; a larger `sigma` gives a longer tail.

    >>> round(lognormal(2.0, sigma=0.0)(random.Random(7)), 3)
    2.0
    """
    return LogNormal(_check_not_negative(median_s, "median_s"), _check_not_negative(sigma, "sigma"))


def draw_latency(latency: Latency, generator: random.Random) -> float:
    """Return the latency of one call in seconds, at least 0.

    >>> draw_latency(0.5, random.Random(7))
    0.5
    """
    return max(latency(generator) if callable(latency) else latency, 0.0)


def _check_not_negative(value: float, name: str) -> float:
    if not value >= 0:
        raise InvalidInputError(f"{name} must be a number from 0, not {value!r}")
    return value
