"""`share_limits`: one rate limit, and one count of tokens, for the processes of a cluster.

When the server refuses a request of one process, its limiter closes: it sends nothing for some time. The
process announces this to the board, and the limiters of all processes close for the same time. They reopen
with equal parts of the window, the number of requests that a single process would have under way. If there
are more processes than requests in the window, they reopen one group after the other.

Without a board, each process uses its own limiter and looks for a board every few seconds.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import uuid
import weakref
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import ray

from tinker_sync._observe import ModelNamed
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.errors import ConfigurationError, TinkerError
from tinker_sync.ray.board import HOLD_S, News, find_board
from tinker_sync.runtime.once import Shared
from tinker_sync.runtime.rate_limiter import FIRST_WINDOW, RateLimiter, key_fingerprint, shared_rate_limiter
from tinker_sync.usage.counts import TokenCounts
from tinker_sync.usage.meter import Meter

if TYPE_CHECKING:
    from tinker_sync.clients.service import ServiceClient

_log = logging.getLogger("tinker_sync.ray")

_RETRY_S: Final = 2.0
# The longest wait for the first news; a board in a new process may need some seconds to start.
_JOIN_S: Final = 20.0
# The pause between the groups of processes that reopen; ten processes reopen at a time.
_TURN_S: Final = 1.0
# The number of samplers to keep: off-policy rollouts use a few versions of the weights at once.
_KEPT: Final = 4


class SharedLimits:
    """The share of this process in the rate limit and token count of the cluster. Thread-safe.

    Args:
        group: a name for the server and the key, which does not show the key.
        limiter: the limiter of this process.
        connect: returns the board.
    """

    def __init__(self, group: str, limiter: RateLimiter, connect: Any = find_board) -> None:
        self.group = group
        self.process = uuid.uuid4().hex
        self.meter = Meter()
        """Counts the tokens of each client of this process after its call of `share_limits`."""
        self._limiter = limiter
        self._connect = connect
        self._lock = threading.Lock()
        self._started = False  # guarded by _lock
        self._kept: deque[SamplingClient] = deque(maxlen=_KEPT)  # guarded by _lock
        self._joined = threading.Event()  # set when the first news are applied, or when there is no board
        self._ended = threading.Event()
        self._board: Any = None  # written by the thread `tinker-board`
        self._version = 0  # used only by the thread `tinker-board`

    def start(self) -> None:
        """Start a thread that follows the board, and wait for its first news. Further calls only wait.

        So a process that starts during a pause sends nothing before the pause ends.
        """
        with self._lock:
            start, self._started = not self._started, True
        if start:
            self._limiter.share(self._announce)
            threading.Thread(target=self._follow, name="tinker-board", daemon=True).start()
        self._joined.wait(_JOIN_S)

    def stop(self) -> None:
        """Leave the group."""
        self._ended.set()
        self._limiter.count_sharers(1)
        self._ask("leave", self.group, self.process)

    @property
    def ended(self) -> bool:
        """True after `stop`, or after Ray has ended in this process."""
        return self._ended.is_set()

    def name_sampler(self, sampling: SamplingClient) -> None:
        """Record the base model of a sampler. Ask the server only if this process does not know it."""
        sampler = sampling.sampling_session_id
        if self.meter.base_model(sampler) is None:
            # If this fails, the usage of the sampler counts for no model, and sampling goes on.
            with suppress(TinkerError):
                name = sampling._base_model or sampling.get_base_model()
                self.meter.observe(ModelNamed(model=sampler, base_model=name))

    def keep(self, sampling: SamplingClient) -> None:
        """Keep a reference to a client, so that its connections and session stay open for later tasks."""
        with self._lock:
            if not any(kept is sampling for kept in self._kept):
                self._kept.append(sampling)

    def report_usage(self) -> None:
        """Send the usage of this process to the board. Does not wait for the board."""
        self._ask("record_usage", *self.own_usage())

    def own_usage(self) -> tuple[str, str, dict[str, TokenCounts]]:
        """Return the arguments of `Board.record_usage` for this process."""
        used = {name or "": counts for name, counts in self.meter.by_model().items()}
        return self.group, self.process, used

    def usage(self) -> dict[str, TokenCounts]:
        """Return the usage that all processes have reported, by base model."""
        found: dict[str, TokenCounts] = ray.get(self._connect().usage.remote(self.group))
        return found

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
        """Wait for the next state of the board, and apply it."""
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
        """Set the limiter's part of the window, and close the limiter if another process was refused.

        `News.delay_s` is the time to stay closed. Processes of higher rank stay closed a little longer.
        """
        self._limiter.count_sharers(news.processes)
        if news.delay_s > 0:
            self._limiter.follow(news.delay_s + news.rank // FIRST_WINDOW * _TURN_S)
        self._joined.set()

    def _lose_board(self, error: Exception) -> None:
        if self._board is not None and ray.is_initialized():
            _log.warning("the shared limit is away, this process uses its own: %s", error)
        self._board = None
        self._limiter.count_sharers(1)
        self._joined.set()


def share_limits(client: SamplingClient | ServiceClient) -> SharedLimits:
    """Share the rate limit and token count of this process with the other processes of the Ray cluster.

    Call it once in each process that samples: at the start of a task, or in the constructor of an actor.
    `SamplerPool`, `map` and `Sampler` do so by themselves. Further calls for the same server and key return
    the same object.

    Args:
        client: any client of the server.

    Raises:
        ConfigurationError: Ray was not started in this process.
    """
    if not ray.is_initialized():
        raise ConfigurationError("share_limits: Ray is not started; call ray.init() first")
    core = client.holder
    key = core.settings.api_key
    secret = key.reveal() if key is not None else ""
    fingerprint = key_fingerprint(secret)
    # Not the fingerprint of the key: that differs from process to process, but they share one group.
    digest = hashlib.sha256(b"tinker_sync group" + secret.encode()).hexdigest()
    group = f"{core.settings.base_url.rstrip('/')} {digest[:16]}"
    limiter = shared_rate_limiter(core.settings.base_url, fingerprint, clock=core.clock)
    shared = _known.get(group, lambda: SharedLimits(group, limiter))
    shared.start()
    with _lock:
        counted = core in _counted
        _counted.add(core)
    if not counted:
        core.listen(shared.meter)
    if isinstance(client, SamplingClient):
        shared.name_sampler(client)
        if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            shared.keep(client)
    return shared


def cluster_usage(client: SamplingClient | ServiceClient) -> dict[str, TokenCounts]:
    """Return the tokens that all processes of the cluster have used, by base model.

    A pool and `Sampler` report when they return results; other processes report every few seconds. A process
    that is killed cannot report the samples that it had under way.

    Args:
        client: any client of the server.
    """
    return share_limits(client).usage()


_known: Final[Shared[str, SharedLimits]] = Shared({}, is_usable=lambda shared: not shared.ended)
_lock: Final = threading.Lock()
_counted: Final[weakref.WeakSet[Any]] = weakref.WeakSet()  # guarded by _lock
