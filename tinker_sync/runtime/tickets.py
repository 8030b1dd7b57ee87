"""What a poller holds: a ticket for each request or timer, and how a request comes out.

An outcome is an answer or the failure to get one, never an exception in flight: somebody waits for it, on
another thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tinker_sync.transport.call import Call, Reply, SendFailed

if TYPE_CHECKING:
    from tinker_sync.runtime.poller import Poller

Outcome = Reply | SendFailed


class Exchange(Protocol):
    """A request that has been sent; `step` never blocks."""

    @property
    def expires_at_s(self) -> float: ...
    def fileno(self) -> int: ...
    def step(self) -> Reply | None: ...
    def abort(self) -> None: ...


class Opener(Protocol):
    """Sends a request and returns without waiting for the answer."""

    def open(self, call: Call) -> Exchange: ...


class Runner(Protocol):
    """Runs a job on a worker."""

    def run(self, job: Callable[[], object]) -> None: ...


class Ticket:
    """A request or a timer that can be called off."""

    __slots__ = ("_action", "_cancelled", "_lock", "_poller", "call", "exchange")

    def __init__(self, poller: Poller, action: Callable[..., object], call: Call | None) -> None:
        self._poller = poller
        self._lock = threading.Lock()
        self._action: Callable[..., object] | None = action  # guarded by _lock; taken by whoever ends it
        self._cancelled = False
        self.call = call
        self.exchange: Exchange | None = None

    def cancel(self) -> bool:
        """Call it off. True: `on_done` or the action has not been and will not be called."""
        if self.take() is None:
            return False
        self._cancelled = True
        self._poller.forget(self)
        return True

    @property
    def ended(self) -> bool:
        """Whether it is done or called off."""
        return self._action is None

    def take(self) -> Callable[..., object] | None:
        """The action, for the first who asks."""
        with self._lock:
            action, self._action = self._action, None
        return action


# ------------------------------------------------------------------------------------------ outcomes


def descriptor_of(ticket: Ticket) -> int:
    """The number of a request's socket; -1 where there is none any more."""
    exchange = ticket.exchange  # read once: a worker may be ending it now
    return -1 if exchange is None else exchange.fileno()


def outcome_of(read: Callable[[], Reply | None]) -> Outcome | None:
    try:
        return read()
    except SendFailed as failed:
        return failed
    except Exception as error:  # noqa: BLE001  # whatever it was, somebody waits for an outcome
        return wrapped(error)


def wrapped(error: Exception) -> SendFailed:
    failed = SendFailed(f"{type(error).__name__}: {error}", maybe_received=True, final=True)
    failed.__cause__ = error
    return failed


def closed_failure(error: Exception | None = None) -> SendFailed:
    failed = SendFailed("the client is closed", maybe_received=False, final=True)
    failed.__cause__ = error
    return failed


def aborted(ticket: Ticket) -> SendFailed:
    if ticket.exchange is not None:
        ticket.exchange.abort()
    return SendFailed(
        "the client was closed while the request was under way", maybe_received=True, final=True
    )
