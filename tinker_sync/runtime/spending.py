"""Limits on the tokens that calls use.

Each limiter reserves the planned use of a call before the call is sent, or refuses the call. It learns the
real use when results arrive. Without a limiter, no plan is computed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from tinker_sync._base.events import CostEstimate, Limiter, TokensUsed
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.types.model_input import length_of as length_of

T = TypeVar("T")


OffMain = Callable[[Callable[[], Any]], Any]
"""A function that returns what a function without arguments returns, which it calls on some thread."""


def _at_once(work: Callable[[], T]) -> T:
    return work()


class Reservation:
    """The reservations of one call at all limiters. Thread-safe.

    A `with` block that raises an exception releases them.
    """

    __slots__ = ("_held", "_lock", "_notify", "_off_main", "_settled", "parts")

    def __init__(
        self,
        notify: Callable[[TokensUsed], object],
        held: Sequence[tuple[Limiter, object]],
        off_main: OffMain = _at_once,
    ) -> None:
        self._notify = notify
        self._held = held
        self._off_main = off_main
        self._lock = threading.Lock()
        self._settled: tuple[object, ...] = ()  # guarded by _lock
        self.parts = 1  # the results still to come; guarded by _lock once results may arrive

    def settle(self, used: TokensUsed, result: object = None) -> None:
        """Report the use of one result to the limiters and to the `notify` of the `SpendGuard`.

        Args:
            used: the tokens.
            result: identifies the result, so that it counts once; None for the only result of the call.
        """
        with self._lock:
            if result in self._settled:
                return
            self._settled += (result,)
            self.parts -= 1
            last = self.parts <= 0
        self._notify(used)
        for limiter, key in self._held:
            limiter.settle(key, used, last=last)

    def follow(self, future: APIFuture[Any]) -> None:
        """Release the reservations when `future` ends.

        This happens before waiting threads wake. After a cancel, it may happen later than that.
        """
        if self._held:
            future._before_end = self.release
            if future.done():  # it may have been cancelled just now
                self.release()

    def release(self, _succeeded: bool = False) -> None:
        """Release the reservations, because the call has ended or was not made."""
        if self._held:
            self._off_main(self._release_all)

    def _release_all(self) -> None:
        for limiter, key in self._held:
            limiter.release(key)

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self.release()


class SpendGuard:
    """The limiters of a client, asked before each sample and each pass. Thread-safe.

    >>> SpendGuard(print).reserve(CostEstimate).settle(TokensUsed(model="s:train:0", trained=2))
    TokensUsed(model='s:train:0', trained=2, prompt=0, cached=0, sampled=0)

    Args:
        notify: called with the tokens that each result used.
        off_main: does work that takes the locks of limiters, but not on the main thread, because a signal
            handler on top of it may need them (`WorkerPools.off_main`).
    """

    def __init__(self, notify: Callable[[TokensUsed], object], off_main: OffMain = _at_once) -> None:
        self._notify = notify
        self._off_main = off_main
        # A limiter once for each `attach`. A change of the list or a copy is one step, so there is no lock.
        self._attached: list[Limiter] = []

    def attach(self, limiter: Limiter) -> Callable[[], None]:
        """Add a limiter, asked about each later sample and pass. Return a function that removes it.

        A limiter that was added several times is asked once, until the last of these functions is called.
        """
        self._attached.append(limiter)
        return partial(self._attached.remove, limiter)

    @property
    def limiters(self) -> tuple[Limiter, ...]:
        """The limiters in force now."""
        return tuple({id(limiter): limiter for limiter in tuple(self._attached)}.values())

    def reserve(
        self, plan: Callable[[], CostEstimate], limiters: tuple[Limiter, ...] | None = None
    ) -> Reservation:
        """Ask the limiters about a call that is about to begin, and return their reservations.

        Args:
            plan: computes the tokens that the call may use; called only if there are limiters.
            limiters: the limiters that were in force when the call was made; None for the present ones.

        Raises:
            TinkerError: a limiter refuses the call.
        """
        if limiters is None:
            limiters = self.limiters if self._attached else ()
        if not limiters:
            return Reservation(self._notify, ())
        end: dict[str, object] = {}  # "by": what came first, the reservation or a Ctrl-C of the caller
        ask = partial(self._ask, plan(), limiters, end)
        try:
            reservation: Reservation = self._off_main(ask)
        except KeyboardInterrupt as interrupt:
            made = end.setdefault("by", interrupt)
            if isinstance(made, Reservation):
                made.release()
            raise
        return reservation

    def _ask(
        self, wanted: CostEstimate, limiters: tuple[Limiter, ...], end: dict[str, object]
    ) -> Reservation:
        held: list[tuple[Limiter, object]] = []
        # When a limiter refuses, the reservations at the limiters before it must be released.
        with Reservation(self._notify, held, self._off_main) as reservation:
            for limiter in limiters:
                held.append((limiter, limiter.hold(wanted)))  # noqa: PERF401  # kept if `hold` raises
        if end.setdefault("by", reservation) is not reservation:
            reservation.release()
        return reservation
