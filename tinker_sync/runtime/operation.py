"""`Operation`: a call of a training client in the send queue of the client. Its parts are requests.

`Sending` is the operation that is being sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from attrs import define

from tinker_sync.errors import EarlierCallFailedError, TinkerError, with_words
from tinker_sync.runtime.failures import copy_exception
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.transport.body import PiecedBody


class Part(Protocol):
    """One request of an operation, encoded except for its number, which the send queue gives it."""

    @property
    def future(self) -> APIFuture[Any]:
        """The future that ends with the answer to this request."""

    def bytes_for(self, number: int) -> bytes | PiecedBody:
        """Return the body with its sequence number. May be called once; retries send the same bytes."""

    def hold(self, number: int) -> object:
        """Keep a copy of the body, so that `bytes_for` can be called once more after the future has failed.

        Raises:
            TinkerError: the same bytes cannot be sent again.
            MemoryError: there is no memory for the copy.
        """


PartT = TypeVar("PartT", bound=Part)

Ended = Callable[["BaseException | None"], object]
"""A function that takes the end of a send: None if the server has accepted the request, else the failure."""


@define(eq=False)
class Operation(Generic[PartT]):
    """One training call in the send queue: a name for errors, its requests, and the future of the user.

    `future` combines the futures of the parts, or is the future of the only part. With `parallel`, all parts
    but the first are sent at once, and the first when the server has accepted the others. An operation
    without parts keeps a place in the queue until `SendQueue.fill` sets its parts or `future` ends.

    `alone` is for servers that do not keep the order of the calls that they have accepted: the queue sends
    the next operation only when `future` has ended.
    """

    name: str
    parts: Sequence[PartT]
    future: APIFuture[Any]
    parallel: bool = False
    alone: bool = False

    def fail(self, failure: Exception) -> None:
        """Fail the futures of the requests and the future of the call."""
        for part in self.parts:
            part.future.fail(copy_exception(failure))
        self.future.fail(copy_exception(failure))

    def consequence_of(
        self, number: int, failure: BaseException, *, final: bool = True
    ) -> EarlierCallFailedError:
        """Return the error for other requests that fail because the request with this number has failed.

        Args:
            number: the number of a request of this operation.
            failure: the failure of that request.
            final: False if later calls send that request again first.
        """
        words = str(failure).rstrip(".") or type(failure).__name__
        refusal = EarlierCallFailedError(self.name, number, words, final=final)
        refusal.__cause__ = failure
        return refusal

    def failure_in_doubt(self, failure: BaseException) -> BaseException:
        """Return `failure`, the failure of a request that the server may have, with words on what follows."""
        if not isinstance(failure, TinkerError):
            return failure
        failure = copy_exception(failure)
        # The first pass of a loss of the user's has this name too. The call as a whole is then not done.
        failure.ambiguous = self.name != "forward"
        advice = "so do not repeat it"
        if not failure.ambiguous:
            advice = "a forward pass changes nothing, so you may repeat your call"
        with_words(
            failure,
            f"the server may have this {self.name} or not: the next call of this training client sends the "
            f"same request again first and then counts it as done once; {advice}",
        )
        return failure

    def failure_after(self, failure: BaseException, taken: int) -> BaseException:
        """Return `failure`, the failure of a refused request of this call.

        If it is a `TinkerError` and `taken` is not 0, return a copy. The text of the copy adds that the
        server has accepted `taken` requests of the call.
        """
        if not taken or not isinstance(failure, TinkerError):
            return failure
        failure = copy_exception(failure)
        with_words(
            failure,
            f"{taken} of the {len(self.parts)} requests of this call were accepted; where they are backward "
            "passes, their gradients stay accumulated",
        )
        return failure


def stages(count: int, *, parallel: bool) -> list[Sequence[int]]:
    """Return the indices of an operation's parts in stages. The parts of a stage are sent together.

    >>> [list(stage) for stage in stages(4, parallel=True)]
    [[1, 2, 3], [0]]
    >>> [list(stage) for stage in stages(3, parallel=False)]
    [[0], [1], [2]]
    """
    if parallel and count > 1:
        return [range(1, count), range(1)]
    return [range(index, index + 1) for index in range(count)]


class Sending(Generic[PartT]):
    """The operation in its send phase. The queue's lock guards all attributes that change."""

    __slots__ = (
        *("beginning", "blocked", "doubtful", "failed", "first_number", "left", "operation", "refused"),
        *("stages", "taken", "under_way", "used"),
    )

    def __init__(
        self,
        operation: Operation[PartT],
        first_number: int,
        *,
        reused: bool = False,
    ) -> None:
        self.operation = operation
        self.first_number = first_number
        # A server does not wait for a number that it has refused before, so the first part has to go first.
        self.stages = deque(stages(len(operation.parts), parallel=operation.parallel and not reused))
        self.under_way: set[int] = set()
        self.taken: set[int] = set()
        """The parts that the server has accepted, and those whose numbers were filled."""
        self.refused: dict[int, BaseException] = {}  # in the order of the refusals
        self.used: set[int] = set()
        """The refused parts whose numbers the server may count as used; no other call may get them."""
        self.doubtful: dict[int, BaseException] = {}
        """The parts that the server may have or not, with the reasons."""
        self.left: set[int] = set()
        """The parts that were not sent in their stage, because another one was refused or is doubtful."""
        self.failed = False
        """True once the futures of the operation have failed; what is left of it is sent all the same."""
        self.blocked: Operation[PartT] | None = None
        """The operation that waits while what is left of this one is sent again."""
        self.beginning = True
        """True while the thread that has begun the operation will look for the next one itself."""

    def next_stage(self) -> Sequence[int]:
        """Return the indices of the parts to send now; an empty sequence if all have been sent."""
        stage: Sequence[int] = sorted(self.doubtful) or sorted(self.left)
        if not self.doubtful:
            self.left = set()
        if not stage and self.stages:
            stage = self.stages.popleft()
        self.under_way = set(stage)
        return stage

    def stays(self, index: int) -> bool:
        """Return True if a part whose turn has come is not sent, because another part was not accepted."""
        return bool(self.refused or self.doubtful) and index not in self.doubtful

    def unsent(self) -> list[int]:
        """Return the indices of the parts that are still to be sent, again or for the first time."""
        rest = () if self.refused else (*self.left, *(index for stage in self.stages for index in stage))
        return sorted({*self.doubtful, *rest})

    def holes(self) -> list[int]:
        """Return the indices of the parts whose numbers have to be filled.

        They are the parts that the server has not accepted, up to the last one whose number it has used.
        """
        return [index for index in range(self.numbers_used) if index not in self.taken]

    @property
    def numbers_used(self) -> int:
        """How many numbers the operation has used."""
        return max(self.taken | self.used, default=-1) + 1


class NotTaken(Exception):
    """A failure of a request that the server has not accepted, and will not. `__cause__` is the reason.

    With `used`, the server may count the number of the request as used. The number is then filled with a
    request without effect, because no other call may get it.
    """

    def __init__(self, cause: Exception | None = None, *, used: bool = False) -> None:
        """Store the reason."""
        super().__init__()
        self.__cause__ = cause
        self.used = used


class Unanswered(Exception):
    """A failure of a request that the server may have or not. `__cause__` is the reason.

    The same bytes may be sent again under the same number.
    """

    def __init__(self, cause: BaseException) -> None:
        """Store the reason."""
        super().__init__()
        self.__cause__ = cause
