"""Signal handlers and Ctrl-C at any moment of a call: nothing hangs, and every future ends.

`support.signals` finds the moments. A handler runs on top of the call that it interrupts, on the same thread,
so it must not need a lock that this thread holds, nor wait for another thread that needs one.
"""

from __future__ import annotations

import concurrent.futures
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from support.crowd import until
from support.isolation import our_threads
from support.scripts import Script
from support.signals import at_every_moment
from support.tinker_stub import Stub, StubServer

from tinker_sync import types
from tinker_sync._base.naming import current
from tinker_sync.clients.service import ServiceClient

PATIENCE_S = 60.0
PROMPT, PARAMS = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})


class World:
    """Clients of one service that are ready."""

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.service = ServiceClient(base_url=stub.url, api_key="tml-x")  # type: ignore[attr-defined]
        self.sampler = self.service.create_sampling_client(base_model="stub/model").result(PATIENCE_S)
        self.trainer = self.service.create_lora_training_client("stub/model").result(PATIENCE_S)
        self.rest = self.service.create_rest_client()

    def done(self, call: Callable[[], Any]) -> Future[Any]:
        """Make a call that waits for its answer. Return a future that has ended."""
        future: Future[Any] = Future()
        future.set_result(call())
        return future

    def spend(self, call: Call) -> Future[Any]:
        with self.service.budget(tokens=10**9):
            return call(self)


Call = Callable[[World], Future[Any]]


def sample(world: World) -> Future[Any]:
    return world.sampler.sample(PROMPT, 1, PARAMS)


def step(world: World) -> Future[Any]:
    return world.trainer.optim_step(types.AdamParams())


def save(world: World) -> Future[Any]:
    return world.trainer.save_state("final")


def cancelled(world: World) -> Future[Any]:
    future = sample(world)
    future.cancel()
    return future


def followed(world: World) -> Future[Any]:
    future = step(world)
    future.add_done_callback(lambda _: None)
    return future


def awaited(world: World) -> Future[Any]:
    future = step(world)
    future.result(PATIENCE_S)
    return future


def made_at_once(world: World) -> Future[Any]:
    """A call with a deadline, on a client that is not ready yet."""
    trainer = world.service.create_lora_training_client("stub/model")
    return trainer.optim_step(types.AdamParams(), deadline=PATIENCE_S)


CALLS: dict[str, Call] = {
    "sample": sample,
    "compute_logprobs": lambda world: world.sampler.compute_logprobs(PROMPT),
    "forward_backward": lambda world: world.trainer.forward_backward([DATUM], "cross_entropy"),
    "forward": lambda world: world.trainer.forward([DATUM], "cross_entropy"),
    "optim_step": step,
    "save_state": save,
    "save_weights_for_sampler": lambda world: world.trainer.save_weights_for_sampler("final"),
    "sampling client of weights": lambda world: world.trainer.save_weights_and_get_sampling_client(),  # type: ignore[dict-item,return-value]
    "list_training_runs": lambda world: world.rest.list_training_runs(),
    "delete_checkpoint": lambda world: world.rest.delete_checkpoint("run", "weights/a"),
    "create_sampling_client": lambda world: world.service.create_sampling_client(base_model="stub/model"),
    "create_lora_training_client": lambda world: world.service.create_lora_training_client("stub/model"),
    "on a client that is not ready": made_at_once,
    "get_server_capabilities": lambda world: world.done(world.service.get_server_capabilities),
    "get_info": lambda world: world.done(world.trainer.get_info),
    "sample within a budget": lambda world: world.spend(sample),
    "close": lambda world: ServiceClient(base_url=world.stub.url, api_key="tml-x").close(),  # type: ignore[attr-defined]
    "add_done_callback": followed,
    "result": awaited,
    "cancel": cancelled,
}


@pytest.fixture
def world() -> Iterator[World]:
    with StubServer() as stub:
        made = World(stub)
        with made.service:
            yield made


def end_of(future: Future[Any]) -> BaseException | None:
    return None if future.cancelled() else future.exception(PATIENCE_S)


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_handler_may_make_the_same_call_at_any_moment(world: World, name: str) -> None:
    """The handler makes the call and waits for its end, on top of each moment of the same call."""
    call = CALLS[name]

    def handle() -> None:
        concurrent.futures.wait([call(world)], PATIENCE_S)

    def check(future: Future[Any], moment: str) -> None:
        assert end_of(future) is None, moment

    assert at_every_moment(lambda: call(world), handle, check) > 40


@pytest.mark.parametrize("name", CALLS)
def test_a_signal_handler_may_save_at_any_moment(world: World, name: str) -> None:
    """As in a script that a batch system ends: the handler of SIGTERM saves, and waits for the save."""
    call = CALLS[name]

    def check(future: Future[Any], moment: str) -> None:
        assert end_of(future) is None, moment

    assert at_every_moment(lambda: call(world), lambda: save(world).result(PATIENCE_S), check) > 40


# Ctrl-C in a finalizer, or in the callback of a weak reference, is reported there and does nothing else.
swallowed = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


# Not `close`, which meets the finalizers of threads that have ended.
@swallowed
@pytest.mark.parametrize("name", [name for name in CALLS if name != "close"])
def test_ctrl_c_at_any_moment_of_a_call_leaves_nothing_behind(world: World, name: str) -> None:
    call = CALLS[name]

    def interrupt() -> None:
        raise KeyboardInterrupt

    def check(future: Future[Any] | None, moment: str) -> None:
        assert current() == "", moment  # later requests would have the name of the interrupted call
        if future is not None:
            assert end_of(future) is None, moment
        for later in (sample(world), step(world)):
            assert later.result(PATIENCE_S), moment

    call(world)  # it imports modules, and the compiler does not like Ctrl-C
    assert at_every_moment(lambda: call(world), interrupt, check) > 40
    if name in ("sample", "cancel", "optim_step", "result"):
        bodies = [asked.json() for asked in world.stub.asked("/optim_step")]
        assert [body["seq_id"] for body in bodies] == list(range(1, len(bodies) + 1))


@swallowed
@pytest.mark.parametrize("name", ["sample", "optim_step"])
def test_ctrl_c_at_any_moment_of_the_first_call_leaves_no_thread_blocked(stub: Stub, name: str) -> None:
    """The first call starts the threads of a client, and waits for some of them."""
    made: list[ServiceClient] = []

    def call() -> None:
        service = ServiceClient(base_url=stub.url, api_key="tml-x")  # type: ignore[attr-defined]
        made.append(service)
        if name == "sample":
            service.create_sampling_client(base_model="stub/model").sample(PROMPT, 1, PARAMS)
        else:
            service.create_lora_training_client("stub/model").optim_step(types.AdamParams())

    def interrupt() -> None:
        raise KeyboardInterrupt

    def check(_: object, moment: str) -> None:
        if made:  # empty if the Ctrl-C came before there was a client
            service = made.pop()
            sampler = service.create_sampling_client(base_model="stub/model")
            assert sampler.sample(PROMPT, 1, PARAMS).result(PATIENCE_S), moment
            service.close().result(PATIENCE_S)
        until(lambda: not our_threads())

    call()  # it imports modules, and the compiler does not like Ctrl-C
    check(None, "")
    assert at_every_moment(call, interrupt, check) > 40
    check(None, "")


@swallowed
def test_ctrl_c_in_cancel_hides_its_end_from_no_wait(world: World) -> None:
    """Threads in `concurrent.futures.wait` see the end of a future whose cancel was interrupted."""
    world.stub.behaviour.latency_s = 3600.0
    futures: list[Future[Any]] = []

    def call() -> Future[Any]:
        futures.append(sample(world))
        futures[-1].cancel()
        return futures[-1]

    def interrupt() -> None:
        raise KeyboardInterrupt

    def check(_: object, moment: str) -> None:
        if not futures:  # the Ctrl-C came before the call was made
            return
        future = futures.pop()
        future.cancel()  # if the Ctrl-C came before the first one
        assert not concurrent.futures.wait([future], PATIENCE_S).not_done, moment
        assert future.cancelled(), moment

    at_every_moment(call, interrupt, check)


# ------------------------------------------------------------------------------------------ by chance

ROUNDS = int(os.environ.get("INTERRUPT_ROUNDS", "25"))
LASTS_S = float(os.environ.get("SIGNALS_S", "3"))

BY_CHANCE = """
import concurrent.futures, faulthandler, itertools, random, time
faulthandler.enable()
DATUM = types.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]})
STEP = types.AdamParams()
service = ServiceClient(base_url=os.environ["URL"], api_key="tml-x")
sampler = service.create_sampling_client(base_model="stub/model").result(60)
trainer = service.create_lora_training_client("stub/model").result(60)
rest = service.create_rest_client()
"""


def test_a_timer_that_makes_every_call_on_top_of_every_call() -> None:
    """SIGALRM comes every 3 ms. Its handler makes the next call; each 50th time, it waits for the call."""
    text = f"""
    calls = [
        lambda: sampler.sample(PROMPT, 1, PARAMS),
        lambda: sampler.compute_logprobs(PROMPT),
        lambda: trainer.forward([DATUM], "cross_entropy"),
        lambda: trainer.forward_backward([DATUM], "cross_entropy"),
        lambda: trainer.optim_step(STEP),
        lambda: trainer.save_state("a"),
        lambda: trainer.save_weights_for_sampler("a"),
        lambda: trainer.save_weights_and_get_sampling_client(),
        lambda: service.create_sampling_client(base_model="stub/model"),
        lambda: service.create_lora_training_client("stub/model"),
        lambda: rest.list_training_runs(),
        lambda: rest.list_checkpoints("run"),
        lambda: rest.delete_checkpoint("run", "weights/a"),
    ]
    signals, made, inside = itertools.count(), [], []

    def handle(*_):
        number = next(signals)
        if len(inside) < 3:
            inside.append(number)
            try:
                made.append(calls[number % len(calls)]())
                if number % 50 == 0:
                    made[-1].exception(60)
            finally:
                inside.pop()

    def check(future):
        failure = future.exception(60)
        assert failure is None, failure

    for call in calls:  # they import modules, which a handler would find half imported
        check(call())
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    until, made_here = time.monotonic() + {LASTS_S}, 0
    said = time.monotonic()
    for call in itertools.cycle(calls):
        future = call()
        future.cancel() if made_here % 7 == 3 else check(future)
        made_here += 1
        service.get_server_capabilities()
        while made:
            check(made.pop())
        if time.monotonic() - said > 5:
            said = time.monotonic()
            say(made_here)
        if time.monotonic() > until:
            break
    signal.setitimer(signal.ITIMER_REAL, 0)
    while made:
        check(made.pop())
    say("whole", next(signals), made_here)
    """
    with StubServer() as stub:
        stub.keep_log = False
        with Script(BY_CHANCE + textwrap.dedent(text), URL=stub.url, unhurried=True) as script:
            while not (line := script.hear()).startswith("whole"):
                pass
            ended = script.wait()
    sys.stdout.write(f"{line}\n")  # for the long form
    assert (ended.code, ended.err) == (0, "")
    assert int(line.split()[1]) > 10


@pytest.mark.parametrize(
    "call",
    [
        "futures.append(sampler.sample(PROMPT, 1, PARAMS))",
        "futures.append(trainer.optim_step(STEP))",
        "futures.append(sampler.sample(PROMPT, 1, PARAMS)); futures[-1].cancel()",
        "futures.append(trainer.optim_step(STEP)); futures[-1].result(60)",
    ],
    ids=["sample", "optim_step", "cancel", "result"],
)
def test_one_ctrl_c_at_a_random_moment(call: str) -> None:
    """After each Ctrl-C, every future ends, no thread is left blocked, and the client goes on."""
    text = f"""
    draw, main = random.Random(7), threading.main_thread().ident
    armed, fired, never = threading.Event(), threading.Event(), threading.Event()

    def press():
        while True:
            armed.wait()
            armed.clear()
            never.wait(draw.random() * 0.002)
            signal.pthread_kill(main, signal.SIGINT)
            fired.set()

    threading.Thread(target=press, daemon=True).start()
    for round in range({ROUNDS}):
        futures = []
        try:
            armed.set()
            while True:
                {call}
        except KeyboardInterrupt:
            pass
        fired.wait()
        fired.clear()
        for future in futures:
            if not future.cancelled():
                assert future.exception(60) is None, future.exception(0)
        assert not concurrent.futures.wait(futures, 60).not_done
        assert sampler.sample(PROMPT, 1, PARAMS).result(60)
        assert trainer.optim_step(STEP).result(60)
        if round % 100 == 0:
            say(round)
    say("whole")
    """
    with StubServer() as stub:
        with Script(BY_CHANCE + textwrap.dedent(text), URL=stub.url, unhurried=True) as script:
            while script.hear() != "whole":
                pass
            ended = script.wait()
        assert (ended.code, ended.err) == (0, "")
        numbers = sorted({asked.json()["seq_id"] for asked in stub.asked("/optim_step")})
    assert numbers == list(range(1, len(numbers) + 1))
