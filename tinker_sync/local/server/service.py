"""The shared state of all handlers: the store, the host, the flags, sessions, models and samplers.

The state belongs to the thread of the event loop. Work that blocks (files, the database, large bodies) runs
on a few threads. Computations run in the host. Handlers await both.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import secrets
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, TypeVar, cast

import attrs

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.local.engine.host import JobWorker
from tinker_sync.local.server.adapters import Adapters
from tinker_sync.local.server.lanes import Lane, Seen, Step
from tinker_sync.local.server.problems import Refused, UserFault, failure_of
from tinker_sync.local.server.promises import Failure, Promise, Promises, Result
from tinker_sync.local.server.recorded import RecordedSamples
from tinker_sync.local.server.signing import Signer
from tinker_sync.local.store import USER, StoreError
from tinker_sync.types.billing import AuditLogEntry
from tinker_sync.types.checkpoint import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from tinker_sync.local.engine.host import BaseModel, Host
    from tinker_sync.local.engine.lora import LoraSettings
    from tinker_sync.local.server.flags import Flags
    from tinker_sync.local.store import Store
    from tinker_sync.types.completion import FutureCompletion

T = TypeVar("T")

SWEEP_S = 30.0
SHUTTING_DOWN = "the server is shutting down"
UNSAVED = "unsaved:"
"""The beginning of the path that the store has for a sampler whose weights no checkpoint contains."""
_DISK_THREADS = 2
_TRACED = 10_000
_MOST_IGNORED = 1000
_MOST_EVENTS = 10_000

logger = logging.getLogger("tinker_sync.local")


@attrs.frozen(eq=False)
class LiveModel:
    """A model in memory: its base model, the settings of its adapter, and its lane, the queue of requests."""

    run_id: str
    session_id: str
    base: BaseModel
    lora: LoraSettings
    lane: Lane


@attrs.define(eq=False)
class LiveSampler:
    """A sampler in memory: its base model, the key of its adapter, and its requests.

    Attributes:
        adapter: the key of the adapter in `Service.adapters`: the save that it is read from, see
            `Store.save_id`; for unsaved weights the id of a sampler; None for the base model itself.
        follows: the id of the model whose inflight saves replace `adapter`; None if none do.
        clones: the number that the newest process got when it joined; the first one has 0.
        seen: the request ids by sequence number, for repeated requests.
        finished: by the number of a process, its requests that have ended and that it has not fetched yet,
            each with its cursor.
        cursor: that of the newest request in `finished`: the time of its end in microseconds since 1970, or
            one more than the cursor before it.
        news: a future for each long poll that waits for the end of a request.
        unnumbered: the number of requests without a sequence number.
        kept: the number of requests whose outcomes are kept; 0 for a sampler of a session.
    """

    sampler_id: str
    session_id: str | None
    base: BaseModel
    adapter: str | None
    clones: int = 0
    seen: Seen = attrs.Factory(Seen)
    finished: dict[int, deque[tuple[int, FutureCompletion]]] = attrs.Factory(dict)
    cursor: int = 0
    news: set[asyncio.Future[None]] = attrs.Factory(set)
    unnumbered: int = 0
    follows: str | None = None
    kept: int = 0


def path_of(save_id: str) -> str:
    """Return the path of the checkpoint in the id of its save, see `Store.save_id`."""
    return save_id.partition("#")[0]


@attrs.define(eq=False)
class LiveSession:
    """A session in memory.

    Attributes:
        seen_at_s: the moment of its last use.
        finished: True once it has ended.
        spans: its trace, the times of its latest work, as trace viewers read them.
    """

    session_id: str
    seen_at_s: float
    finished: bool = False
    spans: deque[dict[str, Any]] = attrs.Factory(lambda: deque(maxlen=_TRACED))


class Service:
    """The state of a server, which all handlers share. It belongs to the thread of the event loop."""

    def __init__(
        self, store: Store, host: Host, *, flags: Flags, key: str, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.store = store
        self.host = host
        self.flags = flags
        self.key = key
        self.clock = clock
        self.signer = Signer(key, clock, seed=flags.seed)
        self.promises = Promises(f"req-{secrets.token_hex(4)}-", kept_bytes=flags.kept_results_bytes)
        self.models: dict[str, LiveModel] = {}
        self.samplers: dict[str, LiveSampler] = {}
        self.sessions: dict[str, LiveSession] = {}
        self.losses: dict[str, Any] = {}
        self.recorded = RecordedSamples()
        self.uploads: dict[str, Any] = {}
        self.numbered = Seen()
        self.events: deque[AuditLogEntry] = deque(maxlen=_MOST_EVENTS)
        self.ignored: set[str] = set()
        self.closing = False
        self.loop: asyncio.AbstractEventLoop = None  # type: ignore[assignment]  # set by start
        self.disk = JobWorker("tinker-disk", threads=_DISK_THREADS)
        self.adapters = Adapters(host.forget, limit_bytes=flags.adapter_bytes)
        self._random = random.Random(flags.seed) if flags.seed is not None else random.SystemRandom()  # noqa: S311
        self._seed = flags.seed if flags.seed is not None else secrets.randbits(63)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.TimerHandle | None = None
        self._timers: set[asyncio.TimerHandle] = set()

    # ------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the timers. The application calls this before the first request."""
        self.loop = asyncio.get_running_loop()
        await self.on_disk(lambda: None)  # starts the threads now, not under load
        if self.flags.seed is not None:
            # Ids must differ from those of earlier servers with the same seed and store, so the number of
            # sessions and runs, which only grows, is part of the seed.
            known = (await self.on_disk(self.store.list_sessions, 1, 0))[1]
            known += (await self.on_disk(self.store.list_runs, 1, 0))[1]
            self._random = random.Random(f"{self.flags.seed}/{known}")  # noqa: S311
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)

    async def close(self) -> None:
        """Answer the waiting polls, cancel the work under way, and close the host and the file threads."""
        for timer in [*self._timers, *([self._sweeper] if self._sweeper else [])]:
            timer.cancel()
        self.closing = True
        self.promises.close()
        for sampler in self.samplers.values():
            for waiter in sampler.news:
                if not waiter.done():
                    waiter.set_result(None)
        for model in list(self.models.values()):
            await model.lane.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.adapters.close()
        await self.on_disk(self.host.close)
        self.disk.close()

    # ------------------------------------------------------------------------------------ work elsewhere

    async def on_disk(self, work: Callable[..., T], *arguments: Any, **options: Any) -> T:
        """Run a blocking function on a thread for files, and return its result."""
        return await asyncio.wrap_future(self.disk.submit(lambda: work(*arguments, **options)))

    async def computed(self, future: Future[T]) -> T:
        """Return the result of a future of the host."""
        return await asyncio.wrap_future(future)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in a task beside the request, and keep the task until it is done."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def later(self, seconds: float, work: Callable[[], None]) -> None:
        """Call a function after `seconds`, unless the server ends earlier."""

        def due() -> None:
            self._timers.discard(timer)
            work()

        timer = self.loop.call_later(seconds, due)
        self._timers.add(timer)

    # ------------------------------------------------------------------------------------ ids and chance

    def new_id(self) -> str:
        """Return a random UUID. A server with a seed draws it from the seed."""
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def chance(self, *names: object) -> int:
        """Return a pseudo-random number that depends only on these names and the seed of this server.

        The seed is random unless the flags have one.
        """
        text = "/".join(map(str, (self._seed, *names))).encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") >> 1

    async def once(self, name: Any, digest: bytes, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, and return its result.

        A repeated request, recognised by its name and digest, gets the result of the first one, also while
        that is under way. If the first one failed, `work` runs again.

        Raises:
            Refused: the name was used for another request.
        """
        under_way: asyncio.Future[T] | None = self.numbered.get(name, digest)
        if under_way is None:
            under_way = asyncio.ensure_future(work())
            self.numbered.add(name, digest, under_way)
            under_way.add_done_callback(lambda done: self._forget_failed(name, done))
        return await asyncio.shield(under_way)

    def _forget_failed(self, name: Any, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            self.numbered.forget(name)

    # ------------------------------------------------------------------------------------ promises

    async def keep(
        self, promise: Promise, work: Awaitable[Any], to_protobuf: Callable[[Any], bytes] | None = None
    ) -> None:
        """Settle a promise with the result or the exception of an awaitable."""
        started = self.clock.time()
        try:
            outcome: Result | Failure = Result(await work, to_protobuf)
        except asyncio.CancelledError:
            why = SHUTTING_DOWN if self.closing else "the model was let go"
            self.promises.settle(promise, Failure(why, "server"))
            raise
        except Exception as problem:  # noqa: BLE001  # it is the outcome
            outcome = self.failure(problem, promise.kind)
        self.promises.settle(promise, outcome)
        self.trace(promise, started)

    def failure(self, problem: BaseException, kind: str) -> Failure:
        """Convert an exception to the failure of a promise. A fault of the server is also logged."""
        text, category = failure_of(problem)
        if category == "server" and self.closing:
            text = SHUTTING_DOWN  # whatever failed, the end of the server is the reason
        elif category == "server":
            logger.error("%s failed: %s", kind, text, exc_info=problem)
        return Failure(text, category)

    def trace(self, promise: Promise, started_s: float) -> None:
        """Add the work of a promise, from `started_s` until now, to the trace of its session in memory."""
        session = self.sessions.get(promise.session_id or "")
        if session is not None:
            span = {
                "name": promise.kind,
                "ph": "X",
                "pid": 1,
                "tid": 1,
                "ts": round(started_s * 1e6),
                "dur": round((self.clock.time() - started_s) * 1e6),
                "args": {"request_id": promise.request_id, "failed": isinstance(promise.outcome, Failure)},
            }
            session.spans.append(span)

    def note_ignored(self, names: Iterable[str]) -> None:
        """Log each unknown field of requests once, and list it in `ignored`, which has a limited size."""
        for name in sorted(names):
            if name not in self.ignored and len(self.ignored) < _MOST_IGNORED:
                self.ignored.add(name)
                logger.warning("ignored %s: this server does not know the field", name)

    def moment(self) -> datetime:
        """Return the present moment in UTC."""
        return datetime.fromtimestamp(self.clock.time(), timezone.utc)

    def note_event(self, event: str, path: str | None = None, **detail: object) -> None:
        """Add an event to the audit log of this start, with the path of its checkpoint if it is about one.

        Any thread may call this.
        """
        run_id = None
        if path is not None:
            run_id, _, checkpoint_id = path.removeprefix("tinker://").partition("/")
            detail |= {"training_run_id": run_id, "checkpoint_id": checkpoint_id, "tinker_path": path}
        entry = AuditLogEntry(
            timestamp=self.moment(),
            event=event,
            event_details={"actor": USER, **detail},
            model_id=run_id,
            tinker_path=path,
            purpose=cast("str | None", detail.get("purpose")),
        )
        self.events.append(entry)

    def make_lane(self) -> Lane:
        """Make the lane of a new model, the queue of its requests."""

        async def run(step: Step) -> None:
            await self.keep(step.promise, step.work(), step.to_protobuf)

        return Lane(run, patience_s=self.flags.gap_patience_s)

    # ------------------------------------------------------------------------------------ objects in memory

    async def session(self, session_id: str) -> LiveSession:
        """Return an open session by its id, and note that it is in use.

        Raises:
            Refused: the session has ended.
            StoreError: the session does not exist.
        """
        live = await self._session(session_id)
        if live.finished:
            raise Refused(410, f"session {session_id} is over")
        return live

    async def _session(self, session_id: str) -> LiveSession:
        """Return a session by its id, also an ended one, and note that it is in use."""
        live = self.sessions.get(session_id)
        if live is None:
            row = await self.on_disk(self.store.session, session_id)
            over = row.status is not None and row.status.type != "active"
            live = self.sessions.setdefault(session_id, LiveSession(session_id, self.clock.now(), over))
        live.seen_at_s = self.clock.now()
        return live

    def model(self, run_id: str) -> LiveModel:
        """Return a model by its id, and note that its session is in use.

        Raises:
            Refused: the model is not in memory.
        """
        model = self.models.get(run_id)
        if model is None:
            raise Refused(
                404, f"model {run_id!r} is not in memory; make it anew from its last checkpoint if it has one"
            )
        live = self.sessions.get(model.session_id)
        if live is not None:
            live.seen_at_s = self.clock.now()
        return model

    async def sampler(self, sampler_id: str) -> LiveSampler:
        """Return a sampler by its id. If it is not in memory, make it again from its record in the store.

        Raises:
            StoreError: the sampler does not exist.
            Refused: it is not in memory, and its weights were never saved, or its checkpoint was deleted or
                replaced.
            UserFault: it is not in memory, and its base model is not offered.
        """
        live = self.samplers.get(sampler_id)
        if live is not None:
            session = self.sessions.get(live.session_id or "")
            if session is not None:
                session.seen_at_s = self.clock.now()
            return live
        row = await self.on_disk(self.store.sampler, sampler_id)
        if row.source is not None and row.source.startswith(UNSAVED):
            raise Refused(410, f"the weights of sampler {sampler_id} were never saved, and are gone")
        if row.source is not None and row.source != await self._newest_save(path_of(row.source)):
            path = path_of(row.source)
            text = f"{path} was deleted or saved anew since sampler {sampler_id} was made; make a new one"
            raise Refused(410, text)
        base = self.base_model(row.base_model)
        # Processes that joined earlier keep their numbers, which are lower than the time.
        made = LiveSampler(sampler_id, row.session_id, base, row.source, clones=int(self.clock.time()))
        await self._session(row.session_id)  # with which the sampler leaves memory
        return self.samplers.setdefault(sampler_id, made)

    async def _newest_save(self, path: str) -> str | None:
        """Return the newest save under a path, or None if there is no checkpoint."""
        parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
        run_id, kind = parsed.training_run_id, parsed.checkpoint_type
        name = parsed.checkpoint_id.partition("/")[2]
        try:
            return await self.on_disk(self.store.save_id, run_id, kind, name)
        except StoreError:
            return None

    def base_model(self, name: str) -> BaseModel:
        """Return a base model by its name. Raises `UserFault` if it is not offered."""
        found = self.host.models.get(name)
        if found is None:
            raise UserFault(f"base model {name!r} is not offered; there are {', '.join(self.host.models)}")
        return found

    def release(self, session_id: str) -> None:
        """Drop the models, samplers, custom losses and results of an ended or abandoned session.

        Its checkpoints stay. The outcome of a request under way stays for `Flags.release_s` seconds.
        """
        self.sessions.pop(session_id, None)
        for model in [each for each in self.models.values() if each.session_id == session_id]:
            del self.models[model.run_id]
            self.spawn(self._unload(model))
        ended = [each for each in self.samplers.values() if each.session_id == session_id]
        for sampler in ended:
            del self.samplers[sampler.sampler_id]
        self.drop_unused(*(sampler.adapter for sampler in ended))
        for loss in [each for each in self.losses.values() if each.session_id == session_id]:
            del self.losses[loss.loss_id]
        for promise in self.promises.drop_session(session_id):
            promise.on_done.append(self._drop_later)

    def _drop_later(self, promise: Promise) -> None:
        self.later(self.flags.release_s, lambda: self.promises.drop(promise))

    def drop_unused(self, *keys: str | None) -> None:
        """Drop those of the adapters with these keys that no sampler uses. None is no key."""
        used = {None, *(sampler.adapter for sampler in self.samplers.values())}
        for key in {*keys} - used:
            assert key is not None  # noqa: S101  # it is in `used`
            self.adapters.drop(key)

    def drop_model(self, model: LiveModel) -> Future[bool]:
        """Drop a model, also from the host, and fail its requests that wait for a missing number.

        The future of the result ends when the model has left the host.
        """
        self.models.pop(model.run_id, None)
        self._fail(model, model.lane.drop_early())
        return self.host.unload(model.run_id)

    def _fail(self, model: LiveModel, undone: Iterable[Promise]) -> None:
        for promise in undone:
            self.promises.settle(promise, Failure(f"model {model.run_id} was let go", "user"))

    async def _unload(self, model: LiveModel) -> None:
        self._fail(model, await model.lane.close())
        await self.computed(self.host.unload(model.run_id))

    def _sweep(self) -> None:
        self._sweeper = self.loop.call_later(SWEEP_S, self._sweep)
        self.spawn(self._sweep_disk())
        oldest = self.clock.now() - self.flags.abandoned_after_s
        for session in [each for each in self.sessions.values() if each.seen_at_s < oldest]:
            self.release(session.session_id)
        # Work that was under way at a release may have added something after it.
        tables = (self.models, self.samplers, self.losses)
        owners = {each.session_id for table in tables for each in table.values() if each.session_id}
        for session_id in owners - self.sessions.keys():
            self.release(session_id)
        for upload in [each for each in self.uploads.values() if each.expires_s < self.clock.time()]:
            del self.uploads[upload.upload_id]

    async def _sweep_disk(self) -> None:
        try:
            await self.on_disk(self.store.sweep_expired)
        except StoreError as problem:  # the disk refused; the next sweep tries again
            logger.warning("expired checkpoints stay for now: %s", problem)
