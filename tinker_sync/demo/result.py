"""What came of a demo, and whether it is good enough. Pure values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import attrs

from tinker_sync.demo.student import Telling

LOSS_SHARE: Final = 1 / 3
"""The loss must fall to less than this share of what it was."""
SORTED_SHARE: Final = 0.5
"""So much more of the problems must be sorted right, unless nearly all are."""
NEARLY_ALL: Final = 0.9
REWARD_GAIN: Final = 0.3
"""By so much must the mean reward rise, unless it is nearly 1."""
_WINDOW: Final = 5


@attrs.frozen
class Steps:
    """How many steps each lesson takes.

    >>> Steps(supervised=8).reinforced
    30
    """

    supervised: int = 80
    reinforced: int = 30


def ends(curve: Sequence[float]) -> tuple[float, float]:
    """The means of its first and last values.

    >>> ends([4.0, 2.0])
    (4.0, 2.0)
    """
    window = max(1, min(_WINDOW, len(curve) // 2))
    first, last = curve[:window], curve[-window:]
    return sum(first) / len(first), sum(last) / len(last)


@attrs.frozen(kw_only=True)
class DemoResult:
    """What came of a demo.

    Attributes:
        losses: of each supervised step, per token; steps that were lost and repeated count once.
        rewards: of each step of reinforcement learning, the mean over its stories.
        checkpoint: where training was taken up again.
        resumed_at: after how many steps that was.
        lost: losses of the steps that were lost with the process that made them.
        lost_exactly: whether repeating them must give the very same numbers.
        sorted_before, sorted_after: the share of the exam's problems that were sorted right.
        stories_before, stories_after: a story about each of some animals.
        seconds: how long it all took.
    """

    losses: tuple[float, ...]
    rewards: tuple[float, ...]
    checkpoint: str
    resumed_at: int
    lost: tuple[float, ...]
    lost_exactly: bool
    sorted_before: float
    sorted_after: float
    stories_before: tuple[Telling, ...]
    stories_after: tuple[Telling, ...]
    seconds: float

    @property
    def repeated(self) -> tuple[float, ...]:
        """The losses of the same steps, made again from the checkpoint."""
        return self.losses[self.resumed_at : self.resumed_at + len(self.lost)]

    @property
    def problems(self) -> list[str]:
        """What did not go as it must; empty when all is well."""
        found = []
        (loss, last_loss), (reward, last_reward) = ends(self.losses), ends(self.rewards)
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
        """0 if both curves went where they must, by a margin; else 1."""
        return 1 if self.problems else 0
