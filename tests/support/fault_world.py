"""`World`: clients of one server behind a proxy that damages requests and answers, and all their calls.

The random programs of `fault_runner`, and a state machine of hypothesis, call its methods. `finish` waits for
every future, compares the calls with the ledger of the engine, and returns the broken invariants:

- The engine applies the training calls in order, and each call at most once: exactly once if its future
  succeeded, and never if it failed before it was sent.
- Each answer belongs to its request.
- Each future ends once and in time, and fails only if an action of the world explains the error.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import threading
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack, contextmanager
from multiprocessing.managers import BaseManager
from typing import Any

from attrs import Factory, define
from support.engine_ledger import Applied, Ledger, datum_of, engine_ledger, step_of
from support.fault_proxy import FaultProxy
from support.hasty import quick_service

from tinker_sync import types
from tinker_sync.clients.sampling import SamplingClient
from tinker_sync.clients.service import ServiceClient
from tinker_sync.clients.training import TrainingClient
from tinker_sync.errors import ClientClosedError, TinkerError
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.testing import LocalServer
from tinker_sync.testing.server import PACE

MODEL = "tinker-sync/random"
# Long enough for twenty tries and more, so that no damage of `PASSING` costs a call. The pauses of these
# clients are a hundredth as long as usual.
DEADLINE_S = 600.0
_ENDED_S = 120.0
PROMPTS = [types.ModelInput.from_ints([7 * number % 256, number, 3]) for number in range(8)]
GREEDY = types.SamplingParams(max_tokens=4, temperature=0.0, seed=1)
_SILENCE_S = 1.0
_CHILD_S = 120
_CLOSE = 1e-3
_CALLBACK_LOOKS = 1000

Problem = str


@define(eq=False)
class Asked:
    """One call: its kind, its marks, its future, and the function `is_own` that checks its answer."""

    kind: str
    marks: tuple[Any, ...]
    future: Future[Any]
    thread: int
    service: Served
    is_own: Callable[[Any], bool]
    ended: int = 0
    """The number of times that the callback of the future ran."""

    def note_end(self, _: Future[Any]) -> None:
        self.ended += 1


@define(eq=False)
class Served:
    """One service client. `excused` is True after the world has closed or dropped it: its calls may fail."""

    client: ServiceClient | None
    excused: bool = False


@define(eq=False)
class History:
    """The calls on one training client, and the marks that the engine must never apply."""

    asked: list[Asked] = Factory(list)
    forbidden: list[int] = Factory(list)


@define(eq=False)
class Model:
    """One training client with its history, which the world keeps when the client is dropped."""

    client: TrainingClient
    service: Served
    history: History = Factory(History)


@define(eq=False)
class Sampler:
    """One sampling client. If it samples from the base model, the ground knows its results in advance."""

    client: SamplingClient
    service: Served
    is_base: bool


class Ground:
    """A server with its ledger, and the right tokens and scores of each prompt. Many worlds use it."""

    def __init__(self, server: LocalServer, ledger: Ledger) -> None:
        self.server = server
        self.ledger = ledger
        self.marks = itertools.count(1)
        """The source of marks. They are unique, because one world may leave work under way for the next."""
        with server.service() as service:
            sampler = service.create_sampling_client(base_model=MODEL)
            sampled = [sampler.sample(prompt, 2, GREEDY) for prompt in PROMPTS]
            scored = [sampler.compute_logprobs(prompt) for prompt in PROMPTS]
            self.tokens = [[each.tokens for each in future.result(120).sequences] for future in sampled]
            self.scores = [future.result(120) for future in scored]
            # The first model starts the threads of the engine, which no test must seem to leave behind.
            service.create_lora_training_client(MODEL, rank=1).result(120)

    @property
    def port(self) -> int:
        return int(self.server.url.rpartition(":")[2])

    def forget(self) -> None:
        """Drop the records of the ledger and the server. Called between two worlds."""
        self.ledger.forget()
        self.server.forget()


def fault_server(**settings: Any) -> LocalServer:
    """Return a server that holds polls for 0.3 s, and whose clients split passes into chunks of two data."""
    return LocalServer(model=MODEL, **{"fwdbwd_max_chunk_len": 2, "hold_s": 0.3, **settings})


@contextmanager
def ground(**settings: Any) -> Iterator[Ground]:
    """Run a server with a ledger until the end of the block, and yield their ground."""
    with engine_ledger() as ledger, fault_server(**settings) as server:
        yield Ground(server, ledger)


class World:
    """The clients and the calls of one program, which its methods make; see the module.

    Any thread may call the methods. Those that make a call take the number of the thread, because `finish`
    checks the order of the calls of each thread.

    Args:
        ground: the server.
        proxy: the proxy between the clients and the server.
        passing: True if all kinds of damage are in `PASSING`, so that every call must succeed.
        deadline_s: the deadline of each call.
    """

    def __init__(
        self, ground: Ground, proxy: FaultProxy, *, passing: bool = True, deadline_s: float = DEADLINE_S
    ) -> None:
        self.done: Counter[str] = Counter()
        """The number of times that each action was carried out."""
        self.outcomes: Counter[str] = Counter()
        """The numbers of calls by their outcome, which `finish` sets."""
        self.problems: list[Problem] = []
        self._ground = ground
        self._proxy = proxy
        self.passing = passing
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self.services: list[Served] = []
        self.models: list[Model] = []
        self.samplers: list[Sampler] = []
        self.copies: list[SamplingClient] = []
        self.asked: list[Asked] = []
        self._histories: list[History] = []
        self._dropped: list[weakref.ref[ClientRuntime]] = []

    def next_mark(self) -> int:
        return next(self._ground.marks)

    # -------------------------------------------------------------------------------------- clients

    def open(self) -> Served:
        """Make a service client behind the proxy, and add it to `services`."""
        client = self._ground.server.service(base_url=self._proxy.url, timeout=_SILENCE_S)
        client.holder.poll_s = _SILENCE_S
        served = Served(client)
        self.services.append(served)
        return served

    def model(self, served: Served, path: str | None = None) -> Model:
        """Make a training client, new or from the checkpoint at `path`, and add it to `models`."""
        assert served.client is not None
        if path is None:
            made = served.client.create_lora_training_client(MODEL, rank=4, seed=1, deadline=DEADLINE_S)
        else:
            made = served.client.create_training_client_from_state_with_optimizer(path, deadline=DEADLINE_S)
        model = Model(made, served)
        self.models.append(model)
        self._histories.append(model.history)
        return model

    def sampler(self, served: Served) -> Sampler:
        """Make a sampling client of the base model, and add it to `samplers`."""
        assert served.client is not None
        sampler = Sampler(served.client.create_sampling_client(base_model=MODEL), served, is_base=True)
        self.samplers.append(sampler)
        return sampler

    def snapshot(self, model: Model) -> None:
        """Make a sampling client of the present weights of a model, and add it to `samplers`."""
        client = model.client.save_weights_and_get_sampling_client()
        self.samplers.append(Sampler(client, model.service, is_base=False))

    def copy(self, sampler: Sampler) -> None:
        """Make a sampling client from the handle of another, and add it to `samplers` and `copies`."""
        handle = sampler.client.get_sampler_handle(include_api_key=True)
        client = SamplingClient.from_sampler_handle(handle)
        self.copies.append(client)
        # The copy has the same service, because its session ends with that.
        self.samplers.append(Sampler(client, sampler.service, is_base=sampler.is_base))

    def close(self, served: Served) -> None:
        """Close a service client, which ends its calls under way."""
        served.excused = True
        client = self._let_go(served)
        if client is not None:
            client.close()

    def drop(self, served: Served) -> None:
        """Drop every reference to a service client and its clients. Calls under way go on."""
        client = self._let_go(served)
        if client is not None:
            self._dropped.append(weakref.ref(client.holder))
        del client
        gc.collect()

    def _let_go(self, served: Served) -> ServiceClient | None:
        with self._lock:
            client, served.client = served.client, None
            self.models = [model for model in self.models if model.service is not served]
            self.samplers = [each for each in self.samplers if each.service is not served]
            self.services = [each for each in self.services if each is not served]
        return client

    # -------------------------------------------------------------------------------------- calls

    def passes(self, model: Model, thread: int, count: int, *, backward: bool = True) -> None:
        """Submit a pass over `count` new data."""
        marks = tuple(self.next_mark() for _ in range(count))
        data = [datum_of(mark, 3 + mark % 3) for mark in marks]
        kind = "forward_backward" if backward else "forward"
        future = getattr(model.client, kind)(data, "cross_entropy", deadline=self._deadline_s)
        self._note(Asked(kind, marks, future, thread, model.service, lambda _: True), model)

    def step(self, model: Model, thread: int) -> None:
        """Submit an optimizer step."""
        mark = self.next_mark()
        params = step_of(mark)
        future = model.client.optim_step(params, deadline=self._deadline_s)

        def is_own(answer: Any) -> bool:
            return bool(answer.metrics["learning_rate"] == params.learning_rate)

        self._note(Asked("optim_step", (mark,), future, thread, model.service, is_own), model)

    def save(self, model: Model, thread: int, *, state: bool = True) -> None:
        """Submit the save of a checkpoint."""
        name = f"s{self.next_mark()}"
        call = model.client.save_state if state else model.client.save_weights_for_sampler
        future = call(name, deadline=self._deadline_s)
        asked = Asked("save", (name,), future, thread, model.service, lambda a: a.path.endswith(f"/{name}"))
        self._note(asked, model)

    def sample(self, sampler: Sampler, thread: int, number: int) -> None:
        """Submit a request for two samples of prompt `number`."""
        future = sampler.client.sample(PROMPTS[number], 2, GREEDY, deadline=self._deadline_s)
        expected = self._ground.tokens[number]

        def is_own(answer: Any) -> bool:
            tokens = [each.tokens for each in answer.sequences]
            return tokens == expected if sampler.is_base else [len(each) for each in tokens] == [4, 4]

        self._note(Asked("sample", (number,), future, thread, sampler.service, is_own))

    def score(self, sampler: Sampler, thread: int, number: int) -> None:
        """Submit a request for the log-probabilities of prompt `number`."""
        future = sampler.client.compute_logprobs(PROMPTS[number], deadline=self._deadline_s)
        expected = self._ground.scores[number]

        def is_own(answer: Any) -> bool:
            # The last digits depend on the other requests that the server computes at the same time.
            return len(answer) == len(expected) and (not sampler.is_base or _are_close(answer, expected))

        self._note(Asked("compute_logprobs", (number,), future, thread, sampler.service, is_own))

    def read(self, served: Served, thread: int) -> None:
        """Submit a request for the list of training runs."""
        assert served.client is not None
        future = served.client.create_rest_client().list_training_runs(limit=1)
        self._note(Asked("rest", (), future, thread, served, lambda a: len(a.training_runs) <= 1))

    def cancel(self, number: int) -> None:
        """Cancel one of the calls, chosen by `number`."""
        if self.asked:
            self.asked[number % len(self.asked)].future.cancel()

    def wait_for(self, number: int) -> None:
        """Wait a moment for one of the calls, chosen by `number`."""
        if self.asked:
            wait([self.asked[number % len(self.asked)].future], 0.2)

    def _note(self, asked: Asked, model: Model | None = None) -> None:
        asked.future.add_done_callback(asked.note_end)
        self.asked.append(asked)
        if model is not None:
            model.history.asked.append(asked)

    def restart_proxy(self) -> None:
        """Reset every connection of every client."""
        self._proxy.restart()

    # -------------------------------------------------------------------------------------- other processes

    def fork(self, sampler: Sampler, model: Model | None) -> None:
        """Fork, and check that the child can sample, and that it may not use the parent's training client."""
        number = self.next_mark() % len(PROMPTS)
        mark = self.next_mark()
        sampler.client.result(_ENDED_S)
        if model is not None:
            model.history.forbidden.append(mark)
        heard, said = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the program forks with threads on purpose
            pid = os.fork()
        if not pid:
            code = 99
            try:
                self._proxy.close_in_child()
                code = self._live_as_child(sampler, model, number, mark)
            except BaseException as failure:
                # Another thread may have closed the client before the fork, and a damage of `LYING` may end a
                # call.
                closed = isinstance(failure, ClientClosedError) and sampler.service.excused
                lied = isinstance(failure, TinkerError) and not self.passing
                if not closed and not lied:
                    os.write(said, traceback.format_exc()[-4000:].encode())  # a longer text may block
                    raise
                code = 0
            finally:
                os._exit(code)
        os.close(said)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(heard, encoding="utf-8", errors="replace") as words:
            if code:
                self.problems.append(f"the forked child ended with {code}: {words.read()}")

    def _live_as_child(self, sampler: Sampler, model: Model | None, number: int, mark: int) -> int:
        refused = model is None
        if model is not None:
            try:
                model.client.optim_step(step_of(mark)).result(_CHILD_S)
            except TinkerError:
                refused = True
        sampled = sampler.client.sample(PROMPTS[number], 2, GREEDY).result(_CHILD_S)
        own = not sampler.is_base or [one.tokens for one in sampled.sequences] == self._ground.tokens[number]
        return 0 if refused and own else 1 if own else 2

    # -------------------------------------------------------------------------------------- the end

    def finish(self) -> list[Problem]:
        """Wait for every call, close every client, and return the broken invariants."""
        unfinished = wait([asked.future for asked in self.asked], _ENDED_S).not_done
        self.problems += [f"never ended: {future!r}" for future in unfinished]
        if self.passing:
            self._judge_creations()
        self._await_dropped()
        for copied in self.copies:
            copied.holder.close("success").result(120)
        for served in self.services:
            if served.client is not None:
                served.client.close().result(120)
        for history in self._histories:
            self._judge_history(history)
        # Callbacks run on workers, a moment after the end of the future.
        pause = threading.Event()
        for _ in range(_CALLBACK_LOOKS):
            if all(asked.ended for asked in self.asked):
                break
            pause.wait(0.005)
        for asked in self.asked:
            self._judge_end(asked)
        return self.problems

    def _await_dropped(self) -> None:
        """Wait until dropped services have no creation of a client under way.

        After the end of the proxy, a creation under way would be retried for minutes.
        """
        pause = threading.Event()
        for dropped in self._dropped:
            for _ in range(int(_ENDED_S / 0.01)):
                runtime = dropped()
                under_way = runtime is not None and runtime.lifecycle.unfinished
                del runtime
                if not under_way:
                    break
                pause.wait(0.01)

    def _judge_creations(self) -> None:
        for each in (*self.models, *self.samplers):
            failure = each.client.exception(_ENDED_S)
            if failure is not None and not each.service.excused:
                self.problems.append(f"a client was not made: {failure!r}")

    def _judge_end(self, asked: Asked) -> None:
        future = asked.future
        if not future.done():
            return
        if asked.ended != 1:
            self.problems.append(f"{asked.kind} {asked.marks} ended {asked.ended} times")
        failure = CancelledError() if future.cancelled() else future.exception()
        self.outcomes[f"{asked.kind}: {'ok' if failure is None else type(failure).__name__}"] += 1
        if failure is None:
            if not asked.is_own(future.result()):
                self.problems.append(f"{asked.kind} {asked.marks} got a foreign answer: {future.result()}")
        elif not isinstance(failure, CancelledError):
            excused = asked.service.excused or not self.passing
            if not excused or not isinstance(failure, TinkerError):
                self.problems.append(f"{asked.kind} {asked.marks} failed: {failure!r}")
            elif isinstance(failure, ClientClosedError) and not asked.service.excused:
                self.problems.append(f"{asked.kind} {asked.marks} met a closed client that is open")

    def _judge_history(self, history: History) -> None:
        asked_for = {mark for asked in history.asked for mark in asked.marks}
        runs = self._ground.ledger.with_marks(asked_for | set(history.forbidden))
        if len(runs) > 1:
            self.problems.append(f"applied to several models: {sorted(asked_for, key=str)}")
        ledger = runs[0] if runs else []
        marks = [mark for applied in ledger for mark in applied.marks]
        twice = [mark for mark, count in Counter(marks).items() if count > 1]
        if twice:
            self.problems.append(f"applied twice: {twice}")
        wrong = [mark for mark in marks if mark not in asked_for]
        if wrong:
            self.problems.append(f"applied, though no call of this client asked for it: {wrong}")
        place = {mark: number for number, mark in enumerate(marks)}
        for asked in history.asked:
            self._judge_training(asked, place, ledger)
        for thread in {asked.thread for asked in history.asked}:
            own = [asked.marks[0] for asked in history.asked if asked.thread == thread]
            places = [place[mark] for mark in own if mark in place]
            if places != sorted(places):
                self.problems.append(f"out of order in thread {thread}: {own} at {places}")

    def _judge_training(self, asked: Asked, place: dict[Any, int], ledger: list[Applied]) -> None:
        at = [place[mark] for mark in asked.marks if mark in place]
        if at and at != list(range(at[0], at[0] + len(at))):
            self.problems.append(f"{asked.kind} {asked.marks} was torn: {at}")
        if not asked.future.done():
            return
        future: Any = asked.future
        failed = future.cancelled() or future.exception() is not None
        if not failed and len(at) != len(asked.marks):
            self.problems.append(f"{asked.kind} {asked.marks} succeeded, applied were {at}")
        if failed and at and future.timeline.sending is None and not future.request_ids:
            self.problems.append(f"{asked.kind} {asked.marks} failed before it was sent, and was applied")
        if not failed and asked.kind in ("forward_backward", "forward"):
            expected = [
                one
                for applied in ledger
                for mark, one in zip(applied.marks, applied.logprobs, strict=False)
                if mark in asked.marks
            ]
            given = [
                tuple(map(float, row["logprobs"].to_numpy().ravel()))
                for row in future.result().loss_fn_outputs
            ]
            if expected != given:
                self.problems.append(f"{asked.kind} {asked.marks} got {given}, not {expected}")


def _are_close(scores: list[float | None], expected: list[float | None]) -> bool:
    pairs = zip(scores, expected, strict=True)
    return all(a == b or (a is not None and b is not None and abs(a - b) < _CLOSE) for a, b in pairs)


# ------------------ `ground_apart`: a `Ground` of fault worlds whose server runs in another process
class _Serving:
    """The server and its ledger, in the other process.

    Args:
        release_s: the seconds for which the server keeps the models of a session after the session has ended.
        settings: settings of the server.
    """

    def __init__(self, release_s: float, settings: dict[str, Any]) -> None:
        self._stack = ExitStack()
        self._ledger = self._stack.enter_context(engine_ledger())
        self._server = self._stack.enter_context(fault_server(release_s=release_s, **settings))

    def address(self) -> tuple[str, str]:
        """Return the URL and the key of the server."""
        return self._server.url, self._server.key

    def with_marks(self, marks: list[Any]) -> list[list[Applied]]:
        return self._ledger.with_marks(marks)

    def forget(self) -> None:
        self._ledger.forget()
        self._ledger.saved.clear()
        self._server.forget()

    def close(self) -> None:
        self._stack.close()


class _Manager(BaseManager):
    """The manager that starts the other process, with `_Serving` in it."""


_Manager.register("Serving", _Serving)


class _Apart:
    """A stand-in for the server and the ledger of a ground. It passes each call on to the other process."""

    def __init__(self, serving: Any) -> None:
        self._serving = serving
        self.url, self.key = serving.address()

    def service(self, **options: Any) -> ServiceClient:
        return quick_service(PACE, **{"base_url": self.url, "api_key": self.key, **options})

    def with_marks(self, marks: Iterable[Any]) -> list[list[Applied]]:
        found: list[list[Applied]] = self._serving.with_marks(list(marks))
        return found

    def forget(self) -> None:
        self._serving.forget()


@contextmanager
def ground_apart(*, release_s: float, **settings: Any) -> Iterator[Ground]:
    """Run a server and a ledger in another process until the end of the block, and yield their ground."""
    manager = _Manager(ctx=multiprocessing.get_context("spawn"))
    with manager:
        serving = manager.Serving(release_s, settings)  # type: ignore[attr-defined]
        apart = _Apart(serving)
        try:
            yield Ground(apart, apart)  # type: ignore[arg-type]
        finally:
            serving.close()
