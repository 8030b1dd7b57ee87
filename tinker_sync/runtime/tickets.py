"""Parts of a poller: its tickets, and the set of the sockets that it watches.

A `Ticket` is a request or a timer. Its reaction is the function to call at its end. The thread that takes the
reaction ends the ticket. A `Readiness` watches sockets until they become readable. A watch ends when its
socket is readable; a new call of `watch` begins it again. If the system allows it, other threads can begin
watches while one thread waits (`takes_effect_at_once`).

Any thread may call the methods.
"""

from __future__ import annotations

import os
import select
import selectors
from collections.abc import Callable
from contextlib import suppress
from operator import itemgetter
from typing import Final, Protocol

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.workers import WorkersClosedError
from tinker_sync.transport.call import Call, Reply, SendFailed

# Each open request uses a file of the process; the rest of the program needs some too.
_SHARE_OF_FILES: Final = 0.5
_FEWEST_OPEN: Final = 16
_UNLIMITED_FILES: Final = 65536

_descriptor_in: Final = itemgetter(0)  # of an event of epoll

Outcome = Reply | SendFailed
"""An answer, or the failure to get one.

The failure is passed on as a value and not raised, because the code that needs it runs on another thread.
"""


class OpenRequest(Protocol):
    """A request that has been sent. `step` never blocks."""

    @property
    def expires_at_s(self) -> float: ...
    def fileno(self) -> int: ...
    def step(self) -> Reply | None: ...
    def abort(self) -> None: ...


class Opener(Protocol):
    """A sender of requests that does not wait for the answers."""

    def open(self, call: Call) -> OpenRequest: ...
    def has_idle_connection(self) -> bool: ...


class Runner(Protocol):
    """A pool that runs jobs on workers."""

    def run(self, job: Callable[[], object]) -> None: ...


class Holder(Protocol):
    """The poller of a ticket."""

    def forget(self, ticket: Ticket) -> None: ...


class Ticket:
    """A request or a timer that can be cancelled."""

    __slots__ = ("_holder", "call", "reaction", "request")

    def __init__(self, holder: Holder, action: Callable[..., object], call: Call | None) -> None:
        self._holder = holder
        self.reaction = [action]
        """The action, which the thread that ends the ticket pops in one step. Empty after that."""
        self.call = call
        """The request to send; None once the ticket has ended, because the poller keeps tickets longer."""
        self.request: OpenRequest | None = None

    def cancel(self) -> bool:
        """Cancel the ticket. Return True if its action was not called before; then it is never called."""
        if self.take() is None:
            return False
        self._holder.forget(self)
        return True

    @property
    def ended(self) -> bool:
        """True if the ticket is done or cancelled."""
        return not self.reaction

    def take(self) -> Callable[..., object] | None:
        """Return the action to the first caller, and None to later ones."""
        try:
            action = self.reaction.pop()
        except IndexError:
            return None
        self.call = None
        return action


class Leftovers:
    """The tickets and the set of sockets that a poller's thread leaves when it ends."""

    def __init__(self, tickets: list[Ticket], readiness: Readiness | None) -> None:
        self.tickets = tickets
        self._readiness = readiness

    def close(self) -> None:
        """Close the descriptors of the poller itself."""
        if self._readiness is not None:
            self._readiness.close()


# ------------------------------------------------------------------------------------------ outcomes


def descriptor_of(ticket: Ticket) -> int:
    """Return the descriptor of a request's socket, or -1 if the request has ended."""
    request = ticket.request  # read once: a worker may be ending it now
    return -1 if request is None else request.fileno()


def outcome_of(error: Exception) -> SendFailed:
    """Return the outcome of a request that has ended with an unexpected error."""
    failed = SendFailed(f"{type(error).__name__}: {error}", maybe_received=True, final=True)
    failed.__cause__ = error
    return failed


def own_failure(outcome: Outcome) -> TinkerError | None:
    """Return the `TinkerError` that `outcome_of` has put into an outcome, or None for any other outcome."""
    if not isinstance(outcome, SendFailed) or not (outcome.final and outcome.maybe_received):
        return None
    return outcome.__cause__ if isinstance(outcome.__cause__, TinkerError) else None


def closed_failure(error: Exception | None = None) -> SendFailed:
    """Return the outcome of a request that was not sent: the client is closed, or has no thread for it.

    Args:
        error: the error of the workers that refused the request.
    """
    closed = error is None or isinstance(error, WorkersClosedError)
    text = "the client is closed" if closed else f"no thread for the request: {error}"
    failed = SendFailed(text, maybe_received=False, final=True)
    failed.__cause__ = error
    return failed


def abort(ticket: Ticket, reason: str = "the client was closed") -> SendFailed:
    """Close the socket of a request that is under way, and return its outcome."""
    if ticket.request is not None:
        ticket.request.abort()
    return SendFailed(f"{reason} while the request was under way", maybe_received=True, final=True)


def files_to_use() -> int:
    """Return the number of requests that may be open at once: half of the files that the process may open."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return 1024
    if soft == resource.RLIM_INFINITY or soft > _UNLIMITED_FILES:
        soft = _UNLIMITED_FILES
    return max(_FEWEST_OPEN, int(soft * _SHARE_OF_FILES))


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

    def wake(self) -> None:
        """End the wait of the thread that waits, or the next wait if no thread waits now.

        The wait returns a descriptor that belongs to no watched socket.
        """

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
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(
            self._bell, select.EPOLLIN | select.EPOLLET
        )  # each write is news; no read is needed

    def watch(self, descriptor: int) -> None:
        try:
            self._epoll.modify(descriptor, self._once)  # a connection in use again is still registered
        except FileNotFoundError:
            self._epoll.register(descriptor, self._once)

    def forget(self, descriptor: int) -> None:
        with suppress(OSError, ValueError):
            self._epoll.modify(descriptor, self._never)

    def wake(self) -> None:
        with suppress(OSError):  # if it is closed, the thread has ended
            os.eventfd_write(self._bell, 1)

    def wait(self, timeout_s: float | None) -> list[int]:
        return list(map(_descriptor_in, self._epoll.poll(timeout_s)))

    def close(self) -> None:
        bell, self._bell = self._bell, -1
        if bell >= 0:
            os.close(bell)
        self._epoll.close()


class SelectorReadiness:
    """The `Readiness` of other systems."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        # A selector with a descriptor keeps its set of sockets in the kernel.
        self.takes_effect_at_once = hasattr(self._selector, "fileno")
        self._ear, self._bell = os.pipe()
        os.set_blocking(self._ear, False)
        os.set_blocking(self._bell, False)
        self._selector.register(self._ear, selectors.EVENT_READ)

    def watch(self, descriptor: int) -> None:
        try:
            self._selector.register(descriptor, selectors.EVENT_READ)
        except KeyError:
            self.forget(descriptor)
            self._selector.register(descriptor, selectors.EVENT_READ)

    def forget(self, descriptor: int) -> None:
        with suppress(KeyError, ValueError, OSError):
            self._selector.unregister(descriptor)

    def wake(self) -> None:
        with suppress(OSError):  # if the pipe is full, the thread wakes anyway; if closed, it has ended
            os.write(self._bell, b".")

    def wait(self, timeout_s: float | None) -> list[int]:
        ready = [key.fd for key, _ in self._selector.select(timeout_s)]
        for descriptor in ready:
            if descriptor != self._ear:
                self.forget(descriptor)
                continue
            with suppress(BlockingIOError):
                os.read(self._ear, 4096)
        return ready

    def close(self) -> None:
        self._selector.close()
        ends, self._ear, self._bell = (self._ear, self._bell), -1, -1
        for end in ends:
            if end >= 0:
                os.close(end)


make_readiness: Callable[[], Readiness] = (
    EpollReadiness if hasattr(select, "epoll") and hasattr(os, "eventfd") else SelectorReadiness
)
