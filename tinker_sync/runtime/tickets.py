"""Parts of a poller: its tickets, and the set of the sockets that it watches.

A poller (`poller`) holds the requests of a client that wait for their answers, and its timers. A `Ticket` is
such a request or timer. Its action is the function to call at its end. The thread that takes the action ends
the ticket. Any thread may call the methods of a ticket.

A `Readiness` watches sockets until they become readable. A watch ends when its socket is readable; a new call
of `watch` begins it again. If the system allows it, other threads can begin watches while one thread waits
(`takes_effect_at_once`).
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
    """A request that has been sent, whose answer has not been read completely.

    `step` reads the bytes that have arrived. It returns the answer if that is complete, else None. It raises
    `SendFailed` if the request has failed, also by silence until `expires_at_s`. After a redirect, a broken
    connection or a rejected token, it may send the request again, which may block for a moment. `abort`
    closes the socket.
    """

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
    """A pool that runs jobs on workers.

    `run` raises RuntimeError if the pool is closed or the system gives no thread.
    """

    def run(self, job: Callable[[], object]) -> None: ...


class Holder(Protocol):
    """The poller that holds a ticket."""

    def forget(self, ticket: Ticket) -> None: ...


class Ticket:
    """A request or a timer that a poller holds. Any thread may cancel it."""

    __slots__ = ("_holder", "call", "reaction", "request")

    def __init__(self, holder: Holder, action: Callable[..., object], call: Call | None) -> None:
        self._holder = holder
        self.reaction = [action]
        """The action, which the thread that ends the ticket pops in one step. Empty after that."""
        self.call = call
        """The request to send; None for a timer.

        Also None once the ticket has ended, because the poller may keep the ticket for longer.
        """
        self.request: OpenRequest | None = None

    def cancel(self) -> bool:
        """Cancel the ticket, so that its action is never called. Return False if it has already ended."""
        if self.take() is None:
            return False
        self._holder.forget(self)
        return True

    @property
    def ended(self) -> bool:
        """True if the ticket is done or cancelled."""
        return not self.reaction

    def take(self) -> Callable[..., object] | None:
        """End the ticket. Return the action to the first caller, and None to later ones."""
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
        """Close the set of sockets. The sockets themselves stay open."""
        if self._readiness is not None:
            self._readiness.close()


# ------------------------------------------------------------------------------------------ outcomes


def descriptor_of(ticket: Ticket) -> int:
    """Return the descriptor of a request's socket, or -1 if the request is not under way."""
    request = ticket.request  # read once: a worker may be ending it now
    return -1 if request is None else request.fileno()


def outcome_of(error: Exception) -> SendFailed:
    """Return the outcome of a request that has ended with an error other than `SendFailed`."""
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
        error: the error of the workers that refused the request; None: the client is closed.
    """
    closed = error is None or isinstance(error, WorkersClosedError)
    text = "the client is closed" if closed else f"no thread for the request: {error}"
    failed = SendFailed(text, maybe_received=False, final=True)
    failed.__cause__ = error
    return failed


def abort(ticket: Ticket, reason: str = "the client was closed") -> SendFailed:
    """Close the socket of a request that is under way, and return the failure that is its outcome.

    Args:
        ticket: the request.
        reason: the beginning of the text of the failure.
    """
    if ticket.request is not None:
        ticket.request.abort()
    return SendFailed(f"{reason} while the request was under way", maybe_received=True, final=True)


def files_to_use() -> int:
    """Return the number of requests that may be open at once: half of the files that the process may open.

    The result is at least 16 and at most 32768; it is 1024 if the system states no number of files.
    """
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return 1024
    if soft == resource.RLIM_INFINITY or soft > _UNLIMITED_FILES:
        soft = _UNLIMITED_FILES
    return max(_FEWEST_OPEN, int(soft * _SHARE_OF_FILES))


class Readiness(Protocol):
    """A set of sockets that are watched until they are readable.

    One thread waits. Other threads may begin watches if a watch `takes_effect_at_once`.
    """

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
        """Wait for a readable socket or `wake`; return the descriptors of the sockets that became readable.

        After `wake`, the list also has a descriptor that belongs to no watched socket.

        Args:
            timeout_s: the longest wait; None: no limit.
        """

    def close(self) -> None:
        """End all watches, and close this set."""


class EpollReadiness:
    """The `Readiness` of Linux. To begin a watch usually takes one system call: sockets stay registered."""

    takes_effect_at_once = True

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._never = select.EPOLLONESHOT
        self._once = select.EPOLLIN | select.EPOLLONESHOT
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # With EPOLLET each write is news, so no read is needed.
        self._epoll.register(self._bell, select.EPOLLIN | select.EPOLLET)

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
    """The `Readiness` of systems without `epoll` or `eventfd`, made with `selectors`."""

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
