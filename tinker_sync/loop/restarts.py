"""`attempts`: a training loop that goes on from its last save after the server has lost what it works on.

A client repeats requests by itself for as long as that helps. What it cannot mend is the loss of the session,
of the model or of part of its state. Then the loop has to start again with a new service client, from the
last save. Only errors of this kind are caught here; all others leave the loop at once. Public methods of the
clients are all that this module uses.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final, Generic, Literal, TypeVar, cast

from tinker_sync._base.log import Log
from tinker_sync.errors import (
    APIConnectionError,
    APIStatusError,
    DeadlineError,
    EarlierCallFailedError,
    InternalServerError,
    InvalidInputError,
    RequestErrorCategory,
    RequestFailedError,
    SessionLostError,
    TinkerError,
)
from tinker_sync.loop.checkpoints import CorruptedRunError, LoopCheckpoints
from tinker_sync.types._checks import as_whole

ServiceT = TypeVar("ServiceT")
"""The class of the service client, which this module does not import."""

# A service client that has lost its session has nothing to wait for when it closes.
_CLOSE_S: Final = 5.0
_LOST: Final = (
    APIConnectionError, CorruptedRunError, DeadlineError, EarlierCallFailedError, InternalServerError,
    SessionLostError,
)  # fmt: skip
# Conflict and gone: the model or the session is no longer there.
_GONE: Final = (409, 410)
# A 404 of these calls means that the model, the sampler or the result is gone. One of other calls is about
# what the user named.
_OF_A_MODEL: Final = frozenset(
    {
        *("forward", "forward_backward", "optim_step", "save_weights", "save_weights_for_sampler"),
        *("asample", "retrieve_future", "retrieve_futures"),
    }
)

_log = Log("tinker_sync.loop")


def attempts(
    connect: Callable[[], ServiceT],
    directory: str | os.PathLike[str],
    *,
    restarts: int = 3,
    **options: Any,
) -> Iterator[Attempt[ServiceT]]:
    """Return the attempts of a training loop: one, and another one for each loss that a restart mends.

    Use each attempt in a ``with`` block, which yields a new service client and the checkpoints of the
    directory. If the block raises one of these errors, it ends there, and the next attempt follows:

    - the server has lost the session, the model, a sampler or a result: `SessionLostError`, a status of 409
      or 410, a 404 of a call that trains, saves or samples, and `EarlierCallFailedError`;
    - it was out of reach for longer than the client waits: `APIConnectionError`, `InternalServerError`,
      `DeadlineError`;
    - it has failed by itself: a `RequestFailedError` that is not the user's, or any `TinkerError` of a run
      that it calls corrupted.

    Other errors leave the loop.

    Args:
        connect: makes a service client.
        directory: the directory of the run, as for `ServiceClient.checkpoints`.
        restarts: the most restarts in a row without a new save; the next error then leaves the loop.
        options: further arguments of `ServiceClient.checkpoints`, such as `every`.

    Raises:
        InvalidInputError: `restarts` is no whole number from 0 on.

    >>> import tempfile, tinker_sync
    >>> adam = tinker_sync.AdamParams(learning_rate=1e-4)
    >>> to = tempfile.mkdtemp()
    >>> for attempt in attempts(lambda: tinker_sync.ServiceClient(base_url="local"), to, every=2):
    ...     with attempt as (service, saves):
    ...         resumed = saves.resume()
    ...         training, first = resumed or (service.create_lora_training_client("tinker-sync/tiny"), 0)
    ...         for step in range(first, 4):
    ...             stepped = training.optim_step(adam).result()
    ...             saved = saves.after_step(training, step)
    ...         [each.step for each in saves.kept]
    [1, 3]
    """
    if (as_whole(restarts) or 0) < 0 or as_whole(restarts) is None:
        raise InvalidInputError(f"attempts: restarts: expected 0 or more, got {restarts!r}")
    return _attempts(connect, directory, restarts, options)


def _attempts(
    connect: Callable[[], ServiceT],
    directory: str | os.PathLike[str],
    restarts: int,
    options: dict[str, Any],
) -> Iterator[Attempt[ServiceT]]:
    spent = 0
    while True:
        attempt = Attempt(connect, directory, options, spent, restarts)
        yield attempt
        if attempt.state == "new":
            raise InvalidInputError("attempts: use each one in a block: with attempt as (service, saves)")
        if attempt.state == "ended":
            return
        spent = 1 if attempt.has_saved else spent + 1


class Attempt(Generic[ServiceT]):
    """One attempt of a training loop, which `attempts` yields. Not thread-safe."""

    def __init__(
        self,
        connect: Callable[[], ServiceT],
        directory: str | os.PathLike[str],
        options: dict[str, Any],
        spent: int,
        restarts: int,
    ) -> None:
        self._connect, self._directory, self._options = connect, directory, options
        self._spent, self._restarts = spent, restarts
        self.state: Literal["new", "running", "ended", "lost"] = "new"
        self._service: Any
        self._saves: LoopCheckpoints[Any]
        self._begun_from: str | None = None

    @property
    def has_saved(self) -> bool:
        """True if the attempt has made a save that is kept."""
        latest = self._saves.latest
        return latest is not None and latest.path != self._begun_from

    def __enter__(self) -> tuple[ServiceT, LoopCheckpoints[Any]]:
        self._service = self._connect()
        try:
            self._saves = self._service.checkpoints(self._directory, **self._options)
        except BaseException:
            self._service.close("errored")
            raise
        latest = self._saves.latest
        self._begun_from = None if latest is None else latest.path
        self.state = "running"
        return cast("ServiceT", self._service), self._saves

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        spent = 0 if error is not None and self.has_saved else self._spent
        if isinstance(error, TinkerError) and spent < self._restarts and self._is_lost(error):
            self.state = "lost"
            latest = self._saves.latest
            _log.warning(
                "the loop starts again (%d of %d) from %s, because of %s: %s",
                spent + 1,
                self._restarts,
                "its beginning" if latest is None else latest.path,
                type(error).__name__,
                error,
            )
            self._give_up()
            return True
        self.state = "ended"
        self._service.__exit__(kind, error, trace)
        return False

    def _is_lost(self, error: TinkerError) -> bool:
        if isinstance(error, _LOST):
            return True
        if isinstance(error, APIStatusError):
            call = (error.path or "").rpartition("/")[2]
            if error.status_code in _GONE or (error.status_code == 404 and call in _OF_A_MODEL):
                return True
        if isinstance(error, RequestFailedError) and error.category is not RequestErrorCategory.User:
            return True
        return self._saves.is_corrupted

    def _give_up(self) -> None:
        try:
            self._service.close("errored", timeout=_CLOSE_S, pending=0.0).result()
        except TinkerError as failure:
            _log.debug("the lost service client was not closed in order: %s", failure)
