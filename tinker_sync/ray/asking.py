"""`RayConnection`: calls of the actors of Ray from threads that must not block for ever."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from contextlib import suppress
from typing import Any, Final

import ray

from tinker_sync.errors import ClientClosedError

# The longest time in which the wait for an actor notices the end of Ray.
_NOTICE_S: Final = 1.0


class RayConnection:
    """The connection of this process with Ray. `ray.shutdown` ends it, also if `ray.init` makes a new one."""

    def __init__(self) -> None:
        self._name = _connected_to()

    def check(self) -> None:
        """Raise ClientClosedError if the connection has ended. Most functions of Ray would start it again."""
        if _connected_to() != self._name:
            raise ClientClosedError("Ray was shut down, and the pool of samplers with it")

    def ask(self, method: Any, *args: object, meanwhile: Callable[[], object]) -> Any:
        """Call a method of an actor, and return its result.

        Args:
            method: the method of the actor's handle.
            args: its arguments.
            meanwhile: called each second until the actor answers.

        Raises:
            RayError: the actor has died for good, or the method has failed.
            ClientClosedError: the connection has ended.
        """
        self.check()
        reply = method.remote(*args).future()
        # If Ray ends meanwhile, this future never does, and `ray.get` would block the thread for ever.
        while not wait([reply], _NOTICE_S).done:
            self.check()
            meanwhile()
        return reply.result()


def _connected_to() -> tuple[str, str] | None:
    """Return the ids of the node and of the job, or None. Each connection has another pair."""
    with suppress(Exception):  # Ray ends meanwhile
        if ray.is_initialized():
            context = ray.get_runtime_context()
            return context.get_node_id(), context.get_job_id()
    return None
