from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import gc
import logging
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar

import pytest
from support.clock import PATIENCE_S
from support.crowd import Steps, aside, start, together, until
from support.raising import raising
from support.signals import at_every_moment

from tinker_sync._base.clock import Wake
from tinker_sync.errors import RequestFailedError
from tinker_sync.runtime.futures import APIFuture, CombinedFuture, FutureState, Status
from tinker_sync.runtime.two_passes import TwoPassFuture
from tinker_sync.runtime.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers("call", max_threads=2) as pool:
        yield pool


def failed(failure: BaseException) -> APIFuture[Any]:
    future: APIFuture[Any] = APIFuture()
    assert future.fail(failure)
    return future


def resolved(value: Any) -> APIFuture[Any]:
    future: APIFuture[Any] = APIFuture()
    assert future.resolve(value)
    return future


class TestNoResultYet:
    @pytest.mark.parametrize("kind", [APIFuture, CombinedFuture, TwoPassFuture])
    def test_what_only_the_result_has_is_asked_of_the_result(self, kind: type[APIFuture[Any]]) -> None:
        future: Any = kind.__new__(kind)  # a future whose `__init__` has not run
        with pytest.raises(AttributeError) as caught:
            _ = future.metrics
        text = (
            f"'{kind.__name__}' object has no attribute 'metrics'; call .result() first, which waits for it"
        )
        assert str(caught.value) == text
        assert (caught.value.name, caught.value.obj) == ("metrics", future)

    def test_hasattr_and_getattr_find_own_attributes_only(self) -> None:
        future = resolved(1)
        assert not hasattr(future, "metrics")
        assert getattr(future, "sequences", None) is None
        assert hasattr(future, "request_id")
        with pytest.raises(AttributeError, match=r"no attribute '_private'$"):
            _ = future._private
        with pytest.raises(TypeError, match="cannot pickle"):
            copy.deepcopy(future)


class TestARealFuture:
    def test_asyncio_wraps_it(self, workers: Workers) -> None:
        future = APIFuture[int](submit=workers.run)

        async def main() -> int:
            wrapped = asyncio.wrap_future(future)
            asyncio.get_running_loop().call_soon(future.resolve, 7)
            return await asyncio.wait_for(wrapped, PATIENCE_S)

        assert asyncio.run(main()) == 7

    @pytest.mark.parametrize("end", ["resolve", "fail", "cancel"])
    def test_asyncio_wraps_it_in_two_threads_at_the_same_moment(
        self, end: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """While one thread lets the base class know the outcome, another one finds it too."""
        future, failure = APIFuture[int](), KeyError("a")
        begun, over = threading.Event(), threading.Event()

        def held(of_base: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                if not begun.is_set():
                    begun.set()
                    assert over.wait(PATIENCE_S)
                return of_base(*args)

            return call

        base = concurrent.futures.Future
        for name in ("set_result", "set_exception", "cancel"):
            monkeypatch.setattr(base, name, held(getattr(base, name)))

        async def seen() -> Any:
            try:
                return await asyncio.wait_for(asyncio.wrap_future(future), PATIENCE_S)
            except (KeyError, asyncio.CancelledError) as error:
                return type(error)

        ends = {"resolve": partial(future.resolve, 7), "fail": partial(future.fail, failure)}
        ends.get(end, future.cancel)()
        with aside(lambda: concurrent.futures.wait([future], PATIENCE_S)):
            assert begun.wait(PATIENCE_S)
            assert asyncio.run(seen()) == {"resolve": 7, "fail": KeyError}.get(end, asyncio.CancelledError)
            over.set()

    @pytest.mark.parametrize("awaited", [False, True])
    def test_a_failure_leaves_no_cycle(self, awaited: bool) -> None:
        """A failed future is freed with its last reference, without the garbage collector."""
        future = failed(KeyError("a"))
        gone = weakref.ref(future)
        wait = partial(asyncio.run, future.coroutine()) if awaited else future.result
        gc.disable()
        try:
            with pytest.raises(KeyError) as caught:
                wait()
            del future, wait, caught
            assert gone() is None
        finally:
            gc.enable()


class TestWaitingNeverCancels:
    def test_a_wait_that_runs_out_leaves_the_future_usable(self) -> None:
        future = APIFuture[int]()
        for wait in (future.result, future.exception):
            with pytest.raises(TimeoutError, match="queued") as caught:
                wait(0)
            assert isinstance(caught.value, concurrent.futures.TimeoutError)
        assert not future.cancelled()
        future.resolve(7)
        assert future.result(0) == 7

    def test_result_async_that_runs_out_leaves_the_future_usable(self) -> None:
        future = APIFuture[int]()

        async def main() -> int:
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError) as caught:
                    await future.result_async(timeout=0)
                assert isinstance(caught.value, TimeoutError)
                assert "no result after 0 s (queued)" in str(caught.value)
            future.resolve(7)
            return await future.result_async(timeout=0)

        assert asyncio.run(main()) == 7

    @pytest.mark.parametrize(
        "wrap", [APIFuture.result_async, APIFuture.coroutine], ids=["result_async", "coroutine"]
    )
    def test_a_cancelled_task_keeps_the_future_usable(self, wrap: Callable[[APIFuture[int]], Any]) -> None:
        future = APIFuture[int]()

        async def main() -> int:
            task = asyncio.create_task(wrap(future))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(wrap(future), 0.001)
            assert not future.done()
            future.resolve(7)
            return await future

        assert asyncio.run(main()) == 7

    def test_ctrl_c_ends_the_wait_and_nothing_else(self, monkeypatch: pytest.MonkeyPatch) -> None:
        main, future = threading.main_thread(), APIFuture[int]()
        assert threading.current_thread() is main
        waiting, interrupted = threading.Event(), threading.Event()
        real_wait = Wake.wait

        def announced_wait(wake: Wake, timeout_s: float) -> bool:
            waiting.set()
            return real_wait(wake, timeout_s)

        def interrupt(*_: object) -> None:
            if not interrupted.is_set():
                interrupted.set()
                raise KeyboardInterrupt

        def press() -> None:
            assert waiting.wait(PATIENCE_S)
            # A signal between the check for signals and the wait is noticed only with the next signal, so
            # send many.
            for _ in range(1000):
                signal.pthread_kill(main.ident, signal.SIGINT)
                if interrupted.wait(0.01):
                    return

        monkeypatch.setattr(Wake, "wait", announced_wait)
        before = signal.signal(signal.SIGINT, interrupt)
        try:
            with aside(press), pytest.raises(KeyboardInterrupt):
                future.result()
        finally:
            signal.signal(signal.SIGINT, before)
        assert not future.done()
        future.resolve(7)
        assert future.result() == 7

    def test_the_failure_of_the_call_may_be_a_timeout_itself(self) -> None:
        for kind in (TimeoutError, concurrent.futures.TimeoutError):
            failure = kind("the server took too long")
            with pytest.raises(kind) as caught:
                failed(failure).result(1)
            assert caught.value is failure


class TestAwaiting:
    @pytest.mark.parametrize("end", [lambda call: call.resolve(7), lambda call: call.fail(KeyError("a"))])
    def test_other_tasks_run_even_if_the_call_has_ended(self, end: Callable[[APIFuture[int]], bool]) -> None:
        """A loop that is slower than its calls would not let a task begin that saves a checkpoint."""
        future: APIFuture[int] = APIFuture()
        end(future)

        async def main() -> bool:
            ran = asyncio.Event()

            async def beside() -> None:
                ran.set()

            task = asyncio.create_task(beside())
            with suppress(KeyError):
                await future
            began = ran.is_set()
            await task
            return began

        assert asyncio.run(main())

    def test_from_any_loop_in_any_thread(self) -> None:
        future = APIFuture[int]()
        ready = threading.Barrier(4)

        async def main() -> int:
            task = asyncio.create_task(future.coroutine())
            await asyncio.sleep(0)  # the task waits
            await asyncio.get_running_loop().run_in_executor(None, ready.wait, PATIENCE_S)
            return await task

        # In debug mode, an event loop raises an error when another thread uses it.
        with aside(*[lambda: asyncio.run(main(), debug=True)] * 3) as results:
            ready.wait(PATIENCE_S)
            future.resolve(7)
        assert results == [7, 7, 7]

    def test_failures_and_cancels_arrive_as_they_are(self) -> None:
        cancelled = APIFuture[int]()
        cancelled.cancel()

        async def main() -> None:
            with pytest.raises(RequestFailedError, match="out of memory"):
                await failed(RequestFailedError("out of memory", "req-1", "server"))
            # asyncio's CancelledError would mean that the waiting task is cancelled.
            with pytest.raises(concurrent.futures.CancelledError):
                await cancelled

        asyncio.run(main())

    def test_needs_no_event_loop_until_then(self) -> None:
        code = (
            "import sys\n"
            "from tinker_sync.runtime.futures import APIFuture\n"
            "future = APIFuture(); future.resolve(1); future.result()\n"
            "assert 'asyncio' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


class TestCallbacks:
    def test_run_on_a_worker_in_the_order_they_were_added(self, workers: Workers) -> None:
        future = APIFuture[int](submit=workers.run)
        seen: list[tuple[str, str]] = []
        over = threading.Event()
        for name in "abc":
            future.add_done_callback(
                lambda _, name=name: seen.append((name, threading.current_thread().name))
            )
        future.add_done_callback(lambda _: over.set())
        future.resolve(7)
        assert over.wait(PATIENCE_S)
        assert [name for name, _ in seen] == ["a", "b", "c"]
        assert {thread for _, thread in seen} == {"tinker-call-1"}

    @pytest.mark.parametrize("end", ["resolve", "fail", "cancel", "before"])
    def test_run_on_a_worker_however_it_ends(self, workers: Workers, end: str) -> None:
        future = APIFuture[int](submit=workers.run)
        ran_in: list[threading.Thread] = []
        over = threading.Event()

        def callback(_: Any) -> None:
            ran_in.append(threading.current_thread())
            over.set()

        if end != "before":
            future.add_done_callback(callback)
        {
            "resolve": lambda: future.resolve(1),
            "fail": lambda: future.fail(KeyError()),
            "cancel": future.cancel,
        }.get(end, lambda: future.resolve(1))()
        if end == "before":
            future.add_done_callback(callback)
        assert over.wait(PATIENCE_S)
        assert [thread.name for thread in ran_in] == ["tinker-call-1"]

    def test_one_that_blocks_does_not_hold_up_who_resolves(self, workers: Workers) -> None:
        future = APIFuture[int](submit=workers.run)
        go_on = threading.Event()
        future.add_done_callback(lambda _: go_on.wait(PATIENCE_S))
        assert future.resolve(7)  # a deadlock would hang here
        go_on.set()

    @pytest.mark.parametrize(
        "failure", [KeyError("broken callback"), SystemExit(3)], ids=["Exception", "SystemExit"]
    )
    def test_what_one_raises_is_logged_and_harms_nothing(
        self, workers: Workers, caplog: pytest.LogCaptureFixture, failure: BaseException
    ) -> None:
        future = APIFuture[int](submit=workers.run)
        over = threading.Event()

        future.add_done_callback(raising(failure))
        future.add_done_callback(lambda _: over.set())
        with caplog.at_level(logging.ERROR, logger="tinker_sync"):
            future.resolve(7)
            assert over.wait(PATIENCE_S)
        assert future.result() == 7
        (record,) = [record for record in caplog.records if record.name.startswith("tinker_sync")]
        assert record.exc_info[1] is failure
        assert workers.submit(lambda: "still there").result(PATIENCE_S) == "still there"

    def test_may_use_the_future_and_add_more(self, workers: Workers) -> None:
        future = APIFuture[int](submit=workers.run)
        seen: list[int] = []
        over = threading.Event()

        def more(done: Any) -> None:
            seen.append(done.result())
            done.cancel()
            done.add_done_callback(lambda again: (seen.append(again.result()), over.set()))

        future.add_done_callback(more)
        future.resolve(7)
        assert over.wait(PATIENCE_S)
        assert seen == [7, 7]

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_run_where_they_are_when_the_workers_have_gone(self, when: str) -> None:
        pool = Workers("call", max_threads=1)
        pool.close()
        future = APIFuture[int](submit=pool.run)
        seen: list[threading.Thread] = []
        if when == "after":
            future.resolve(7)
        future.add_done_callback(lambda _: seen.append(threading.current_thread()))
        future.resolve(7)
        assert seen == [threading.current_thread()]

    def test_without_workers_ctrl_c_is_not_swallowed(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            resolved(7).add_done_callback(raising(KeyboardInterrupt))

    def test_are_let_go_when_they_have_run(self) -> None:
        class Callback:
            def __call__(self, _: Any) -> None:
                pass

        callback = Callback()
        future, gone = APIFuture[int](when_done=(callback,)), weakref.ref(callback)
        future.add_done_callback(callback)
        future.resolve(7)
        del callback
        assert gone() is None


class TestCancel:
    def test_before_it_is_sent(self) -> None:
        future = APIFuture[int]()
        assert future.cancel()
        assert future.cancel()
        assert future.cancelled()
        assert not future.set_running_or_notify_cancel()
        with pytest.raises(concurrent.futures.CancelledError):
            future.result()

    def test_not_once_it_is_sent(self) -> None:
        future = APIFuture[int]()
        assert future.set_running_or_notify_cancel()
        assert not future.cancel()
        assert future.set_running_or_notify_cancel()  # the request is sent again
        assert future.resolve(7)
        assert not future.set_running_or_notify_cancel()
        assert not future.cancel()

    def test_a_second_one_does_not_lose_the_callbacks_of_the_first(self) -> None:
        steps = Steps("second cancel", "callbacks of the first")

        class Stepped(APIFuture[int]):
            def _conclude(self, *given: Any) -> None:
                with steps("callbacks of the first"):
                    super()._conclude(*given)

        seen: list[Any] = []
        future = Stepped(when_done=(seen.append,))
        with aside(future.cancel) as cancelled:
            until(future.cancelled)
            with steps("second cancel"):
                assert future.cancel()
        assert cancelled == [True]
        assert seen == [future]

    def test_ctrl_c_at_its_end_loses_no_thread_that_waits_and_no_callback(self) -> None:
        class Interrupted(APIFuture[int]):
            interrupted = False

            def _conclude(self, *given: Any) -> None:
                if not self.interrupted:
                    self.interrupted = True
                    raise KeyboardInterrupt
                super()._conclude(*given)

        seen = list[Any]()
        future = Interrupted(when_done=(seen.append,))
        waiting = start(lambda: future.result(PATIENCE_S))
        until(lambda: future._waiting)
        with pytest.raises(KeyboardInterrupt):
            future.cancel()
        assert future.cancelled()
        assert seen == [future]
        with pytest.raises(concurrent.futures.CancelledError):
            waiting.result(PATIENCE_S)

    def test_ctrl_c_in_a_callback_loses_no_other_callback(self) -> None:
        seen = list[Any]()
        future = APIFuture[int](when_done=(raising(KeyboardInterrupt()), seen.append))
        with pytest.raises(KeyboardInterrupt):
            future.cancel()
        assert seen == [future]

    def test_one_of_many_who_end_it_wins(self) -> None:
        for _ in range(100):
            future = APIFuture[int]()
            outcomes = together(
                partial(future.resolve, 1),
                partial(future.fail, KeyError()),
                future.cancel,
                future.cancel,
                future.set_running_or_notify_cancel,
            )
            won = {"resolved": outcomes[0], "failed": outcomes[1], "cancelled": outcomes[2] or outcomes[3]}
            assert sum(won.values()) == 1
            assert future.done()
            assert future.timeline.completed is not None
            assert concurrent.futures.wait([future], timeout=0).done == {future}


class TestStatus:
    def test_how_it_ended(self) -> None:
        cancelled = APIFuture[int]()
        cancelled.cancel()
        assert cancelled.status() == Status(FutureState.DONE, "cancelled")
        assert failed(KeyError()).status() == Status(FutureState.DONE, "failed: KeyError")


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="needs fork")
def test_a_wait_in_a_forked_child_is_an_error() -> None:
    code = (
        "import os\n"
        "from tinker_sync.errors import TinkerError\n"
        "from tinker_sync.runtime.futures import APIFuture\n"
        "open_one, done = APIFuture(), APIFuture()\n"
        "done.resolve(7)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    refused = []\n"
        "    for wait in (open_one.result, open_one.exception, lambda: open_one.coroutine().send(None)):\n"
        "        try:\n"
        "            wait()\n"
        "        except TinkerError as error:\n"
        "            refused.append('in the parent only' in str(error))\n"
        "    own = APIFuture()\n"
        "    own.resolve(8)\n"
        "    os._exit(0 if refused == [True] * 3 and done.result() == 7 and own.result() == 8 else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "open_one.resolve(9)\n"
        "assert open_one.result() == 9\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_ctrl_c_cannot_leave_a_future_locked() -> None:
    future: APIFuture[int] = APIFuture()
    entered = threading.Condition.__enter__.__code__  # type: ignore[attr-defined]

    def interrupt(frame: Any, event: str, _: object) -> None:
        if event == "return" and frame.f_code is entered:
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        future.add_done_callback(lambda _: None)
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    other = threading.Thread(target=future.resolve, args=(7,), daemon=True)
    other.start()
    other.join(PATIENCE_S)  # not a wait for the result, which would release the lock
    assert future.done()


@pytest.mark.parametrize(
    ("end", "succeeded"),
    [
        (lambda future: future.resolve(1), True),
        (lambda future: future.fail(KeyError()), False),
        (lambda future: future.cancel(), False),
    ],
)
def test_before_end_is_called_once_with_the_kind_of_the_end(
    end: Callable[[APIFuture[int]], bool], succeeded: bool
) -> None:
    future: APIFuture[int] = APIFuture()
    seen: list[tuple[bool, bool]] = []
    future._before_end = lambda succeeded: seen.append((succeeded, future.done()))
    assert end(future)
    assert not future.resolve(2)
    assert seen == [(succeeded, future.cancelled())]


class TestAnyMoment:
    """A signal at any moment of a method of a future, and what its handler does with the same future."""

    CALLS: ClassVar[dict[str, Callable[[APIFuture[Any]], Any]]] = {
        "cancel": lambda future: future.cancel(),
        "begin": lambda future: future.set_running_or_notify_cancel(),
        "done": lambda future: future.done(),
        "result": lambda future: future.result(timeout=0),
        "add_done_callback": lambda future: future.add_done_callback(lambda _: None),
    }

    @pytest.mark.parametrize("name", CALLS)
    @pytest.mark.parametrize("inner", CALLS)
    def test_a_signal_handler_may_use_the_same_future(self, name: str, inner: str) -> None:
        start(partial(self._nest, self.CALLS[name], self.CALLS[inner])).result(PATIENCE_S)

    def _nest(self, outer: Callable[[APIFuture[Any]], Any], inner: Callable[[APIFuture[Any]], Any]) -> None:
        trial = [_Trial()]

        def check(_: object, moment: str) -> None:
            trial[0].future.resolve(7)
            assert trial[0].seen == [trial[0].future] * 2, moment
            trial[0] = _Trial()

        assert at_every_moment(lambda: trial[0].run(outer), lambda: trial[0].run(inner), check)


class _Trial:
    def __init__(self) -> None:
        self.seen = list[Any]()
        self.future = APIFuture[Any](when_done=(self.seen.append, self.seen.append))

    def run(self, method: Callable[[APIFuture[Any]], Any]) -> None:
        with suppress(TimeoutError, concurrent.futures.CancelledError):
            method(self.future)


class TestFunctionsOfTheStandardLibrary:
    """The base class gets fields of its own when a function looks at them, before or after the end."""

    ENDS: ClassVar[dict[str, Callable[[APIFuture[Any]], Any]]] = {
        "resolve": lambda future: future.resolve(7),
        "fail": lambda future: future.fail(KeyError("a")),
        "cancel": lambda future: future.cancel(),
        "expire": lambda future: future._expire(KeyError("a")),
    }

    @pytest.mark.parametrize("early", [False, True])
    @pytest.mark.parametrize("name", ENDS)
    def test_wait_and_as_completed(self, name: str, early: bool) -> None:
        future, other = APIFuture[Any](), APIFuture[Any]()
        if early:
            assert concurrent.futures.wait([future, other], timeout=0).done == set()
        with aside(
            lambda: concurrent.futures.wait([future, other], PATIENCE_S, concurrent.futures.FIRST_COMPLETED),
            lambda: next(concurrent.futures.as_completed([future, other], PATIENCE_S)),
        ) as found:
            self.ENDS[name](future)
        assert found == [({future}, {other}), future]

    def test_a_look_at_any_moment_of_another_one(self) -> None:
        future = [APIFuture[Any]()]

        def end_and_look() -> None:
            future[0].resolve(7)
            assert list(concurrent.futures.as_completed(future, timeout=0)) == future

        def check(_: object, moment: str) -> None:
            assert concurrent.futures.wait(future, timeout=0).done == {*future}, moment
            future[0] = APIFuture()

        def look() -> None:
            assert future[0]._condition  # as each of the functions does first

        assert start(partial(at_every_moment, look, end_and_look, check)).result(PATIENCE_S)

    def test_callbacks_of_many_threads_run_once_each(self) -> None:
        for _ in range(200):
            future, seen = APIFuture[Any](), list[int]()
            callbacks = [partial(lambda seen, n, _: seen.append(n), seen, n) for n in range(6)]
            adders = [partial(future.add_done_callback, each) for each in callbacks]
            together(*adders, partial(future.resolve, 7), future.cancel)
            assert sorted(seen) == [0, 1, 2, 3, 4, 5]
