"""Calls of the actors of Ray from threads that must not block for ever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, Final

import ray

from tinker_sync.errors import ClientClosedError

# The longest time in which the wait for an actor notices that Ray has ended.
_NOTICE_S: Final = 1.0


def refuse_without_ray() -> None:
    """Raise an error if Ray has ended. Most functions of Ray would start it again."""
    if not ray.is_initialized():
        raise ClientClosedError("Ray was shut down, and the pool of samplers with it")


def ask(method: Any, *args: object, meanwhile: Callable[[], object]) -> Any:
    """Call a method of an actor, and return its result.

    Args:
        method: the method of the actor's handle.
        args: its arguments.
        meanwhile: called each second until the actor answers.

    Raises:
        RayError: the actor has died for good, or the method has failed.
        ClientClosedError: Ray was shut down in this process.
    """
    refuse_without_ray()
    reply = method.remote(*args).future()
    # If Ray ends meanwhile, this future never does, and `ray.get` would block the thread for ever.
    while not wait([reply], _NOTICE_S).done:
        refuse_without_ray()
        meanwhile()
    return reply.result()
