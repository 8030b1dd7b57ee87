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
# The rule does not apply to the packages that run in the embedded server or in tests. `_base.clock` makes
# locks for other modules, which are named in its place.
_NOT_WATCHED = ("tinker_sync.local.", "tinker_sync.testing.", "tinker_sync._base.clock")

breaches: list[str] = []
"""A description of each breach, with the stack of the thread that committed it."""

_real_lock = threading.Lock
_held = threading.local()


class LeafLock:
    """A lock around another one that reports each breach of the rule."""

    __slots__ = ("_lock", "made_in")

    def __init__(self, lock: Any, made_in: str) -> None:
        self._lock = lock
        self.made_in = made_in

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        return self._lock.acquire(blocking, timeout)  # type: ignore[no-any-return]

    def release(self) -> None:
        self._lock.release()

    def locked(self) -> bool:
        return self._lock.locked()  # type: ignore[no-any-return]

    def __enter__(self) -> bool:
        first = getattr(_held, "lock", None)
        if first is self:  # a signal handler, or a finalizer, on top of the `with` block
            raise RuntimeError(f"a thread takes the lock of {self.made_in}, which it holds already")
        if first is not None:
            _report(f"the lock of {self.made_in} is taken under the lock of {first.made_in}")
        entered: bool = self._lock.__enter__()
        if first is None:
            _held.lock = self
        return entered

    def __exit__(self, *_: object) -> None:
        if getattr(_held, "lock", None) is self:
            _held.lock = None
        self._lock.__exit__(None, None, None)


def install() -> None:
    """Watch the locks that the client's modules create from now on.

    Call it before the package is imported.
    """
    threading.Lock = _watching(_real_lock)  # type: ignore[misc]
    from tinker_sync._base import clock

    clock.make_lock = _watching(clock.make_lock)
    for name in ("set_result", "set_exception", "cancel"):
        watch(Future, name)


def watch(kind: type[Future[Any]], name: str) -> None:
    """Report each call of a method, which ends a future, under a lock."""
    setattr(kind, name, _checked(name, getattr(kind, name)))


def _watching(make: Callable[[], Any]) -> Callable[[], Any]:
    def make_watched() -> Any:
        module = sys._getframe(1).f_globals.get("__name__", "")
        if module.startswith(_WATCHED) and not module.startswith(_NOT_WATCHED):
            return LeafLock(make(), module)
        return make()

    return make_watched


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
