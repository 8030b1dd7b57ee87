"""`Board`: the named actor through which the processes of a cluster share refusals and usage.

It is in the namespace `tinker_sync` of the cluster, and ends with the process that made it. The other
processes then use their own limits until they have made a new board, and report their usage to it again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import ray
from attrs import define, field, frozen

from tinker_sync.usage.counts import TokenCounts

NAME: Final = "tinker-sync-board"
NAMESPACE: Final = "tinker_sync"
HOLD_S: Final = 10.0
"""The longest time that a call of `Board.follow` waits for a change."""

_FORGET_S: Final = 3 * HOLD_S
# Each process that waits in `follow` occupies one thread of the board; a thousand idle threads take 10 MB.
_THREADS: Final = 1000


@frozen
class News:
    """The state of a shared limit after a change, for one process."""

    version: int
    delay_s: float
    """The seconds for which the process must send nothing.

    It is 0 if no refusal is in force, or if this process announced the last one.
    """
    processes: int
    """The number of processes that share the limit."""
    rank: int
    """The position of this process among them, from 0."""


@define(eq=False)
class _SharingGroup:
    """The processes that use one server with one key. Guarded by the lock of the board."""

    version: int = 0
    closed_until_s: float = 0.0
    closed_by: str = ""
    seen_at_s: dict[str, float] = field(factory=dict)
    left: set[str] = field(factory=set)
    usage: dict[str, dict[str, TokenCounts]] = field(factory=dict)


class Board:
    """The refusals, processes and usage of each `_SharingGroup`. Runs as an actor with many threads.

    >>> board = Board()
    >>> board.follow("server", "a", version=0, hold_s=0).processes
    1
    >>> board.announce("server", "a", 30.0)
    >>> news = board.follow("server", "b", version=0, hold_s=0)
    >>> news.delay_s > 29, news.processes, news.rank
    (True, 2, 1)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._groups: dict[str, _SharingGroup] = {}  # guarded by _changed

    def announce(self, group: str, process: str, delay_s: float) -> None:
        """Announce a refusal to the other processes of a group."""
        with self._changed:
            found = self._group_locked(group)
            found.version += 1
            found.closed_until_s = max(found.closed_until_s, time.monotonic() + delay_s)
            found.closed_by = process
            self._changed.notify_all()

    def follow(self, group: str, process: str, version: int, hold_s: float = HOLD_S) -> News:
        """Wait at most `hold_s` for a state of the group newer than `version`, and return the state."""
        with self._changed:
            found = self._group_locked(group)
            joins = process not in found.seen_at_s and process not in found.left
            self._forget_locked(found)
            self._see_locked(found, process)
            if joins:
                found.version += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: found.version > version or process in found.left, timeout=hold_s)
            self._see_locked(found, process)
            left_s = found.closed_until_s - time.monotonic()
            return News(
                version=found.version,
                delay_s=max(left_s, 0.0) if found.closed_by != process else 0.0,
                processes=len(found.seen_at_s),
                rank=sum(other < process for other in found.seen_at_s),
            )

    def leave(self, group: str, process: str) -> None:
        """Remove a process that no longer calls `follow`; its usage stays."""
        with self._changed:
            found = self._group_locked(group)
            found.left.add(process)
            found.seen_at_s.pop(process, None)
            found.version += 1
            self._changed.notify_all()

    def record_usage(self, group: str, process: str, usage: dict[str, TokenCounts]) -> None:
        """Replace the usage of a process, by base model. Ignore a report that is older than the last one.

        >>> board = Board()
        >>> for sampled in (5, 9, 7):
        ...     board.record_usage("server", "a", {"org/base": TokenCounts(sampled=sampled)})
        >>> board.usage("server")
        {'org/base': TokenCounts(trained=0, prompt=0, cached=0, sampled=9)}
        """
        with self._changed:
            known = self._group_locked(group).usage
            if _total(usage) >= _total(known.get(process, {})):
                known[process] = usage

    def usage(self, group: str) -> dict[str, TokenCounts]:
        """Return the usage of all processes of a group, by base model."""
        total: dict[str, TokenCounts] = {}
        with self._changed:
            for used in self._group_locked(group).usage.values():
                for model, counts in used.items():
                    total[model] = total.get(model, TokenCounts()) + counts
        return total

    def _group_locked(self, group: str) -> _SharingGroup:
        return self._groups.setdefault(group, _SharingGroup())

    def _see_locked(self, group: _SharingGroup, process: str) -> None:
        if process not in group.left:
            group.seen_at_s[process] = time.monotonic()

    def _forget_locked(self, group: _SharingGroup) -> None:
        """Remove processes that no longer call `follow` and have not left."""
        gone_before_s = time.monotonic() - _FORGET_S
        for process, seen_at_s in list(group.seen_at_s.items()):
            if seen_at_s < gone_before_s:
                del group.seen_at_s[process]


def _total(usage: Mapping[str, TokenCounts]) -> int:
    return sum(counts.total for counts in usage.values())


def find_board() -> Any:
    """Return the board of this cluster. Make it if there is no board."""
    with suppress(ValueError):
        return ray.get_actor(NAME, namespace=NAMESPACE)
    board = (
        ray.remote(Board)
        .options(
            name=NAME,
            namespace=NAMESPACE,
            get_if_exists=True,
            max_concurrency=_THREADS,
            num_cpus=0,
        )
        .remote()
    )
    _made.append(board)
    return board


# Ray ends an actor when the process that made it no longer holds its first handle.
_made: Final[list[Any]] = []
