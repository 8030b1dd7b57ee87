"""The outcome of a demo and the checks that it must pass. Pure values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

from tinker_sync.demo.student import RewardedStory

LOSS_SHARE: Final = 1 / 3
"""The mean of the last losses must be below this share of the mean of the first."""
SORTED_SHARE: Final = 0.5
"""The share of right answers must rise by this much, or reach `NEARLY_ALL`."""
NEARLY_ALL: Final = 0.9
REWARD_GAIN: Final = 0.3
"""The mean reward must rise by this much, or reach `NEARLY_ALL`."""
_WINDOW: Final = 5


@attrs.frozen
class Steps:
    """The number of steps of each lesson.

    >>> Steps(supervised=8).reinforced
    30
    """

    supervised: int = 80
    reinforced: int = 30


def measure_ends(curve: Sequence[float]) -> tuple[float, float]:
    """Return the mean of the first values of a curve, and the mean of its last values.

    Each mean covers five values, or half of a curve of fewer than ten, but at least one value.

    >>> measure_ends([4.0, 2.0])
    (4.0, 2.0)
    """
    window = max(1, min(_WINDOW, len(curve) // 2))
    first, last = curve[:window], curve[-window:]
    return sum(first) / len(first), sum(last) / len(last)


@attrs.frozen(kw_only=True)
class DemoResult:
    """The outcome of a demo.

    Attributes:
        losses: the loss per token of each supervised step; a repeated step counts once.
        rewards: the mean reward of each step of reinforcement learning.
        checkpoint: the checkpoint from which training resumed.
        resumed_at: the number of steps before that checkpoint.
        lost: the losses of the steps after the checkpoint in the killed process.
        lost_exactly: True if the steps after the checkpoint, repeated, must give the same losses.
        sorted_before, sorted_after: the share of right answers to `make_exam`.
        stories_before, stories_after: sampled stories, one for each of the same few animals.
        seconds: the duration of the demo.
    """

    losses: tuple[float, ...]
    rewards: tuple[float, ...]
    checkpoint: str
    resumed_at: int
    lost: tuple[float, ...]
    lost_exactly: bool
    sorted_before: float
    sorted_after: float
    stories_before: tuple[RewardedStory, ...]
    stories_after: tuple[RewardedStory, ...]
    seconds: float

    @property
    def repeated(self) -> tuple[float, ...]:
        """The losses of the lost steps, repeated from the checkpoint."""
        return self.losses[self.resumed_at : self.resumed_at + len(self.lost)]

    @property
    def problems(self) -> list[str]:
        """The checks that failed, as texts; empty if all passed."""
        found = []
        (loss, last_loss), (reward, last_reward) = measure_ends(self.losses), measure_ends(self.rewards)
        if not last_loss < loss * LOSS_SHARE:
            found.append(f"the loss went from {loss:.2f} to {last_loss:.2f}, not below a third")
        if not self.sorted_after >= min(self.sorted_before + SORTED_SHARE, NEARLY_ALL):
            found.append(f"sorted right: {self.sorted_before:.0%} before, {self.sorted_after:.0%} after")
        if not last_reward >= min(reward + REWARD_GAIN, NEARLY_ALL):
            found.append(f"the reward went from {reward:.2f} to {last_reward:.2f}")
        again = zip(self.lost, self.repeated, strict=True)
        if self.lost_exactly and not all(math.isclose(one, two, rel_tol=1e-9) for one, two in again):
            found.append("the steps after the checkpoint, repeated, gave other losses")
        return found

    @property
    def exit_code(self) -> int:
        """0 if all checks passed, else 1."""
        return 1 if self.problems else 0
