"""The name of the public method that runs, and the line of the user that called it. Any thread may call this.

A context variable of the calling thread holds the name, which `x-sdk-method` of each request sends to the
server; `names_requests` decorates the classes whose public methods set it. Work in another thread keeps the
name in one of two ways: `carried` wraps a job, and a request that is sent later stores `current()` in a field
when it is made.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=type)

_name: Final[ContextVar[str]] = ContextVar("tinker_sync_method", default="")
set_current: Final = _name.set  # looked up once, because thousands of samples use it
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
        set_current(name)
        yield
    finally:
        set_current(before)


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

    The wrappers of public methods add frames between that line and the method, so no fixed `stacklevel` fits.

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


CallSite = tuple[str, CodeType, int]
"""The public method of a call, and the place of that call in the user's code: a code object and a line."""


def find_call_site() -> CallSite:
    """Return the public method that runs in this thread, and the line outside of this package that called it.

    Each of thousands of samples calls this, so it reads the frames and does no other work.
    """
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE) and (caller := frame.f_back) is not None:
        frame = caller
    return current(), frame.f_code, frame.f_lineno


def names_requests(client: C) -> C:
    """Decorate a client class, so that each request names the public method that causes it.

    Inherited methods count too, except those of a class with the attribute `_sends_nothing`: some clients
    are also futures. If one public method calls another, the requests name the first.

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
    silent = {name for kind in client.__mro__ if "_sends_nothing" in vars(kind) for name in dir(kind)}
    for attribute in set(dir(client)) - silent:
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
            set_current(name)
            value = method(*args, **kwargs)
            set_current("")
        except BaseException:
            set_current("")
            raise
        return value

    return naming


def _naming_coroutine(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def naming(*args: Any, **kwargs: Any) -> Any:
        if current():
            return await method(*args, **kwargs)
        try:
            set_current(name)
            value = await method(*args, **kwargs)
            set_current("")
        except BaseException:
            set_current("")
            raise
        return value

    return naming
