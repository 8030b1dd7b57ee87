"""The `…_async` twins of the clients' methods, for scripts that use both blocking and `async` code.

A twin repeats no logic: it calls the method of the same name without the ending. So a subclass that
overrides the method changes its twin too. The package runs no event loop; a twin runs in the loop of its
caller.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Concatenate, ParamSpec, TypeVar

from tinker_sync.runtime.futures import APIFuture, settle

S = TypeVar("S")
P = ParamSpec("P")
T = TypeVar("T")


def _named(twin: Any, method: Callable[..., Any], what: str) -> Any:
    functools.update_wrapper(twin, method)
    del twin.__wrapped__  # the result of the twin has another type
    declared = inspect.signature(method)
    awaited = str(declared.return_annotation)
    if what.startswith("Awaits the result") and awaited.startswith("APIFuture["):
        awaited = awaited[len("APIFuture[") : -1]
    twin.__signature__ = declared.replace(return_annotation=awaited)
    twin.__name__ = f"{method.__name__}_async"
    twin.__qualname__ = f"{method.__qualname__}_async"
    twin.__doc__ = f"{what} Arguments and errors as in `{method.__name__}`."
    return twin


def async_blocking(
    method: Callable[Concatenate[S, P], T],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return the `_async` twin of a method that blocks. The twin runs the method on a thread of the client.

    The loop's own executor is unsuitable: the interpreter joins the threads of that executor at exit, so
    Ctrl-C would wait for the server.
    """
    name = method.__name__

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        bound = functools.partial(getattr(self, name), *args, **kwargs)
        context = contextvars.copy_context()
        future: APIFuture[T] = APIFuture()
        owner: Any = self
        owner.holder.lifecycle.refuse_if_leaving()
        owner.holder.pools.awaited.run_call(lambda: settle(future, lambda: context.run(bound)))
        return await future

    made: Callable[Concatenate[S, P], Coroutine[Any, Any, T]] = _named(
        twin, method, f"Awaits the value of `{name}` without blocking the loop."
    )
    return made


def async_result(
    method: Callable[Concatenate[S, P], Future[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, T]]:
    """Return the `_async` twin of a method that returns a future.

    Awaiting the twin gives the result of this future, as in the reference client.
    """
    name = method.__name__

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = await getattr(self, name)(*args, **kwargs)
        return result

    made: Callable[Concatenate[S, P], Coroutine[Any, Any, T]] = _named(
        twin, method, f"Awaits the result of `{name}`."
    )
    return made


def async_future(
    method: Callable[Concatenate[S, P], APIFuture[T]],
) -> Callable[Concatenate[S, P], Coroutine[Any, Any, APIFuture[T]]]:
    """Return the `_async` twin of a method that returns a future.

    Awaiting the twin gives the future, which the caller awaits in turn.
    """
    name = method.__name__

    async def twin(self: S, /, *args: P.args, **kwargs: P.kwargs) -> APIFuture[T]:
        future: APIFuture[T] = getattr(self, name)(*args, **kwargs)
        return future

    made: Callable[Concatenate[S, P], Coroutine[Any, Any, APIFuture[T]]] = _named(
        twin,
        method,
        f"Submits as `{name}` does: awaiting it gives the future, awaiting that gives the result.",
    )
    return made
