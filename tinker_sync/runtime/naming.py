"""`names_requests`: a decorator of client classes, whose requests name the public method that causes them.

Public methods that a public method calls in turn do not change the name (`_base.naming`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, Final, TypeVar

from tinker_sync._base.naming import current, set_current
from tinker_sync.runtime.futures import APIFuture

C = TypeVar("C", bound=type)

_MARK: Final = "_names_requests"


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
