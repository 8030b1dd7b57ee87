"""How long a server takes, as values: always the same, or drawn from a distribution.

Immutable and pure; the generator is given, so equal seeds give equal times.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from attrs import frozen

from tinker_sync.errors import InvalidInputError

Latency = float | Callable[[random.Random], float]
"""Seconds, or what draws seconds from a generator."""


@frozen
class Uniform:
    """Any time between two, each as likely as another."""

    low_s: float
    high_s: float

    def __call__(self, generator: random.Random) -> float:
        return generator.uniform(self.low_s, self.high_s)


@frozen
class Exponential:
    """Mostly short, now and then several times the mean."""

    mean_s: float

    def __call__(self, generator: random.Random) -> float:
        return generator.expovariate(1.0) * self.mean_s


@frozen
class LogNormal:
    """As a busy service is: around a median, with a long tail."""

    median_s: float
    sigma: float

    def __call__(self, generator: random.Random) -> float:
        return generator.lognormvariate(0.0, self.sigma) * self.median_s


def uniform(low_s: float, high_s: float) -> Uniform:
    """Any time between two.

    >>> 0.1 <= uniform(0.1, 0.3)(random.Random(7)) <= 0.3
    True
    """
    if not 0 <= low_s <= high_s:
        raise InvalidInputError(f"times go from {low_s!r} to {high_s!r}, which is no range from 0 upwards")
    return Uniform(low_s, high_s)


def exponential(mean_s: float) -> Exponential:
    """Mostly short, now and then several times the mean.

    >>> round(exponential(2.0)(random.Random(7)), 3)
    0.783
    """
    return Exponential(_positive(mean_s, "mean_s"))


def lognormal(median_s: float, sigma: float = 0.5) -> LogNormal:
    """Around a median, with a long tail: the larger `sigma`, the longer.

    >>> round(lognormal(2.0, sigma=0.0)(random.Random(7)), 3)
    2.0
    """
    return LogNormal(_positive(median_s, "median_s"), _positive(sigma, "sigma"))


def drawn(latency: Latency, generator: random.Random) -> float:
    """Seconds for one call.

    >>> drawn(0.5, random.Random(7))
    0.5
    """
    return max(latency(generator) if callable(latency) else latency, 0.0)


def _positive(value: float, name: str) -> float:
    if not value >= 0:
        raise InvalidInputError(f"{name} is a number from 0, not {value!r}")
    return value
