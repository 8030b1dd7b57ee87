from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from support.raising import raising
from support.sends import BlockingSender, FakeRequest, HandWorkers, Inline, NoReactor, entry

from tinker_sync.errors import (
    APIConnectionError,
    APIStatusError,
    ClientClosedError,
    EarlierCallFailedError,
    TinkerError,
)
from tinker_sync.runtime.flows import Flows
from tinker_sync.runtime.futures import APIFuture, FutureState
from tinker_sync.runtime.send_queue import Entry, NotTaken, SendQueue, Unanswered


def queue_of(send: Callable[[FakeRequest, int], object], workers: Any = None) -> SendQueue[FakeRequest]:
    """Return a queue whose sends are calls of `send` on `workers`; None: at once."""
    flows: Any = Flows(NoReactor(), workers)  # type: ignore[arg-type]
    sender = BlockingSender(flows, workers or Inline(), send)
    return SendQueue(flows, sender.send, lambda: None, Inline())  # type: ignore[arg-type]


class Bench:
    """A send queue whose workers the test runs.

    `wire` has the numbers and names of the sent requests. A test sets `failures`: the exceptions that sends
    raise, by the name of the request.
    """

    def __init__(self) -> None:
        self.workers = HandWorkers()
        self.wire: list[tuple[int, str]] = []
        self.failures: dict[str, BaseException] = {}
        flows: Any = Flows(NoReactor(), self.workers)  # type: ignore[arg-type]
        sender = BlockingSender(flows, self.workers, lambda *given: self.send(*given))
        self.queue: SendQueue[FakeRequest] = SendQueue(
            flows,
            sender.send,
            lambda: FakeRequest("nothing"),
            Inline(),  # type: ignore[arg-type]
        )

    def send(self, request: FakeRequest, number: int) -> None:
        self.wire.append((number, request.name))
        if request.name in self.failures:
            raise self.failures[request.name]

    def append(
        self, name: str, count: int = 1, *, parallel: bool = False, alone: bool = False
    ) -> Entry[FakeRequest]:
        made = entry(name, count, parallel=parallel, alone=alone)
        self.queue.put(made)
        return made

    def while_sending(self, name: str | None, do: Callable[[], object]) -> None:
        """Call `do` while the request with this name is sent, or while any request is sent if it is None."""
        real_send = self.send

        def send(request: FakeRequest, number: int) -> None:
            if name in (None, request.name):
                do()
            real_send(request, number)

        self.send = send  # type: ignore[method-assign]

    @property
    def sent(self) -> str:
        return " ".join(f"{number}:{name}" for number, name in self.wire)


@pytest.fixture
def bench() -> Bench:
    return Bench()


REFUSED = APIStatusError.from_reply(422, {}, b'{"detail": "unknown loss"}')


class TestOrder:
    def test_the_result_of_an_operation_that_is_alone_is_waited_for(self, bench: Bench) -> None:
        first = bench.append("a", 2, alone=True)
        bench.append("b", alone=True)
        bench.append("c")
        bench.workers.do_all()
        assert bench.sent == "1:a.1 2:a.2"
        first.future.resolve(None)
        bench.workers.do_all()
        assert bench.sent == "1:a.1 2:a.2 3:b"

    def test_an_operation_that_is_alone_holds_nothing_up_for_ever(self, bench: Bench) -> None:
        first = bench.append("a", alone=True)
        bench.append("b")
        bench.workers.do_all()
        first.future.fail(REFUSED)
        bench.workers.do_all()
        assert bench.sent == "1:a 2:b"

    def test_the_first_of_parallel_chunks_waits_for_all_others(self, bench: Bench) -> None:
        bench.append("fb", 4, parallel=True)
        bench.append("optim")
        assert len(bench.workers.jobs) == 3
        bench.workers.do(2)
        bench.workers.do(0)
        assert (bench.sent, len(bench.workers.jobs)) == ("4:fb.4 2:fb.2", 1)
        bench.workers.do()
        assert len(bench.workers.jobs) == 1
        bench.workers.do()
        assert bench.sent == "4:fb.4 2:fb.2 3:fb.3 1:fb.1"

    def test_progress_shows_in_the_futures(self, bench: Bench) -> None:
        first, second = bench.append("a"), bench.append("b")
        assert [made.future.status().state for made in (first, second)] == [FutureState.QUEUED] * 2
        bench.workers.do()
        assert first.future.status().state is FutureState.SENDING
        assert second.future.status().state is FutureState.QUEUED


class TestCancel:
    def test_the_next_one_goes_on_after_a_row_of_cancelled_ones(self, bench: Bench) -> None:
        made = [bench.append(str(number)) for number in range(100)]
        for each in made[1:99]:
            assert each.future.cancel()
        bench.workers.do_all()
        assert bench.sent == "1:0 2:99"

    @pytest.mark.parametrize(("count", "parallel"), [(1, False), (3, False), (3, True)])
    def test_is_refused_from_the_send_phase_on(self, bench: Bench, count: int, parallel: bool) -> None:
        made = bench.append("a", count, parallel=parallel)
        assert not made.future.cancel()
        bench.workers.do_all()
        assert not made.future.cancel()
        for request in made.requests:
            assert request.future.resolve(request.name)
        assert made.future.result(0) == ("a" if count == 1 else ["a.1", "a.2", "a.3"])


def test_one_that_is_cancelled_before_it_begins_gets_no_number(bench: Bench) -> None:
    class Late(APIFuture[Any]):
        def _begin(self) -> bool:
            self.cancel()
            return super()._begin()

    request = FakeRequest("late")
    request.future = Late()
    bench.append("first")
    bench.queue.put(Entry("late", [request], request.future))
    bench.append("last")
    bench.workers.do_all()
    assert bench.sent == "1:first 2:last"
    assert request.future.cancelled()


def refusal_of(made: Entry[FakeRequest]) -> EarlierCallFailedError:
    failure = made.future.exception(0)
    assert isinstance(failure, EarlierCallFailedError)
    return failure


class TestFailedSend:
    def test_its_future_fails_with_the_cause_and_nothing_follows(self, bench: Bench) -> None:
        bench.failures["b"] = REFUSED
        made = {name: bench.append(name) for name in "abc"}
        bench.workers.do_all()
        made["d"] = bench.append("d")
        assert bench.sent == "1:a 2:b"
        assert made["b"].future.exception(0) is REFUSED
        assert not made["a"].future.done()
        for name in "cd":
            refusal = refusal_of(made[name])
            assert (refusal.call, refusal.number, refusal.__cause__) == ("b", 2, REFUSED)
        assert refusal_of(made["c"]) is not refusal_of(made["d"])
        assert repr(bench.queue) == "<SendQueue broken, 0 queued, next number 3>"

    def test_when_the_client_is_closed_all_say_so(self, bench: Bench) -> None:
        """Which call learns first that the client is closed, is chance."""
        bench.failures["fb.2"] = ClientClosedError()
        made = [bench.append("fb", 3), bench.append("optim")]
        bench.workers.do_all()
        made.append(bench.append("later"))
        for each in made:
            assert isinstance(each.future.exception(0), ClientClosedError)

    def test_the_error_names_the_failure_and_the_way_to_continue(self, bench: Bench) -> None:
        bench.failures["a"] = REFUSED
        bench.append("a")
        bench.workers.do_all()
        text = str(refusal_of(bench.append("b")))
        for words in (
            "a (sequence number 1)",
            "unknown loss",
            "last checkpoint",
            "training_client_from_state",
        ):
            assert words in text

    @pytest.mark.parametrize("failing", [2, 3, 4])
    @pytest.mark.parametrize("order", [(0, 0, 0), (2, 1, 0), (1, 0, 0)])
    def test_no_parallel_chunk_hangs(self, bench: Bench, failing: int, order: tuple[int, ...]) -> None:
        bench.failures[f"fb.{failing}"] = REFUSED
        made = bench.append("fb", 4, parallel=True)
        queued = bench.append("optim")
        for index in order:
            bench.workers.do(index)
        assert bench.workers.jobs == []
        assert "1:fb.1" not in bench.sent
        assert made.future.exception(0) is REFUSED
        assert all(request.future.done() for request in made.requests)
        assert refusal_of(queued).number == failing
        assert refusal_of(bench.append("later")).number == failing

    def test_chunks_not_yet_begun_stay_here(self, bench: Bench) -> None:
        bench.failures["fb.3"] = REFUSED
        bench.append("fb", 5, parallel=True)
        bench.workers.do(1)
        bench.workers.do_all()
        assert bench.sent == "3:fb.3"

    def test_serial_chunks_after_the_failed_one_stay_here(self, bench: Bench) -> None:
        """After a failed chunk, no other chunk or operation is sent. The reference client sends them."""
        bench.failures["fb.2"] = REFUSED
        made = bench.append("fb", 4)
        queued = bench.append("optim")
        bench.workers.do_all()
        assert bench.sent == "1:fb.1 2:fb.2"
        assert made.future.exception(0) is REFUSED
        assert all(request.future.done() for request in made.requests)
        assert refusal_of(queued).number == 2

    def test_two_failing_chunks_break_it_once(self, bench: Bench) -> None:
        bench.failures = {"fb.2": REFUSED, "fb.3": KeyError("second")}

        made = bench.append("fb", 3, parallel=True)
        bench.while_sending("fb.2", bench.workers.do_all)  # fb.3 fails meanwhile
        bench.workers.do_all()
        assert isinstance(made.future.exception(0), KeyError)
        assert refusal_of(bench.append("later")).number == 3

    def test_one_accepted_after_a_sibling_failed_changes_nothing(self, bench: Bench) -> None:
        bench.failures["fb.3"] = REFUSED
        made = bench.append("fb", 3, parallel=True)
        bench.while_sending("fb.2", bench.workers.do_all)  # fb.3 fails meanwhile
        bench.workers.do_all()
        assert bench.sent == "3:fb.3 2:fb.2"
        assert made.future.exception(0) is REFUSED
        assert repr(bench.queue) == "<SendQueue broken, 0 queued, next number 4>"

    @pytest.mark.parametrize("failure", [SystemExit(1), KeyError("a"), AssertionError("ours")])
    def test_no_exception_leaves_a_future_waiting(self, bench: Bench, failure: BaseException) -> None:
        bench.failures["a"] = failure
        made, queued = bench.append("a"), bench.append("b")
        bench.workers.do_all()
        assert made.future.exception(0) is failure
        assert refusal_of(queued).__cause__ is failure


def not_taken() -> NotTaken:
    return NotTaken(REFUSED)


class TestRefusedSend:
    """Tests of requests that the server certainly did not accept: the next one gets their number."""

    def test_a_parallel_operation_under_its_number_is_sent_in_order(self, bench: Bench) -> None:
        """The first chunk is sent first if its number is that of a refused request.

        The server does not wait for such a number, so it would carry out the other chunks before.
        """
        bench.failures["a"] = not_taken()
        bench.append("a")
        bench.append("b", 3, parallel=True)
        bench.append("c", 2, parallel=True)
        bench.workers.do_all()
        assert bench.sent == "1:a 1:b.1 2:b.2 3:b.3 5:c.2 4:c.1"

    def test_a_number_of_the_refused_operation_is_no_new_one_for_the_second_after_it(
        self, bench: Bench
    ) -> None:
        bench.failures["a.2"] = not_taken()
        bench.append("a", 3, parallel=True)
        bench.append("b")
        bench.append("c", 3, parallel=True)
        bench.workers.do_all()
        assert bench.sent == "2:a.2 1:b 2:c.1 3:c.2 4:c.3"

    def test_holes_of_a_parallel_operation_are_filled_with_nothing(self, bench: Bench) -> None:
        """Part 4 is accepted, request 3 is refused, and request 1 is not sent any more.

        The server would wait for numbers 1 and 3, so empty requests are sent under them.
        """
        bench.failures["fb.3"] = not_taken()
        bench.while_sending("fb.3", bench.workers.do_all)
        made = bench.append("fb", 4, parallel=True)
        bench.append("next")
        bench.workers.do(1)
        bench.workers.do_all()
        assert bench.sent == "2:fb.2 4:fb.4 3:fb.3 1:nothing 3:nothing 5:next"
        assert "2 of the 4" in str(made.future.exception(0))
        assert [request.future.done() for request in made.requests] == [True, False, True, False]

    def test_nothing_is_filled_where_nothing_was_accepted(self, bench: Bench) -> None:
        bench.failures["fb.2"] = not_taken()
        made = bench.append("fb", 3, parallel=True)
        bench.append("next")
        bench.workers.do_all()
        assert bench.sent == "2:fb.2 1:next"
        assert made.future.exception(0) is REFUSED
        assert all(request.future.done() for request in made.requests)

    def test_the_first_part_of_a_parallel_operation_comes_last(self, bench: Bench) -> None:
        bench.failures["fb.1"] = not_taken()
        bench.append("fb", 3, parallel=True)
        bench.append("next")
        bench.workers.do_all()
        assert bench.sent == "2:fb.2 3:fb.3 1:fb.1 1:nothing 4:next"

    def test_holes_that_cannot_be_filled_break_it(self, bench: Bench) -> None:
        bench.failures = {"fb.1": not_taken(), "nothing": KeyError("no forward passes")}
        made = bench.append("fb", 2, parallel=True)
        queued = bench.append("next")
        bench.workers.do_all()
        assert isinstance(made.future.exception(0), APIStatusError)
        assert (refusal_of(queued).call, refusal_of(queued).number) == ("fb", 1)

    def test_one_that_is_unknown_breaks_it_all_the_same(self, bench: Bench) -> None:
        bench.failures = {"fb.2": not_taken(), "fb.3": KeyError("lost")}
        bench.while_sending("fb.2", bench.workers.do_all)
        made = bench.append("fb", 3, parallel=True)
        queued = bench.append("next")
        bench.workers.do_all()
        assert isinstance(made.future.exception(0), KeyError)
        assert all(request.future.done() for request in made.requests)
        assert refusal_of(queued).number == 3


def unanswered() -> Unanswered:
    return Unanswered(APIConnectionError("no answer"))


class TestInDoubt:
    """Tests of requests that the server may have: they are sent again before any later number."""

    def test_nothing_is_sent_while_nobody_waits(self, bench: Bench) -> None:
        bench.failures["a"] = unanswered()
        bench.append("a")
        bench.workers.do_all()
        place: Entry[FakeRequest] = Entry("late", (), APIFuture())
        bench.queue.put(place)
        assert bench.workers.jobs == []
        bench.queue.fill(place, entry("late").requests)
        bench.workers.do_all()
        assert bench.sent == "1:a 1:a"

    @pytest.mark.parametrize("parallel", [False, True])
    @pytest.mark.parametrize("lost", [1, 2, 3, 4])
    def test_the_rest_of_the_operation_follows(self, bench: Bench, lost: int, parallel: bool) -> None:
        name = f"fb.{lost}"
        bench.failures[name] = unanswered()
        made = bench.append("fb", 4, parallel=parallel)
        bench.workers.do_all()
        assert isinstance(made.future.exception(0), APIConnectionError)
        ended = [request.future.done() for request in made.requests]
        assert ended == [request.name not in bench.sent or request.name == name for request in made.requests]
        del bench.failures[name]
        bench.append("next")
        bench.workers.do_all()
        assert bench.wire[-1] == (5, "next")
        numbers = [number for number, request in bench.wire if request.startswith("fb")]
        assert sorted(numbers) == sorted([1, 2, 3, 4, lost])
        if parallel:
            assert numbers[-1] == 1
        else:
            assert numbers == sorted(numbers)

    def test_chunks_that_had_not_begun_are_sent_once_the_lost_one_is_answered(self, bench: Bench) -> None:
        bench.failures["fb.2"] = unanswered()
        made = bench.append("fb", 4, parallel=True)
        bench.workers.do()
        bench.workers.do_all()
        assert bench.sent == "2:fb.2"
        assert [request.held for request in made.requests] == [[1], [2], [3], [4]]
        del bench.failures["fb.2"]
        bench.append("next")
        bench.workers.do_all()
        assert bench.sent == "2:fb.2 2:fb.2 3:fb.3 4:fb.4 1:fb.1 5:next"

    @pytest.mark.parametrize("failure", [MemoryError(), TinkerError("it has changed"), KeyError("ours")])
    def test_one_that_cannot_be_kept_breaks_the_queue(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, failure: Exception
    ) -> None:
        monkeypatch.setattr(FakeRequest, "hold", raising(failure))
        bench.failures["a"] = unanswered()
        made = [bench.append(name) for name in "ab"]
        bench.workers.do_all()
        assert isinstance(made[0].future.exception(0), APIConnectionError)
        assert refusal_of(made[1]).final

    def test_a_number_that_could_not_be_filled_is_filled_later(self, bench: Bench) -> None:
        bench.failures = {"fb.1": not_taken(), "nothing": unanswered()}
        made = bench.append("fb", 2, parallel=True)
        waiting = bench.append("b")
        while len(bench.wire) < 4:
            bench.workers.do_all()
        assert made.future.exception(0) is not None
        assert refusal_of(waiting).number == 1
        del bench.failures["nothing"]
        bench.append("c")
        bench.workers.do_all()
        assert bench.sent == "2:fb.2 1:fb.1 1:nothing 1:nothing 1:nothing 3:c"

    def test_a_number_that_another_request_has_is_filled(self, bench: Bench) -> None:
        conflict = APIStatusError.from_reply(409, {}, b'{"detail": "number 1 was used"}')
        bench.failures = {"a": NotTaken(REFUSED, used=True), "nothing": NotTaken(conflict)}
        bench.append("a")
        bench.append("b")
        bench.workers.do_all()
        assert bench.sent == "1:a 1:nothing 2:b"

    def test_thousands_that_are_refused_fail_one_after_the_other(self) -> None:
        queue = queue_of(raising(not_taken()))
        made = [entry(str(number)) for number in range(3000)]
        for each in made:
            queue.put(each)
        assert all(each.future.exception(0) is not None for each in made)

    def test_thousands_that_wait_in_vain_fail_one_after_the_other(self) -> None:
        queue = queue_of(raising(unanswered()))
        made = [entry(str(number)) for number in range(3000)]
        for each in made:
            queue.put(each)
        assert all(each.future.exception(0) is not None for each in made)


class TestPlaces:
    """Tests of operations whose requests are added after they were queued."""

    def keep(self, bench: Bench, first: str = "first") -> Entry[FakeRequest]:
        place: Entry[FakeRequest] = Entry("late", (), APIFuture())
        bench.queue.put(entry(first), place)
        return place

    def test_what_is_behind_waits_for_the_requests(self, bench: Bench) -> None:
        place = self.keep(bench)
        bench.append("b")
        bench.workers.do_all()
        assert bench.sent == "1:first"
        assert repr(bench.queue) == "<SendQueue idle, 2 queued, next number 2>"
        bench.queue.fill(place, entry("late", 2).requests)
        bench.append("c")
        bench.workers.do_all()
        assert bench.sent == "1:first 2:late.1 3:late.2 4:b 5:c"

    def test_requests_may_come_before_the_turn(self, bench: Bench) -> None:
        bench.append("a")
        place = self.keep(bench)
        bench.queue.fill(place, entry("late").requests)
        assert place.future.status().state is FutureState.QUEUED
        bench.workers.do_all()
        assert bench.sent == "1:a 2:first 3:late"

    def test_requests_may_come_as_soon_as_the_first_operation_is_sent(self) -> None:
        wire: list[tuple[int, str]] = []
        place: Entry[FakeRequest] = Entry("late", (), APIFuture())

        def send(request: FakeRequest, number: int) -> None:
            wire.append((number, request.name))
            if request.name == "first":
                queue.fill(place, entry("late").requests)

        queue = queue_of(send)
        queue.put(entry("first"), place)
        assert wire == [(1, "first"), (2, "late")]

    def test_the_future_cannot_be_cancelled_any_more_once_they_are_sent(self, bench: Bench) -> None:
        place = self.keep(bench)
        bench.workers.do_all()
        bench.queue.fill(place, entry("late").requests)
        assert (place.future.cancel(), place.future.running()) == (False, True)

    @pytest.mark.parametrize(
        "end", [lambda it: it.cancel(), lambda it: it.fail(REFUSED), lambda it: it.resolve(None)]
    )
    def test_a_place_that_ends_takes_no_number(self, bench: Bench, end: Callable[[Any], object]) -> None:
        place = self.keep(bench)
        bench.append("b")
        bench.workers.do_all()
        end(place.future)
        late = entry("late")
        bench.workers.do_all()
        assert bench.sent == "1:first 2:b"
        bench.queue.fill(place, late.requests)
        assert late.requests[0].future.cancelled()
        bench.workers.do_all()
        assert bench.sent == "1:first 2:b"

    def test_a_broken_queue_fails_the_places(self, bench: Bench) -> None:
        bench.failures["first"] = REFUSED
        place = self.keep(bench)
        bench.workers.do_all()
        with pytest.raises(EarlierCallFailedError):
            place.future.result(timeout=0)
        late = self.keep(bench)
        assert isinstance(late.future.exception(timeout=0), EarlierCallFailedError)

    def test_a_request_that_cannot_be_sent_breaks_the_queue(self, bench: Bench) -> None:
        bench.failures["late"] = REFUSED
        place = self.keep(bench)
        behind = bench.append("b")
        request = entry("late").requests[0]
        bench.queue.fill(place, [request])
        bench.workers.do_all()
        assert request.future.exception(timeout=0) is REFUSED
        assert isinstance(behind.future.exception(timeout=0), EarlierCallFailedError)


class TestNoLockIsHeld:
    """Tests that the queue calls other code without holding its lock; otherwise they hang."""

    @pytest.mark.parametrize("end", ["failure", "cancel"])
    def test_when_a_future_ends(self, bench: Bench, end: str) -> None:
        seen: list[bool] = []
        bench.failures["a"] = REFUSED
        bench.append("a")
        request = FakeRequest("b", lambda _: seen.append("next number 2" in repr(bench.queue)))
        bench.queue.put(Entry("b", [request], request.future))
        if end == "failure":
            bench.workers.do_all()
        else:
            request.future.cancel()
        assert seen == [True]


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="needs fork")
def test_a_forked_child_goes_on_only_after_an_idle_queue_that_it_takes_over() -> None:
    code = (
        "import os\n"
        "from types import SimpleNamespace\n"
        "from tinker_sync.runtime.flows import Flows, Moment\n"
        "from tinker_sync.runtime.futures import APIFuture\n"
        "from tinker_sync.runtime.send_queue import Entry, SendQueue\n"
        "def call(queue):\n"
        "    request = SimpleNamespace(future=APIFuture())\n"
        "    queue.put(Entry('optim_step', [request], request.future))\n"
        "    return request.future\n"
        "flows = Flows(SimpleNamespace(follow=lambda job: job() is None), None)\n"
        "wire = []\n"
        "def send(request, number, may_send):\n"
        "    wire.append(number)\n"
        "    yield from ()\n"
        "def hang(request, number, may_send):\n"
        "    yield Moment()\n"
        "idle, busy = SendQueue(flows, send, None, None), SendQueue(flows, hang, None, None)\n"
        "call(idle), call(busy), call(busy)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    flows.renew_after_fork(), idle.renew_after_fork(), busy.renew_after_fork()\n"
        "    foreign = call(idle).exception(0)\n"
        "    idle.take_over()\n"
        "    call(idle)\n"
        "    try:\n"
        "        busy.take_over()\n"
        "    except Exception as error:\n"
        "        refused = error\n"
        "    again = call(busy).exception(0)\n"
        "    ok = wire == [1, 2] and 'forked while calls were under way' in str(refused)\n"
        "    ok = ok and str(again) == str(refused) and 'take_over' in str(foreign)\n"
        "    ok = ok and repr(busy) == '<SendQueue broken, 0 queued, next number 2>'\n"
        "    os._exit(0 if ok else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "call(busy)\n"
        "assert repr(busy) == '<SendQueue sending, 2 queued, next number 2>', busy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_calls_that_were_put_or_being_taken_in_at_a_fork_cannot_be_taken_over(bench: Bench) -> None:
    late: Any = SimpleNamespace(soon=lambda *_: None)  # takes in nothing
    put, changing = SendQueue(late, late.soon, late.soon, late), bench.queue
    put.put(entry("a"))
    put.renew_after_fork()
    with changing._lock:  # as of another thread that takes operations in
        changing.renew_after_fork()
    for queue in (put, changing):
        with pytest.raises(EarlierCallFailedError, match="forked"):
            queue.take_over()
