"""What a call would use, said before it is sent, and what it has used, said when its results arrive.

Whoever limits what is spent may refuse a call here. Nobody who limits: nothing is computed for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from attrs import frozen

from tinker_sync._observe import TokensUsed
from tinker_sync.runtime import _fork
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.types.model_input import ModelInput, ModelInputChunk


@frozen(kw_only=True)
class Plan:
    """The tokens a call will take, or may.

    >>> Plan(model="s:train:0", trained=12).sampled
    0
    """

    model: str
    """The id of the model or sampler."""
    trained: int = 0
    prompt: int = 0
    sampled: int | None = 0
    """At most; None: nobody knows."""


class Limiter(Protocol):
    """Somebody who limits what is spent."""

    def hold(self, plan: Plan) -> object:
        """Set aside what a call may come to, or raise; give a key."""

    def settle(self, key: object, used: TokensUsed, *, last: bool) -> None:
        """A result has arrived, the last one or not."""

    def release(self, key: object) -> None:
        """Nothing more of a call is to come."""


class Pledge:
    """What one call may take, as all who limit have agreed. In a `with` block, which ends it when it raises.

    Thread-safe.
    """

    __slots__ = ("_held", "_lock", "_tell", "parts")

    def __init__(self, tell: Callable[[TokensUsed], object], held: list[tuple[Limiter, object]]) -> None:
        self._tell = tell
        self._held = held
        self._lock = threading.Lock()
        self.parts = 1  # guarded by _lock once results may arrive; how many are still to come

    def settle(self, used: TokensUsed) -> None:
        """A result has arrived."""
        self._tell(used)
        with self._lock:
            self.parts -= 1
            last = self.parts <= 0
        for limiter, key in self._held:
            limiter.settle(key, used, last=last)

    def follow(self, future: APIFuture[Any]) -> None:
        """Nothing more is to come when this ends."""
        if self._held:
            future.when_done(self._release)

    def _release(self, _: object = None) -> None:
        for limiter, key in self._held:
            limiter.release(key)

    def __enter__(self) -> Pledge:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        if exc_type is not None:
            self._release()


class Admission:
    """Asks all who limit. Thread-safe.

    >>> Admission(print).admitted(Plan).settle(TokensUsed(model="s:train:0", trained=2))
    TokensUsed(model='s:train:0', trained=2, prompt=0, cached=0, sampled=0)

    Args:
        tell: hears what each result took.
    """

    def __init__(self, tell: Callable[[TokensUsed], object]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._limiters: tuple[Limiter, ...] = ()  # replaced, never changed
        _fork.renew_in_child(self)

    def attach(self, limiter: Limiter) -> Callable[[], None]:
        """Have `limiter` asked about every call from now on; call what is returned to end that."""
        with self._lock:
            self._limiters = (*self._limiters, limiter)

        def detach() -> None:
            with self._lock:
                self._limiters = tuple(kept for kept in self._limiters if kept is not limiter)

        return detach

    @property
    def limiters(self) -> tuple[Limiter, ...]:
        """The limits in force now."""
        return self._limiters

    def admitted(self, plan: Callable[[], Plan], limiters: tuple[Limiter, ...] | None = None) -> Pledge:
        """Ask for a call that is to begin now.

        Args:
            plan: what it would take; only asked for if somebody limits.
            limiters: the limits that were in force when the call was made; None: those of now.

        Raises:
            TinkerError: somebody does not agree.
        """
        if limiters is None:
            limiters = self._limiters
        if not limiters:
            return Pledge(self._tell, [])
        wanted = plan()
        held: list[tuple[Limiter, object]] = []
        # What one has set aside must not stay so when the next refuses.
        with Pledge(self._tell, held) as pledge:
            for limiter in limiters:
                held.append((limiter, limiter.hold(wanted)))  # noqa: PERF401  # kept also where the next raises
        return pledge

    def renew_after_fork(self) -> None:
        """The lock may have been held in the parent."""
        self._lock = threading.Lock()


def length_of(model_input: ModelInput) -> int:
    """The tokens of an input. Of images, what they are expected to take; an image that does not say counts
    nothing, for only the server knows.

    >>> length_of(ModelInput.from_ints([1, 2, 3]))
    3
    """
    return sum(_length(chunk) for chunk in model_input.chunks)


def _length(chunk: ModelInputChunk) -> int:
    try:
        return chunk.length
    except ValueError:
        return 0
