"""`as_completed` and `gather`: waits for many futures; and the progress bar of tqdm, if it is installed."""

from __future__ import annotations

import concurrent.futures
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any, Final, Literal, TypeVar, cast, overload

from tinker_sync.errors import InvalidInputError
from tinker_sync.runtime.futures import APIFuture

SWITCH: Final = "TINKER_PROGRESS"
"""The environment variable that turns every bar off if it is 0, false, no or off."""

_OFF: Final = frozenset({"0", "false", "no", "off"})


class ProgressBar:
    """A progress bar with the number of finished items, their rate and the time left.

    It is drawn on the standard error stream if that is a terminal or a notebook, tqdm is installed, and the
    variable `TINKER_PROGRESS` does not turn bars off. Otherwise its methods do nothing.

    Args:
        wanted: False for no bar.
        total: the number of all items; None if it is not known.
        words: the text before the bar.
    """

    def __init__(self, wanted: bool, total: int | None, words: str) -> None:
        self._bar = _make_bar(total, words) if wanted and _has_place() else None
        self._failed = 0

    def advance(self, *, failed: bool = False) -> None:
        """Count one finished item."""
        if self._bar is None:
            return
        if failed:
            self._failed += 1
            self._bar.set_postfix(failed=self._failed, refresh=False)
        self._bar.update()

    def skip(self) -> None:
        """Count one item that an earlier run finished; it does not change the rate."""
        if self._bar is None:
            return
        for count in ("initial", "n", "last_print_n"):
            setattr(self._bar, count, getattr(self._bar, count) + 1)

    def close(self) -> None:
        """Stop drawing. The bar stays on the screen."""
        if self._bar is not None:
            self._bar.close()


def _has_place() -> bool:
    stream = sys.stderr
    switched_off = os.environ.get(SWITCH, "").strip().lower() in _OFF
    # The standard error stream of a notebook counts as a terminal.
    return not switched_off and stream is not None and stream.isatty()


def _make_bar(total: int | None, words: str) -> Any:
    try:
        tqdm: Any = importlib.import_module("tqdm.auto")
    except ImportError:
        return None
    bar = tqdm.tqdm(total=total, desc=words, unit="", dynamic_ncols=True)
    return None if bar.disable else bar  # the user's TQDM_DISABLE; such a bar lacks its counts


T = TypeVar("T")
FutureT = TypeVar("FutureT", bound="Future[Any]")


def as_completed(
    futures: Iterable[FutureT], *, timeout: float | None = None, progress: bool = False
) -> Iterator[FutureT]:
    """Yield each future when it is done, in the order of completion.

    This is `concurrent.futures.as_completed` with a progress bar. Leaving the loop does not cancel futures.

    Args:
        futures: the futures, of any client or executor.
        timeout: the seconds to wait for all of them; None waits without a limit.
        progress: show a bar if tqdm is installed and there is a terminal; `TINKER_PROGRESS=0` hides it.

    Raises:
        TimeoutError: some futures are not done in time. Their work goes on.
        TinkerError: the parent of this forked process made one of the calls, and it has not ended.
        InvalidInputError: an argument is not a future.

    >>> from tinker_sync import APIFuture
    >>> first, second = APIFuture(), APIFuture()
    >>> waiting = as_completed([first, second])
    >>> second.resolve("b"), next(waiting) is second
    (True, True)
    """
    return _as_completed(_list_futures(futures, "as_completed"), timeout, progress)


def _as_completed(futures: list[FutureT], timeout: float | None, progress: bool) -> Iterator[FutureT]:
    for each in futures:
        if isinstance(each, APIFuture):
            each._refuse_foreign_wait()
    bar = ProgressBar(progress, len(set(futures)), "done")
    try:
        for future in concurrent.futures.as_completed(futures, timeout):
            bar.advance(failed=_has_failed(future))
            yield cast("FutureT", future)
    except concurrent.futures.TimeoutError as error:  # before Python 3.11 not the built-in TimeoutError
        raise TimeoutError(f"{error}; their work goes on") from None
    finally:
        bar.close()


@overload
def gather(
    futures: Iterable[Future[T]],
    *,
    return_exceptions: Literal[False] = False,
    timeout: float | None = None,
    progress: bool = False,
) -> list[T]: ...
@overload
def gather(
    futures: Iterable[Future[T]],
    *,
    return_exceptions: Literal[True],
    timeout: float | None = None,
    progress: bool = False,
) -> list[T | Exception]: ...
def gather(
    futures: Iterable[Future[Any]],
    *,
    return_exceptions: bool = False,
    timeout: float | None = None,
    progress: bool = False,
) -> list[Any]:
    """Wait for futures, and return their results in the order in which they were given.

    Args:
        futures: the futures, of any client or executor.
        return_exceptions: put the error of a failed future in the place of its result. If False, the first
            error is raised as soon as it occurs; the other futures go on.
        timeout: the seconds to wait for all of them; None waits without a limit.
        progress: show a bar if tqdm is installed and there is a terminal; `TINKER_PROGRESS=0` hides it.

    Raises:
        TimeoutError: some futures are not done in time. Their work goes on.
        TinkerError: the parent of this forked process made one of the calls, and it has not ended.
        InvalidInputError: an argument is not a future.

    >>> from tinker_sync import APIFuture
    >>> first, second = APIFuture(), APIFuture()
    >>> second.resolve("b"), first.fail(KeyError("a"))
    (True, True)
    >>> gather([first, second], return_exceptions=True)
    [KeyError('a'), 'b']
    """
    listed = _list_futures(futures, "gather")
    for future in _as_completed(listed, timeout, progress):
        if not return_exceptions:
            future.result()
    return [_outcome(future) if return_exceptions else future.result() for future in listed]


def _list_futures(futures: Iterable[FutureT], caller: str) -> list[FutureT]:
    if isinstance(futures, Future):
        raise InvalidInputError(f"{caller}: expected a list of futures, got one; write {caller}([future])")
    given: list[Any] = list(futures)
    for index, future in enumerate(given):
        if not isinstance(future, Future):
            hint = "; await coroutines in an event loop" if hasattr(future, "__await__") else ""
            raise InvalidInputError(
                f"{caller}: futures[{index}] is of class {type(future).__name__}, expected a future{hint}"
            )
    return given


def _has_failed(future: Future[Any]) -> bool:
    if future.cancelled():
        return True
    # `exception` of an `APIFuture` would count as a look of the user.
    return (future.failure if isinstance(future, APIFuture) else future.exception()) is not None


def _outcome(future: Future[T]) -> T | Exception:
    try:
        return future.result()
    except Exception as error:  # noqa: BLE001  # the caller wants it as a value
        return error
