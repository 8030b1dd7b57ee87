"""Tickets: the requests and timers that a poller holds, and the outcomes of requests.

Any thread may enter; a ticket is ended by the first thread that takes its reaction.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from tinker_sync.transport.call import Call, Reply, SendFailed

if TYPE_CHECKING:
    from tinker_sync.runtime.readiness import Readiness

# Each open request is a file; the rest of the program needs some too.
_SHARE_OF_FILES: Final = 0.5
_FEWEST_OPEN: Final = 16
_UNLIMITED_FILES: Final = 65536

Outcome = Reply | SendFailed
"""An answer or the failure to get one, never an exception in flight: a call waits for it elsewhere."""


class OpenRequest(Protocol):
    """A request that has been sent; `step` never blocks."""

    @property
    def expires_at_s(self) -> float: ...
    def fileno(self) -> int: ...
    def step(self) -> Reply | None: ...
    def abort(self) -> None: ...


class Opener(Protocol):
    """Sends a request and returns without waiting for the answer."""

    def open(self, call: Call) -> OpenRequest: ...


class Runner(Protocol):
    """Runs a job on a worker."""

    def run(self, job: Callable[[], object]) -> None: ...


class Ticket:
    """A request or a timer that can be called off."""

    __slots__ = ("_forget", "call", "reaction", "request")

    def __init__(
        self, forget: Callable[[Ticket], object], action: Callable[..., object], call: Call | None
    ) -> None:
        self._forget = forget
        self.reaction = [action]
        """Popped, in one step, by the thread that ends it; empty from then on."""
        self.call = call
        self.request: OpenRequest | None = None

    def cancel(self) -> bool:
        """Call it off. True: `on_done` or the action has not been and will not be called."""
        if self.take() is None:
            return False
        self._forget(self)
        return True

    @property
    def ended(self) -> bool:
        """Whether it is done or called off."""
        return not self.reaction

    def take(self) -> Callable[..., object] | None:
        """Return the action to the first that asks, and None to the others."""
        try:
            return self.reaction.pop()
        except IndexError:
            return None


class Leftovers:
    """What a poller's thread leaves when it ends."""

    def __init__(
        self, tickets: list[Ticket], readiness: Readiness | None, descriptors: tuple[int, int]
    ) -> None:
        self.tickets = tickets
        self._readiness = readiness
        self._descriptors = descriptors

    def close(self) -> None:
        """Close the sockets of the poller itself."""
        if self._readiness is not None:
            self._readiness.close()
        for descriptor in self._descriptors:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)


# ------------------------------------------------------------------------------------------ outcomes


def descriptor_of(ticket: Ticket) -> int:
    """Return the number of a request's socket; -1 where there is none any more."""
    request = ticket.request  # read once: a worker may be ending it now
    return -1 if request is None else request.fileno()


def outcome_of(error: Exception) -> SendFailed:
    """Return the outcome of a request that has ended with an error of another kind."""
    failed = SendFailed(f"{type(error).__name__}: {error}", maybe_received=True, final=True)
    failed.__cause__ = error
    return failed


def closed_failure(error: Exception | None = None) -> SendFailed:
    """Return the outcome of a request that a closed client did not send."""
    failed = SendFailed("the client is closed", maybe_received=False, final=True)
    failed.__cause__ = error
    return failed


def abort(ticket: Ticket) -> SendFailed:
    """Close the socket of a request, and return the outcome."""
    if ticket.request is not None:
        ticket.request.abort()
    return SendFailed(
        "the client was closed while the request was under way", maybe_received=True, final=True
    )


def files_to_use() -> int:
    """Return the number of requests that may be open at once: half of the files of the process."""
    try:
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except (ImportError, OSError, ValueError):
        return 1024
    if soft == resource.RLIM_INFINITY or soft > _UNLIMITED_FILES:
        soft = _UNLIMITED_FILES
    return max(_FEWEST_OPEN, int(soft * _SHARE_OF_FILES))
