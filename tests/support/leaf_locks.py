"""An instrumented lock that reports a breach of the rule "locks are leaves".

After `install`, `threading.Lock` returns an instrumented lock to the modules of the client. While a thread
holds such a lock in a `with` block, it must not enter another one, and must not end a future, because the
callbacks of the future run there. The locks of other packages, of the embedded server and of the tests are
not watched.

A lock that a module acquires and releases without a `with` block is a flag or a signal, and is not watched.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

_WATCHED = "tinker_sync."
# These packages run in the embedded server or in tests, to which the rule does not apply.
_NOT_WATCHED = ("tinker_sync.local.", "tinker_sync.testing.", "tinker_sync.demo.")

breaches: list[str] = []
"""A description of each breach, with the stack of the thread that committed it."""

_real_lock = threading.Lock
_held = threading.local()


class LeafLock:
    """A double of `threading.Lock` that reports each breach of the rule."""

    __slots__ = ("_lock", "made_in")

    def __init__(self, made_in: str) -> None:
        self._lock = _real_lock()
        self.made_in = made_in

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()

    def __enter__(self) -> bool:
        first = getattr(_held, "lock", None)
        if first is self:  # a signal handler, or a finalizer, on top of the `with` block
            raise RuntimeError(f"a thread takes the lock of {self.made_in}, which it holds already")
        if first is not None:
            _report(f"the lock of {self.made_in} is taken under the lock of {first.made_in}")
        entered = self._lock.acquire()
        if first is None:
            _held.lock = self
        return entered

    def __exit__(self, *_: object) -> None:
        if getattr(_held, "lock", None) is self:
            _held.lock = None
        self._lock.release()


def install() -> None:
    """Watch the locks that the client's modules create from now on.

    Call it before the package is imported.
    """
    threading.Lock = _make_lock  # type: ignore[misc,assignment]
    for name in ("set_result", "set_exception", "cancel"):
        watch(Future, name)


def watch(kind: type[Future[Any]], name: str) -> None:
    """Report each call of a method, which ends a future, under a lock."""
    setattr(kind, name, _checked(name, getattr(kind, name)))


def _make_lock() -> Any:
    module = sys._getframe(1).f_globals.get("__name__", "")
    if module.startswith(_WATCHED) and not module.startswith(_NOT_WATCHED):
        return LeafLock(module)
    return _real_lock()


def _checked(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def check(self: Future[Any], *args: Any) -> Any:
        held = getattr(_held, "lock", None)
        if held is not None:
            _report(f"Future.{name} is called under the lock of {held.made_in}")
        return method(self, *args)

    return check


def _report(what: str) -> None:
    stack = "".join(traceback.format_stack(sys._getframe(2), limit=12))
    breaches.append(f"{what}\n{stack}")
