"""Sets of sockets that are watched until they become readable.

A watch ends when its socket is readable; a new call of `watch` begins it again. If the system allows it,
other threads can begin watches while one thread waits (`takes_effect_at_once`).
"""

from __future__ import annotations

import select
import selectors
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol


class Readiness(Protocol):
    """A set of watched sockets. One thread waits; any thread may begin a watch."""

    takes_effect_at_once: bool
    """False if the waiting thread must be woken to notice a new watch."""

    def watch(self, descriptor: int) -> None:
        """Watch a socket until it is readable.

        Raises:
            OSError, ValueError: the socket or this set is closed.
        """

    def forget(self, descriptor: int) -> None:
        """End the watch of a socket."""

    def wait(self, timeout_s: float | None) -> list[int]:
        """Wait for at most `timeout_s`; return the descriptors of the sockets that became readable."""

    def close(self) -> None:
        """End all watches."""


class EpollReadiness:
    """The `Readiness` of Linux, which needs one system call for a watch."""

    takes_effect_at_once = True

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._never = select.EPOLLONESHOT
        self._once = select.EPOLLIN | select.EPOLLONESHOT

    def watch(self, descriptor: int) -> None:
        try:
            self._epoll.modify(descriptor, self._once)  # a connection in use again is still registered
        except FileNotFoundError:
            self._epoll.register(descriptor, self._once)

    def forget(self, descriptor: int) -> None:
        with suppress(OSError, ValueError):
            self._epoll.modify(descriptor, self._never)

    def wait(self, timeout_s: float | None) -> list[int]:
        return [descriptor for descriptor, _ in self._epoll.poll(timeout_s)]

    def close(self) -> None:
        self._epoll.close()


class SelectorReadiness:
    """The `Readiness` of other systems."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        # A selector with a descriptor keeps its set of sockets in the kernel.
        self.takes_effect_at_once = hasattr(self._selector, "fileno")

    def watch(self, descriptor: int) -> None:
        try:
            self._selector.register(descriptor, selectors.EVENT_READ)
        except KeyError:
            self.forget(descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ)

    def forget(self, descriptor: int) -> None:
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(descriptor)

    def wait(self, timeout_s: float | None) -> list[int]:
        ready = [key.fd for key, _ in self._selector.select(timeout_s)]
        for descriptor in ready:
            self.forget(descriptor)
        return ready

    def close(self) -> None:
        self._selector.close()


make_readiness: Callable[[], Readiness] = EpollReadiness if hasattr(select, "epoll") else SelectorReadiness
