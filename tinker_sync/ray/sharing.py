"""`share_limits`: one rate limit, and one count of tokens, for the processes of a cluster.

The processes communicate through the board: a named actor in the namespace `tinker_sync` of the cluster,
which ends with the process that made it.

When the server refuses a request of one process, the rate limiter of that process closes: the process sends
nothing for some time. It announces this to the board, and the limiters of all processes with the same server
and key close for about the same time. They reopen with equal parts of the rate of a single process; many
processes reopen one group after the other.

Without a board, each process uses its own limiter and tries every few seconds to find or make a board. It
then reports its usage to the new board.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import ray
from attrs import define, field, frozen
from ray.exceptions import RayActorError

from tinker_sync._base.events import ModelNamed
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.errors import ConfigurationError, TinkerError
from tinker_sync.insight.meter import Meter, TokenCounts
from tinker_sync.runtime.lazy import Shared
from tinker_sync.runtime.rate_limiter import RateLimiter, key_fingerprint, shared_rate_limiter

if TYPE_CHECKING:
    from tinker_sync.clients.service import ServiceClient
    from tinker_sync.runtime.client_runtime import ClientRuntime

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

    It is 0 if no refusal is in force, or if this process announced the one that ends last.
    """
    processes: int
    """The number of processes that share the limit."""
    rank: int
    """The position of this process among them, from 0."""


@define(eq=False)
class _SharingGroup:
    """The processes that use one server with one key: the refusal whose pause ends last, the moment of the
    last call of `follow` by each process, and the usage of each. Guarded by the lock of the board.
    """

    version: int = 0
    closed_until_s: float = 0.0
    closed_by: str = ""
    seen_at_s: dict[str, float] = field(factory=dict)
    left: set[str] = field(factory=set)
    usage: dict[str, dict[str, TokenCounts]] = field(factory=dict)


class Board:
    """The state that the processes of a cluster share, by group. Runs as an actor with many threads.

    A group is the processes that use one server with one key.

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
        """Announce a refusal to the other processes of a group: they must send nothing for `delay_s`."""
        with self._changed:
            found = self._group_locked(group)
            found.version += 1
            until_s = time.monotonic() + delay_s
            if until_s > found.closed_until_s:
                found.closed_until_s, found.closed_by = until_s, process
            self._changed.notify_all()

    def follow(self, group: str, process: str, version: int, hold_s: float = HOLD_S) -> News:
        """Wait at most `hold_s` for a state of the group newer than `version`; return the present state.

        With its first call a process joins the group. It stays in the group until `leave`, or until it has
        not called for 30 seconds.
        """
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
        """Remove a process from a group forever, and end its wait in `follow`; its usage stays."""
        with self._changed:
            found = self._group_locked(group)
            found.left.add(process)
            found.seen_at_s.pop(process, None)
            found.version += 1
            self._changed.notify_all()

    def record_usage(self, group: str, process: str, usage: dict[str, TokenCounts]) -> None:
        """Replace the usage of a process, by base model. Ignore an older report: one with fewer tokens.

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
        """Return the usage that the processes of a group have reported, by base model."""
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
        """Remove processes that have not called `follow` for `_FORGET_S` seconds."""
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
        .options(name=NAME, namespace=NAMESPACE, get_if_exists=True, max_concurrency=_THREADS, num_cpus=0)
        .remote()
    )
    _made.append(board)
    return board


# Ray ends an actor when the process that made it no longer holds its first handle.
_made: Final[list[Any]] = []


_log = logging.getLogger("tinker_sync.ray")

_RETRY_S: Final = 2.0
_TRIES: Final = 5
# The longest wait for the first news; a board in a new process may need some seconds to start.
_JOIN_S: Final = 20.0
# The pause between the groups of processes that reopen; ten processes reopen at a time.
_TURN_S: Final = 1.0
_GROUP: Final = 10
"""This many processes reopen together."""
# The number of samplers to keep: off-policy rollouts use a few versions of the weights at once.
_KEPT: Final = 4


class SharedLimits:
    """The share of this process in the rate limit and token count of the cluster. Thread-safe.

    Args:
        group: the name of the group of processes with this server and key; it does not show the key.
        limiter: the limiter of this process.
        connect: returns the board.
    """

    def __init__(self, group: str, limiter: RateLimiter, connect: Any = find_board) -> None:
        self.group = group
        self.process = uuid.uuid4().hex
        self.meter = Meter()
        """Counts the tokens of the clients that were given to `share_limits`, from then on."""
        self._limiter = limiter
        self._connect = connect
        self._lock = threading.Lock()
        self._started = False  # guarded by _lock
        self._kept: deque[SamplingClient] = deque(maxlen=_KEPT)  # guarded by _lock
        self._counted: weakref.WeakSet[ClientRuntime] = weakref.WeakSet()  # guarded by _lock
        self._joined = threading.Event()  # set when the first news are applied, or when there is no board
        self._ended = threading.Event()
        self._board: Any = None  # written by the thread `tinker-board`
        self._version = 0  # used only by the thread `tinker-board`

    def start(self) -> None:
        """Start a thread that follows the board, and wait for its first news. Further calls only wait.

        So a process that starts during a pause sends nothing before the pause ends. The wait also ends if the
        board cannot be reached, or after 20 seconds.
        """
        with self._lock:
            start, self._started = not self._started, True
        if start:
            self._limiter.share(self._announce)
            threading.Thread(target=self._follow, name="tinker-board", daemon=True).start()
        self._joined.wait(_JOIN_S)

    def stop(self) -> None:
        """Leave the group. This process then has a rate limit of its own."""
        self._ended.set()
        self._limiter.count_sharers(1)
        self._ask("leave", self.group, self.process)

    @property
    def ended(self) -> bool:
        """True after `stop`, or after Ray has ended in this process."""
        return self._ended.is_set()

    def count(self, runtime: ClientRuntime) -> None:
        """Count the tokens of a client's runtime from now on. Further calls change nothing."""
        with self._lock:
            counted = runtime in self._counted
            self._counted.add(runtime)
        if not counted:
            runtime.lifecycle.add_observer(self.meter)

    def name_sampler(self, sampling: SamplingClient) -> None:
        """Record the base model of a sampler. Ask the server only if this process does not know it."""
        sampler = sampling.sampling_session_id
        if self.meter.base_model(sampler) is None:
            # If this fails, the usage of the sampler counts for no model, and sampling goes on.
            with suppress(TinkerError):
                name = sampling._base_model or sampling.get_base_model()
                self.meter.observe(ModelNamed(model=sampler, base_model=name))

    def keep(self, sampling: SamplingClient) -> None:
        """Keep a reference to a client, so that its connections and session stay open for later tasks.

        Only the last four clients are kept.
        """
        with self._lock:
            if not any(kept is sampling for kept in self._kept):
                self._kept.append(sampling)

    def report_usage(self) -> None:
        """Send the usage of this process to the board, if there is one. Does not wait for the board."""
        self._ask("record_usage", *self.own_usage())

    def own_usage(self) -> tuple[str, str, dict[str, TokenCounts]]:
        """Return the arguments of `Board.record_usage` for this process."""
        used = {name or "": counts for name, counts in self.meter.by_model().items()}
        return self.group, self.process, used

    def usage(self) -> dict[str, TokenCounts]:
        """Return the usage that all processes of the group have reported, by base model.

        Raises:
            TinkerError: the board was lost, and no new one can be reached.
        """
        lost: Exception | None = None
        for _ in range(_TRIES):
            try:
                found: dict[str, TokenCounts] = ray.get(self._connect().usage.remote(self.group))
            except RayActorError as error:  # for a moment, Ray still names a board that was lost
                lost = error
                self._ended.wait(_RETRY_S)
            else:
                return found
        raise TinkerError(f"cluster_usage: the board of the cluster cannot be reached: {lost}") from lost

    # -------------------------------------------------------------------------------------- the board

    def _announce(self, delay_s: float) -> None:
        self._ask("announce", self.group, self.process, delay_s)

    def _ask(self, method: str, *args: object) -> None:
        """Send a message to the board without waiting. Does nothing if there is no board."""
        board = self._board
        if board is not None:
            try:
                getattr(board, method).remote(*args)
            except Exception:  # noqa: BLE001  # Ray has ended, or the message cannot be sent
                _log.debug("the board was not reached", exc_info=True)

    def _follow(self) -> None:
        while not self._ended.is_set() and ray.is_initialized():
            try:
                self.step()
            except Exception as error:  # noqa: BLE001  # samples go on after any error
                self._lose_board(error)
                self._ended.wait(_RETRY_S)
        self._ended.set()
        self._limiter.count_sharers(1)

    def step(self) -> None:
        """Wait for the next news of the board, apply them, and report the usage of this process.

        Finds or makes the board first if this process has none.
        """
        if self._board is None:
            self._version = 0
            self._board = self._connect()
            self.report_usage()
        news: News = ray.get(
            self._board.follow.remote(self.group, self.process, self._version), timeout=2 * HOLD_S
        )
        self._version = news.version
        self.apply(news)
        self.report_usage()

    def apply(self, news: News) -> None:
        """Set the limiter's part of the rate; close the limiter if the server refused another process.

        `News.delay_s` is the time to stay closed. Processes of higher rank stay closed a little longer.
        """
        self._limiter.count_sharers(news.processes)
        if news.delay_s > 0:
            self._limiter.follow(news.delay_s + news.rank // _GROUP * _TURN_S)
        self._joined.set()

    def _lose_board(self, error: Exception) -> None:
        if self._board is not None and ray.is_initialized():
            _log.warning("the shared limit is away, this process uses its own: %s", error)
        self._board = None
        self._limiter.count_sharers(1)
        self._joined.set()


def share_limits(client: SamplingClient | ServiceClient) -> SharedLimits:
    """Share the rate limit and token count of this process with the other processes of the Ray cluster.

    Processes share them if they use the same server and key. Call this function in each process that samples:
    at the start of a task, or in the constructor of an actor. `SamplerPool`, `map` and `Sampler` do so in
    their workers. Further calls for the same server and key return the same object.

    Args:
        client: a client of the server; its tokens are counted from now on.

    Raises:
        ConfigurationError: Ray was not started in this process.
    """
    if not ray.is_initialized():
        raise ConfigurationError("share_limits: Ray is not started; call ray.init() first")
    runtime = client.holder
    key = runtime.settings.api_key
    secret = key.reveal() if key is not None else ""
    fingerprint = key_fingerprint(secret)
    # Not the fingerprint of the key: that differs from process to process, but they share one group.
    digest = hashlib.sha256(b"tinker_sync group" + secret.encode()).hexdigest()
    group = f"{runtime.settings.base_url.rstrip('/')} {digest[:16]}"
    limiter = shared_rate_limiter(runtime.settings.base_url, fingerprint, clock=runtime.clock)
    shared = _known.get(group, lambda: SharedLimits(group, limiter))
    shared.start()
    shared.count(runtime)
    if isinstance(client, SamplingClient):
        shared.name_sampler(client)
        if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            shared.keep(client)
    return shared


def cluster_usage(client: SamplingClient | ServiceClient) -> dict[str, TokenCounts]:
    """Return the tokens that all processes of the cluster have used with this server and key, by base model.

    The name "" stands for an unknown base model. `Sampler` reports when it returns a batch, and a
    pool about once a second; other processes report about every ten seconds. A process that is killed cannot
    report what it has used since its last report.

    Args:
        client: a client of the server; `share_limits` is called with it.

    Raises:
        ConfigurationError: Ray was not started in this process.
        TinkerError: the board was lost, and no new one can be reached.
    """
    return share_limits(client).usage()


_known: Final[Shared[str, SharedLimits]] = Shared({}, is_usable=lambda shared: not shared.ended)
