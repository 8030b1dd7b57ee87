"""Samples from many processes of a Ray cluster (extra `ray`).

    Sampler         a map stage of Ray Data, which samples the prompts of a data set
    share_limits    one rate limit and one count of tokens for the processes of the cluster
    cluster_usage   that count

Pass a sampling client to tasks and actors as an argument. Its copies in one process share a connection
pool, a thread and a session. The copies carry no key: set `TINKER_API_KEY` where the workers run, for example
with ``ray.init(runtime_env={"env_vars": {...}})``. This module imports Ray at once; the rest of
`tinker_sync` does not import it.

How processes share a limit: they communicate through the board, a named actor in the namespace `tinker_sync`
of the cluster, which ends with the process that made it. When the server refuses a request of one process,
the rate limiter of that process closes: the process sends nothing for some time. It announces this to the
board, and the limiters of all processes with the same server and key close for about the same time. They
reopen with equal parts of the rate of a single process; many processes reopen one group after the other. The
thread `tinker-board` of each process follows the board. Without a board, each process uses its own limiter
and tries every few seconds to find or make a board, to which it then reports its usage.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import define, field, frozen

from tinker_sync._base.events import ModelNamed, TokensUsed
from tinker_sync._base.left_out import words_on
from tinker_sync._base.log import Log
from tinker_sync._base.threads import DaemonThread
from tinker_sync.batch.item import decode_all
from tinker_sync.batch.results import ResultsFile
from tinker_sync.batch.samples import Order, Window, map_samples
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.errors import ConfigurationError, InvalidInputError, MissingExtraError, TinkerError
from tinker_sync.insight.meter import Meter, TokenCounts
from tinker_sync.runtime.rate_limiter import RateLimiter

try:
    import ray
    from ray.exceptions import RayActorError
except ImportError as error:
    raise MissingExtraError("ray", feature="tinker_sync.ray") from error

if TYPE_CHECKING:
    from tinker_sync.batch.item import BatchItem
    from tinker_sync.clients.service import ServiceClient
    from tinker_sync.types import SampleResponse, SamplingParams

__all__ = ["Sampler", "cluster_usage", "share_limits"]


def __getattr__(name: str) -> Any:
    words = words_on(f"ray.{name}") or f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(words, name=name)


# -------------------------------------------------------------------------------------- Ray Data


class Sampler:
    """A sampler of the prompts of a data set, batch by batch; a class for ``map_batches``.

        dataset.map_batches(
            tinker_sync.ray.Sampler,
            fn_constructor_kwargs={"sampling": sampling, "params": types.SamplingParams(max_tokens=64)},
            compute=ray.data.ActorPoolStrategy(size=8),
            batch_size=1024,
        )

    Before Ray 2.51, give ``concurrency=8`` in place of `compute`. Later versions warn of `concurrency`.

    It adds the columns `tokens`, `logprobs`, `stop_reasons` (a list for each row, with an entry for each
    sequence), `texts` if the prompts are text or a tokenizer is given, and `error`: None, or the reason
    why the row has no samples. Ray Data limits the number of batches under way. A batch ends with its slowest
    sample, so it should have several times `max_in_flight` rows.

    With `save_to` each process writes its responses to its own file in that directory. A new run of the same
    data set finds them by the column `key`, and samples only the other rows.

    Args:
        sampling: the client to copy.
        params: length, temperature, stops and so on.
        num_samples: the number of continuations of each prompt.
        prompt: the column of the prompts: texts, or lists of token ids.
        key: the column that names a row, for `save_to`.
        save_to: a directory for the responses.
        max_in_flight: the most prompts of one process under way at once.
        tokenizer: encodes texts and decodes for `texts`; None loads the model's own with the first text.
        options: further arguments of `SamplingClient.sample`.

    Raises:
        InvalidInputError: `save_to` is given without `key`, or its ``part-*.jsonl`` is no file of results.
        ConfigurationError: Ray was not started in this process.
    """

    def __init__(
        self,
        sampling: SamplingClient,
        params: SamplingParams,
        num_samples: int = 1,
        *,
        prompt: str = "prompt",
        key: str | None = None,
        save_to: str | os.PathLike[str] | None = None,
        max_in_flight: int = 256,
        tokenizer: Any = None,
        **options: Any,
    ) -> None:
        if save_to is not None and key is None:
            raise InvalidInputError("Sampler: save_to needs key=, the column that names a row")
        self._prompt, self._key = prompt, key
        self._shared = share_limits(sampling)
        self._order = Order(sampling, params, num_samples, options, tokenizer)
        self._window = Window(max_in_flight, ordered=False, on_error="return")
        self._saved = None if save_to is None else SavedRows(Path(save_to))

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Sample the prompts of a batch, and return the batch with the columns of the samples.

        Raises:
            InvalidInputError: a column is missing, or `save_to` has a response for a row that was sampled
                from another prompt or with other parameters.
            TinkerError: the server or the client takes no further sample, for example because of a wrong key.
        """
        for name in filter(None, (self._prompt, self._key)):
            if name not in batch:
                raise InvalidInputError(f"Sampler: the data set has no column {name!r}; it has {list(batch)}")
        prompts = [_plain(each) for each in batch[self._prompt]]
        if self._saved is None or self._key is None:
            asked = [_Asked(prompt) for prompt in prompts]
        else:
            asked = self._look_up(self._saved, batch[self._key], prompts)
        missing = [place for place, each in enumerate(asked) if each.saved is None]
        rows = [
            {} if each.saved is None else self._row(prompts[place], each.saved, None)
            for place, each in enumerate(asked)
        ]
        for item in self._sample([asked[place].prompt for place in missing]):
            place = missing[item.index]
            if self._saved is not None and item.response is not None:
                self._saved.add(asked[place].name, asked[place].key, item.response)
            rows[place] = self._row(prompts[place], item.response, item.error)
        self._shared.report_usage()
        return {**batch, **_columns(rows)}

    def _sample(self, prompts: list[Any]) -> Generator[BatchItem, None, None]:
        return map_samples(prompts, self._order, self._window, save_to=None, progress=False, total=None)

    def _look_up(self, saved: SavedRows, names: Iterable[Any], prompts: list[Any]) -> list[_Asked]:
        """Return each prompt as an `_Asked`, with the response of an earlier run if there is one."""
        asked = []
        for name, prompt in zip(map(_plain, names), prompts, strict=True):
            try:
                model_input = self._order.model_input(prompt)
                key = self._order.key(model_input)
            except (TinkerError, TypeError, ValueError):
                asked.append(_Asked(prompt))  # the sample fails with this error, and the row has it
            else:
                asked.append(_Asked(model_input, name, key, saved.find(name, key)))
        return asked

    def _row(self, prompt: Any, response: SampleResponse | None, error: Exception | None) -> dict[str, Any]:
        sequences = [] if response is None else response.sequences
        row: dict[str, Any] = {
            "tokens": [each.tokens for each in sequences],
            "logprobs": [each.logprobs or [] for each in sequences],
            "stop_reasons": [str(each.stop_reason) for each in sequences],
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }
        if isinstance(prompt, str) or self._order.tokenizer is not None:
            row["texts"] = [] if response is None else decode_all(self._order.tokenizer, response)
        return row


@frozen
class _Asked:
    """The prompt of a row. With `save_to` also the fields that find the response of an earlier run.

    `name` is the name of the row, from the column that `Sampler` got as `key`. `key` is a hash of the prompt
    and the parameters. `saved` is the response, or None.
    """

    prompt: Any
    name: Any = None
    key: str = ""
    saved: SampleResponse | None = None


class SavedRows:
    """The responses that this process saves in a file of its own, and those in the files of other processes.

    The file is created with the first response, and is closed when this object is no longer used.

    Args:
        directory: holds a file for each process of each run. This object reads those that exist already.

    Raises:
        InvalidInputError: a file ``part-*.jsonl`` there is not a file of results.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._earlier = [ResultsFile(path, writable=False) for path in sorted(directory.glob("part-*.jsonl"))]
        for file in self._earlier:
            file.close()  # `find` opens it again
        self._own: ResultsFile | None = None

    def find(self, name: Any, key: str) -> SampleResponse | None:
        """Return the response for a row from the files that existed when this object was made, or None.

        Raises:
            ForeignResultError: the row has a response for another prompt or other parameters.
        """
        position = _position_of(name)
        return next((found for file in self._earlier if (found := file.find(position, key))), None)

    def add(self, name: Any, key: str, response: SampleResponse) -> None:
        """Append the response for a row to the file of this process."""
        if self._own is None:
            self._own = ResultsFile(self._directory / f"part-{uuid.uuid4().hex}.jsonl")
            weakref.finalize(self, self._own.close)
        self._own.hold()
        self._own.add(_position_of(name), key, response, {"row": name})


def _position_of(name: Any) -> int:
    """Return a number for the name of a row. Two rows of a data set hardly ever get the same number.

    >>> _position_of("a") == _position_of("a") != _position_of("b")
    True
    """
    return int.from_bytes(hashlib.sha256(repr(name).encode()).digest()[:7], "big")


def _plain(value: Any) -> Any:
    """Convert a numpy scalar or array to plain values. Other values stay as they are."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in rows[0] if rows else ():
        columns[name] = column = np.empty(len(rows), dtype=object)
        column[:] = [row[name] for row in rows]
    return columns


# -------------------------------------------------------------------------------------- the board


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


_log = Log("tinker_sync.ray")

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
        self._counted: weakref.WeakSet[Any] = weakref.WeakSet()  # guarded by _lock
        self._joined = threading.Event()  # set when the first news are applied, or when there is no board
        self._ended = threading.Event()
        self._board: Any = None  # written by the thread `tinker-board`
        self._version = 0  # used only by the thread `tinker-board`

    def start(self) -> None:
        """Start a thread that follows the board, and wait for its first update. Further calls only wait.

        So a process that starts during a pause sends nothing before the pause ends. The wait also ends if the
        board cannot be reached, or after 20 seconds.
        """
        with self._lock:
            start, self._started = not self._started, True
        if start:
            self._limiter.share(self._announce)
            DaemonThread(self._follow, "tinker-board").start()
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

    def count(self, runtime: Any) -> None:
        """Count the tokens of a client's runtime from now on. Further calls change nothing."""
        with self._lock:
            counted = runtime in self._counted
            self._counted.add(runtime)
        if not counted:
            runtime.connection.events.listen(self.meter, TokensUsed, ModelNamed)

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
        """Wait for the board's next update, apply it, and report the usage of this process.

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
    at the start of a task, or in the constructor of an actor. `Sampler` does so. Further calls for the same
    server and key return the same object.

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
    # A hash that is the same in all processes, because they share one group.
    digest = hashlib.sha256(b"tinker_sync group" + secret.encode()).hexdigest()
    group = f"{runtime.settings.base_url.rstrip('/')} {digest[:16]}"
    limiter = runtime.server.rate_limiter
    with _known_lock:
        shared = _known.get(group)
        if shared is None or shared.ended:
            shared = _known[group] = SharedLimits(group, limiter)
    shared.start()
    shared.count(runtime)
    if isinstance(client, SamplingClient):
        shared.name_sampler(client)
        if ray.get_runtime_context().worker.mode == ray.WORKER_MODE:
            shared.keep(client)
    return shared


def cluster_usage(client: SamplingClient | ServiceClient) -> dict[str, TokenCounts]:
    """Return the tokens that all processes of the cluster have used with this server and key, by base model.

    The name "" stands for an unknown base model. `Sampler` reports when it returns a batch; other
    processes report about every ten seconds. A process that is killed cannot
    report what it has used since its last report.

    Args:
        client: a client of the server; `share_limits` is called with it.

    Raises:
        ConfigurationError: Ray was not started in this process.
        TinkerError: the board was lost, and no new one can be reached.
    """
    return share_limits(client).usage()


_known_lock: Final = threading.Lock()
_known: Final[dict[str, SharedLimits]] = {}  # guarded by _known_lock
