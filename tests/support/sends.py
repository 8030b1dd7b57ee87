"""Doubles of requests for send queues, of workers whose jobs a test runs, and of senders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tinker_sync.runtime.flows import Flow, Flows
from tinker_sync.runtime.futures import APIFuture, CombinedFuture
from tinker_sync.runtime.send_queue import Entry


class FakeRequest:
    """A request with a name instead of a body."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.future: APIFuture[Any] = APIFuture()
        self.held: list[int] = []
        """The numbers under which a copy of the body was kept, for a later send."""

    def hold(self, number: int) -> None:
        self.held.append(number)

    def __repr__(self) -> str:
        return self.name


def entry(name: str, count: int = 1, *, parallel: bool = False, alone: bool = False) -> Entry[FakeRequest]:
    """Return an entry with the requests `name.1`, `name.2` and so on. A single one has the name `name`."""
    if count == 1:
        request = FakeRequest(name)
        return Entry(name, [request], request.future, alone=alone)
    requests = [FakeRequest(f"{name}.{number}") for number in range(1, count + 1)]
    whole: CombinedFuture[Any, Any] = CombinedFuture([each.future for each in requests], merge=list)
    return Entry(name, requests, whole, parallel, alone)


class NoReactor:
    """A double of a reactor without a thread. The flows run on the thread that starts or wakes them."""

    def follow(self, job: Callable[[], object]) -> bool:
        job()
        return True

    def run_soon(self, job: Callable[[], object]) -> bool:
        return False


class OnWorkers(NoReactor):
    """A double of a reactor that leaves the flows to workers."""

    def follow(self, job: Callable[[], object]) -> bool:
        return False


class BlockingSender:
    """Sends the requests of a queue on workers, by functions that return or raise when a send has ended.

    Args:
        flows: the flows of the queue.
        workers: run the functions.
        send: takes a request and its number.
    """

    def __init__(
        self,
        flows: Flows,
        workers: Any,
        send: Callable[[FakeRequest, int], object],
    ) -> None:
        self._flows = flows
        self._workers = workers
        self._send = send

    def send(self, request: FakeRequest, number: int, may_send: Callable[[], bool]) -> Flow[None]:
        def job() -> None:
            if may_send():
                request.future._mark_sending()
                self._send(request, number)

        yield from self._flows.on_worker(self._workers, job)


class Inline:
    """A double of workers that run each job at once."""

    def run(self, job: Callable[[], object]) -> None:
        job()

    run_call = run_handlers = run


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

    run_call = run

    def do(self, index: int = 0) -> None:
        self.jobs.pop(index)()

    def do_all(self) -> None:
        while self.jobs:
            self.do()
