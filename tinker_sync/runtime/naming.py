"""The names of the public methods that cause requests, and the log of failures that the user never looks at.

The header `x-sdk-method` of a request sends the name to the server. `names_requests` decorates a client
class: each public method then names the requests that it causes. Public methods that it calls in turn do not
change the name. A context variable of the calling thread holds the name. Work in another thread keeps the
name in one of two ways: `carried` wraps a job, and a request that is sent later stores `current()` in a field
when it is made.

Failures that the user never looks at are logged once with the name of the call and the user's line. A call
stores the line that made it. If it fails, its future gets an `Unread`. This logs the failure when the future
is collected, when the process ends, or when a later call depends on the failed one. If the user looks at the
future first, nothing is logged. Any thread may call the functions.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, Final, ParamSpec, TypeVar

from tinker_sync._base.log import Log
from tinker_sync.errors import ClientClosedError, EarlierCallFailedError
from tinker_sync.runtime import _fork
from tinker_sync.runtime.futures import APIFuture

C = TypeVar("C", bound=type)
P = ParamSpec("P")
T = TypeVar("T")

_name: Final[ContextVar[str]] = ContextVar("tinker_sync_method", default="")
_set: Final = _name.set  # looked up once, because thousands of samples use it
_MARK: Final = "_names_requests"
_PACKAGE: Final = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

current: Final[Callable[[], str]] = _name.get
"""Return the name of the public method that runs in this thread or task, or "" outside of public methods."""


@contextmanager
def named(name: str) -> Iterator[None]:
    """Make the requests of a `with` block carry `name` as their public method; with "" they carry none.

    >>> with named("RestClient.get_session"):
    ...     current()
    'RestClient.get_session'
    """
    before = current()
    try:
        _set(name)
        yield
    finally:
        _set(before)


def carried(job: Callable[P, T]) -> Callable[P, T]:
    """Return a job for another thread whose requests name the public method that runs in this thread now.

    Outside of public methods, this is the job itself.
    """
    name = current()
    if not name:
        return job

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with named(name):
            return job(*args, **kwargs)

    return run


def warn_caller(text: str, category: type[Warning]) -> None:
    """Issue a warning that shows the line, outside of this package, that called a public method.

    The wrappers of this module add frames between that line and the method, so no fixed `stacklevel` fits.

    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     warn_caller("search is experimental", FutureWarning)
    >>> os.path.basename(caught[0].filename) == "naming.py"
    False
    """
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, category, stacklevel=level)


def names_requests(client: C) -> C:
    """Decorate a client class, so that each request names the public method that causes it.

    Inherited methods count too. If one public method calls another, the requests name the first.

    >>> @names_requests
    ... class ShopClient:
    ...     def buy(self):
    ...         return self.pay()
    ...
    ...     def pay(self):
    ...         return current()
    >>> ShopClient().buy(), ShopClient().pay(), current()
    ('ShopClient.buy', 'ShopClient.pay', '')
    """
    # Some clients are also futures. The methods of a future send no requests.
    for attribute in set(dir(client)) - set(dir(APIFuture)):
        method = inspect.getattr_static(client, attribute)
        if isinstance(method, FunctionType) and not attribute.startswith("_"):
            plain = method.__dict__.get(_MARK)
            if plain is None:
                plain = method
                # The error of a wrong call and a pickle name the client, not the base class with the method.
                plain.__module__, plain.__qualname__ = client.__module__, f"{client.__qualname__}.{attribute}"
            setattr(client, attribute, _naming(plain, f"{client.__name__}.{attribute}"))
    return client


def _naming(method: FunctionType, name: str) -> Callable[..., Any]:
    make = _naming_coroutine if inspect.iscoroutinefunction(method) else _naming_call
    wrapped = functools.wraps(method)(make(method, name))
    setattr(wrapped, _MARK, method)
    return wrapped


# These functions set the name back to "" without a reset token, because a coroutine may be closed in another
# context than the one it began in. `named` would cost a sample twice as much.


def _naming_call(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def naming(*args: Any, **kwargs: Any) -> Any:
        if current():
            return method(*args, **kwargs)
        try:  # all within the block, because Ctrl-C may come after each step
            _set(name)
            value = method(*args, **kwargs)
            _set("")
        except BaseException:
            _set("")
            raise
        return value

    return naming


def _naming_coroutine(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def naming(*args: Any, **kwargs: Any) -> Any:
        if current():
            return await method(*args, **kwargs)
        try:
            _set(name)
            value = await method(*args, **kwargs)
            _set("")
        except BaseException:
            _set("")
            raise
        return value

    return naming


CallSite = tuple[str, CodeType, int]
"""The public method of a call, and the place of that call in the user's code: a code object and a line."""

# These are not logged, because they follow from a reported failure, or from an action of the user.
_EXPECTED: Final = (CancelledError, ClientClosedError, EarlierCallFailedError)

_log = Log("tinker_sync.clients")


def find_call_site() -> CallSite:
    """Return the public method that runs in this thread, and the line outside of this package that called it.

    Each of thousands of samples calls this, so it reads the frames and does no other work.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return current(), frame.f_code, frame.f_lineno


class Unread:
    """The failure of a call, to be logged unless the user looks at the call first.

    Args:
        text: the text to log; set to "" when it is logged, or when the user looks at the call.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._generation = _fork.generation()

    def log(self) -> None:
        """Log the failure once, unless the user has looked at the call.

        A forked child does not log the failures that its parent noted before the fork.
        """
        text, self.text = self.text, ""
        if text and self._generation == _fork.generation():
            _log.warning("%s", text)


def log_if_unread(future: APIFuture[Any], site: CallSite) -> None:
    """Store `site`, the public method and the line that made a call, in the future of the call.

    If the call fails and the user never looks at it, an `Unread` logs the failure.
    """
    future._call_site = site
    future._when_done(attach_unread)


def attach_unread(future: APIFuture[Any]) -> None:
    """Attach an `Unread` to a future that has failed, unless the user has looked at the future already.

    The `Unread` logs the failure when the future is collected or the process ends. A cancel gets no `Unread`,
    nor does a failure that follows from an earlier failure or from `close`.
    """
    failure, site = future.failure, future._call_site
    if failure is None or site is None or isinstance(failure, _EXPECTED):
        return
    if future._looked_at or future._overlooked is not None:
        return
    name, code, line = site
    call = name.rpartition(".")[2] or "a call"
    place = f"{os.path.basename(code.co_filename)}:{line}"
    words = f"{type(failure).__name__}: {failure}"
    overlook(future, f"{call} at {place} failed, and its result was never looked at: {words}")


def overlook(future: APIFuture[Any], text: str) -> None:
    """Log `text` when a failed future is collected or the process ends, unless the user looks at it first.

    The user may be waiting for the future already.
    """
    future._overlooked = unread = Unread(text)
    if future._looked_at:
        unread.text = ""
    weakref.finalize(future, unread.log)
