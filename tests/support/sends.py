"""Doubles of requests for send queues, and of workers whose jobs a test runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinker_sync.runtime.combine import CombinedFuture
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.operation import Operation
from tinker_sync.runtime.send_queue import SendQueue


class FakePart:
    """A request with a name instead of a body."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.future: APIFuture[Any] = APIFuture()
        self.held: list[int] = []
        """The numbers under which a copy of the body was kept, for a later send."""

    def bytes_for(self, number: int) -> bytes:
        return f"{self.name} as {number}".encode()

    def hold(self, number: int) -> None:
        self.held.append(number)

    def __repr__(self) -> str:
        return self.name


def operation(name: str, count: int = 1, *, parallel: bool = False) -> Operation[FakePart]:
    """Return an operation with the parts `name.1`, `name.2` and so on. A single part has the name `name`."""
    if count == 1:
        part = FakePart(name)
        return Operation(name, [part], part.future)
    parts = [FakePart(f"{name}.{number}") for number in range(1, count + 1)]
    whole: CombinedFuture[Any, Any] = CombinedFuture([part.future for part in parts], merge=list)
    return Operation(name, parts, whole, parallel)


def enqueue(
    queue: SendQueue[FakePart], made: Operation[FakePart], place: Operation[FakePart] | None = None
) -> None:
    """Put an operation into a queue, and send it when its turn comes."""
    queue.put(made, place)
    queue.take_in()


def at_once(send: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls `send`, and then reports to its last argument that the send has ended.

    If `send` raises, the function raises too.
    """

    def sent(*arguments: Any) -> None:
        *given, ended = arguments
        send(*given)
        ended(None)

    return sent


class NoWorkers:
    """A double of workers for which the system starts no thread."""

    def run(self, job: Callable[[], object]) -> None:
        raise RuntimeError("can't start new thread")


class HandWorkers:
    """A double of the workers that keeps jobs. The test runs them, in an order of its choice."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], object]] = []

    def run(self, job: Callable[[], object]) -> None:
        self.jobs.append(job)

    def do(self, index: int = 0) -> None:
        self.jobs.pop(index)()

    def do_all(self) -> None:
        while self.jobs:
            self.do()
