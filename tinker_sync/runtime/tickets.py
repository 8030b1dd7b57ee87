"""Tickets: the requests and timers that a poller holds, and the outcomes of requests.

Any thread may call the methods. The first thread that takes the reaction of a ticket ends it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Protocol

from tinker_sync.errors import TinkerError
from tinker_sync.runtime.workers import WorkersClosedError
from tinker_sync.transport.call import Call, Reply, SendFailed

if TYPE_CHECKING:
    from tinker_sync.runtime.readiness import Readiness

# Each open request uses a file of the process; the rest of the program needs some too.
_SHARE_OF_FILES: Final = 0.5
_FEWEST_OPEN: Final = 16
_UNLIMITED_FILES: Final = 65536

Outcome = Reply | SendFailed
"""An answer or the failure to get one. Both are passed on as values, because the call waits elsewhere."""


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


class Runner(Protocol):
    """A pool that runs jobs on workers."""

    def run(self, job: Callable[[], object]) -> None: ...


class Ticket:
    """A request or a timer that can be called off."""

    __slots__ = ("_forget", "call", "reaction", "request")

    def __init__(
        self, forget: Callable[[Ticket], object], action: Callable[..., object], call: Call | None
    ) -> None:
        self._forget = forget
        self.reaction = [action]
        """The action, which the thread that ends the ticket pops in one step. Empty after that."""
        self.call = call
        self.request: OpenRequest | None = None

    def cancel(self) -> bool:
        """Call the ticket off. Return True if its action was not called before; then it never is."""
        if self.take() is None:
            return False
        self._forget(self)
        return True

    @property
    def ended(self) -> bool:
        """Return True if the ticket is done or called off."""
        return not self.reaction

    def take(self) -> Callable[..., object] | None:
        """Return the action to the first caller, and None to later ones."""
        try:
            return self.reaction.pop()
        except IndexError:
            return None


class Leftovers:
    """The tickets and descriptors that a poller's thread leaves when it ends."""

    def __init__(
        self, tickets: list[Ticket], readiness: Readiness | None, descriptors: tuple[int, int]
    ) -> None:
        self.tickets = tickets
        self._readiness = readiness
        self._descriptors = descriptors

    def close(self) -> None:
        """Close the descriptors of the poller itself."""
        if self._readiness is not None:
            self._readiness.close()
        for descriptor in self._descriptors:
            if descriptor >= 0:
                with suppress(OSError):
                    os.close(descriptor)


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
    """Return the error of the client itself in an outcome that `outcome_of` made; None for all others."""
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
