"""The name of the public method that causes a request. The header `x-sdk-method` sends it to the server.

`names_requests` decorates a client class: each public method then names the requests that it causes. Public
methods that it calls in turn do not change the name. A context variable of the calling thread holds the name.
Work in another thread keeps the name in one of two ways: `carried` wraps a job, and a request that is sent
later stores `current()` in a field when it is made.
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
from types import FunctionType
from typing import Any, Final, ParamSpec, TypeVar

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
    """Name the requests of a `with` block after a public method; "" leaves them without a name.

    >>> with named("RestClient.get_session"):
    ...     current()
    'RestClient.get_session'
    """
    before = current()
    _set(name)
    try:
        yield
    finally:
        _set(before)


def carried(job: Callable[P, T]) -> Callable[P, T]:
    """Return a job for another thread that names its requests after this thread's public method."""
    name = current()
    if not name:
        return job

    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with named(name):
            return job(*args, **kwargs)

    return run


def warn_caller(text: str, category: type[Warning]) -> None:
    """Warn at the line outside of this package that called a public method.

    The functions of this module stand between a public method and its caller, so no fixed `stacklevel` fits.

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
    """Make each public method of a client class, inherited ones included, name the requests that it causes.

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
    # Some clients are futures of themselves. The methods of a future send no requests.
    for attribute in set(dir(client)) - set(dir(APIFuture)):
        method = inspect.getattr_static(client, attribute)
        if isinstance(method, FunctionType) and not attribute.startswith("_"):
            plain = method.__dict__.get(_MARK, method)
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
        _set(name)
        try:
            return method(*args, **kwargs)
        finally:
            _set("")

    return naming


def _naming_coroutine(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    async def naming(*args: Any, **kwargs: Any) -> Any:
        if current():
            return await method(*args, **kwargs)
        _set(name)
        try:
            return await method(*args, **kwargs)
        finally:
            _set("")

    return naming
