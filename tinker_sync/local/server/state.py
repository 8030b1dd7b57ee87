"""The shared state of all handlers: the store, the host, the flags, sessions, models and samplers.

The state belongs to the thread of the event loop. Work that blocks (files, the database, large bodies) runs
on a few threads. Computations run in the host. Handlers await both.

The adapters of samplers are in memory, up to a number of bytes, because a program that saves an adapter at
every step makes thousands of them. Beyond it, the least recently used one leaves memory. It is read from its
checkpoint again; weights that no checkpoint contains are gone then.

Samples with `record_stability_info` leave their tokens and log-probabilities behind. The loss
`stable_reinforce` takes the log-probabilities from here, not from the client. The spans of a datum name the
sampled sequence of each token. The event loop adds records, and the training thread reads them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import logging
import random
import secrets
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeVar, cast

import attrs
import numpy as np

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import ConfigurationError
from tinker_sync.local.engine.host import JobWorker
from tinker_sync.local.server.calls import Refused, UserFault, failure_of
from tinker_sync.local.server.lanes import Lane, Seen, Step
from tinker_sync.local.server.promises import Failure, Promise, Promises, Result
from tinker_sync.local.store import USER, USER_EMAIL, StoreError
from tinker_sync.types.billing import AuditLogEntry
from tinker_sync.types.checkpoint import ParsedCheckpointTinkerPath
from tinker_sync.types.datum import SampledProvenanceSpan
from tinker_sync.types.service import ClientConfigResponse, ClientDynamicConfigResponse

if TYPE_CHECKING:
    from tinker_sync.local.engine.host import BaseModel, Host
    from tinker_sync.local.engine.lora import LoraParams, LoraSettings
    from tinker_sync.local.engine.losses import Example
    from tinker_sync.local.engine.safetensors import Array
    from tinker_sync.local.engine.training import LossOutput
    from tinker_sync.local.store import Store
    from tinker_sync.types.completion import FutureCompletion
    from tinker_sync.types.datum import Datum

# -------------------------------------------------------------------------------------------------- settings


_MIB = 1024 * 1024


def _client_defaults() -> ClientConfigResponse:
    # With this setting, each copy of a sampling client asks the server for its number among the copies.
    return ClientConfigResponse(sample_join_sampling_session=True)


def _dynamic_defaults() -> ClientDynamicConfigResponse:
    return ClientDynamicConfigResponse(sample_cancel_enabled=True)


@attrs.frozen(kw_only=True)
class Flags:
    """The settings of a server.

    Attributes:
        client: the answer to `client/config`.
        dynamic: the answer to `client/dynamic_config`.
        json_only: answer like a server from before `client/config`: JSON bodies and results, a separate call
            for forward passes, no sequence ids, and none of the newer calls.
        hold_s: the longest time for which a poll is held open.
        metadata_over_bytes: the size of a result above which a poll that allows it gets only the size.
        max_body_bytes: the most bytes of the body of a call, before and after decompression.
        gap_patience_s: the time for which requests of a model wait for a missing smaller sequence number.
            Then the number is skipped. The time begins anew when the model accepts a numbered request, and
            when another number is the missing one.
        abandoned_after_s: the time without a heartbeat or a new request after which a session loses its
            models, unsaved samplers and custom losses.
        release_s: the time for which models stay after the end of their session, for processes that still
            fetch results. The outcome of a request that was under way at a release stays for the same time.
        sweep_s: the time between two searches for what is abandoned or has expired.
        token_life_s: the time for which an exchanged token is valid.
        url_life_s: the time for which the address of a file is valid.
        max_rank: the largest rank of an adapter.
        max_cells: the largest size of each array of scores that one sample request may ask for, and the
            largest number of samples, which is limited to `sampling.MOST_SAMPLES` as well.
        kept_results_bytes: the most bytes of fetched results to keep, for clients that lost the response.
            The result fetched last is kept in any case.
        adapter_bytes: the most bytes of samplers' adapters in memory, beyond which the least recently used
            ones leave it.
        seed: decides ids and the choices that clients leave to the server, such as the seeds of samples;
            None: at random.

    >>> Flags.of(fwdbwd_max_chunk_len=2, hold_s=1).client.fwdbwd_max_chunk_len
    2
    """

    client: ClientConfigResponse = attrs.field(factory=_client_defaults)
    dynamic: ClientDynamicConfigResponse = attrs.field(factory=_dynamic_defaults)
    json_only: bool = False
    hold_s: float = 30.0
    metadata_over_bytes: int = 1 * _MIB
    max_body_bytes: int = 256 * _MIB
    gap_patience_s: float = 60.0
    abandoned_after_s: float = 3600.0
    release_s: float = 60.0
    sweep_s: float = 30.0
    token_life_s: float = 3600.0
    url_life_s: float = 900.0
    max_rank: int = 256
    max_cells: int = 4_000_000
    kept_results_bytes: int = 64 * _MIB
    adapter_bytes: int = 512 * _MIB
    seed: int | None = None

    @classmethod
    def of(cls, **settings: Any) -> Flags:
        """Return the default flags with some settings changed.

        The name of a setting is a field of `Flags`, of its `client` or of its `dynamic`.

        Raises:
            ConfigurationError: a setting is unknown.
        """
        own = {field.name for field in attrs.fields(cls)} - {"client", "dynamic"}
        flags = cls(**{name: value for name, value in settings.items() if name in own})
        for group in ("client", "dynamic"):
            model = getattr(flags, group)
            names = {field.name for field in attrs.fields(type(model))}
            chosen = {name: settings[name] for name in settings if name in names}
            flags = attrs.evolve(flags, **{group: model.model_copy(update=chosen)})
            own |= names
        unknown = sorted(set(settings) - own)
        if unknown:
            raise ConfigurationError(f"the server has no setting {', '.join(unknown)}")
        return flags


# --------------------------------------------------------------------------------------- keys and signatures


ORGANIZATION: Final = "local"
_HEADER: Final = {"alg": "HS256", "typ": "JWT"}


class Signer:
    """The key of a server: it checks keys, and makes and checks tokens and signatures. Thread-safe.

    Args:
        key: the key of the clients.
        clock: decides what has expired.
        seed: makes signatures repeatable, for tests; None: each `Signer` draws a secret, so its tokens and
            signatures end with it.
    """

    def __init__(self, key: str, clock: Clock, *, seed: int | None = None) -> None:
        self._key = key.encode()
        self._clock = clock
        salt = secrets.token_bytes(32) if seed is None else f"seed {seed}".encode()
        self._secret = hmac.new(self._key, salt, hashlib.sha256).digest()

    def knows(self, credential: str) -> bool:
        """Return True for the key, and for a token made by `token` that has not expired."""
        if hmac.compare_digest(credential.encode("utf-8", "replace"), self._key):
            return True
        claims = self._claims(credential)
        return claims is not None and claims.get("exp", 0) > self._clock.time()

    def token(self, life_s: float) -> str:
        """Return a token that a client may send in place of the key for `life_s` seconds."""
        now = int(self._clock.time())
        claims = {
            "iss": "passport-local",
            "sub": USER,
            "org_id": ORGANIZATION,
            "email": USER_EMAIL,
            "iat": now,
            "exp": int(now + life_s),
        }
        signed = f"{_packed(_HEADER)}.{_packed(claims)}"
        return f"{signed}.{self._mac(signed)}"

    def _claims(self, token: str) -> dict[str, Any] | None:
        signed, _, mac = token.rpartition(".")
        if not signed or not hmac.compare_digest(mac.encode("utf-8", "replace"), self._mac(signed).encode()):
            return None
        payload = signed.partition(".")[2]
        claims: dict[str, Any] = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return claims

    def _mac(self, text: str) -> str:
        digest = hmac.new(self._secret, text.encode("utf-8", "replace"), hashlib.sha256).digest()
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode("ascii")

    def query(self, path: str, life_s: float) -> tuple[str, int]:
        """Return a query that signs a path, and the moment at which it expires, in seconds since 1970."""
        expires = int(self._clock.time() + life_s)
        return f"expires={expires}&signature={self._mac(f'{path} {expires}')}", expires

    def allows(self, path: str, expires: str, signature: str) -> bool:
        """Return True if the signature is that of `query` for this path and expiry, and has not expired."""
        genuine = hmac.compare_digest(
            signature.encode("utf-8", "replace"), self._mac(f"{path} {expires}").encode()
        )
        return genuine and expires.isdigit() and int(expires) > self._clock.time()


def _packed(tree: dict[str, Any]) -> str:
    text = json.dumps(tree, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(text).rstrip(b"=").decode("ascii")


# -------------------------------------------------------------------------------------------------- adapters


class Adapters:
    """The adapters of samplers in memory, by key: those used last.

    Args:
        forget: called with each adapter that leaves memory before `close`, to drop its cached prompts.
        limit_bytes: the most bytes in memory; the adapter used last stays in any case.
    """

    def __init__(self, forget: Callable[[LoraParams], None], *, limit_bytes: int) -> None:
        self._forget = forget
        self._limit = limit_bytes
        self._held: OrderedDict[str, LoraParams] = OrderedDict()
        self._held_bytes = 0
        self._loading: dict[str, asyncio.Future[LoraParams]] = {}

    def put(self, key: str, params: LoraParams) -> None:
        """Add an adapter."""
        self.drop(key)
        self._held[key] = params
        self._held_bytes += params.flat.nbytes
        while self._held_bytes > self._limit and len(self._held) > 1:
            self.drop(next(iter(self._held)))

    async def get(self, key: str, load: Callable[[], Awaitable[LoraParams]]) -> LoraParams:
        """Return the adapter with a key: from memory, or else from `load`, which is called once for all.

        Raises:
            Exception: what `load` raises.
        """
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        if key not in self._loading:
            self._loading[key] = asyncio.ensure_future(self._load(key, load))
            self._loading[key].add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(self._loading[key])

    async def _load(self, key: str, load: Callable[[], Awaitable[LoraParams]]) -> LoraParams:
        params = await load()
        self.put(key, params)
        return params

    def drop(self, key: str) -> None:
        """Drop an adapter from memory."""
        params = self._held.pop(key, None)
        if params is not None:
            self._held_bytes -= params.flat.nbytes
            self._forget(params)

    def close(self) -> None:
        """Drop all adapters."""
        self._held.clear()


# ------------------------------------------------------------------------------------------ recorded samples


STABLE_REINFORCE = "stable_reinforce"
LIMIT_BYTES = 128 * 1024 * 1024


class _Sequence(NamedTuple):
    tokens: Array
    logprobs: Array

    @property
    def size(self) -> int:
        return self.tokens.nbytes + self.logprobs.nbytes


class RecordedSamples:
    """The sampled sequences by id, up to `limit_bytes`; the oldest ones go first."""

    def __init__(self, *, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._bytes = 0
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    def add(self, sequence_id: str, tokens: Array, logprobs: Array) -> None:
        """Record a sampled sequence."""
        made = _Sequence(np.asarray(tokens, dtype=np.int32), np.asarray(logprobs, dtype=np.float32))
        self._sequences[sequence_id] = made
        self._bytes += made.size
        while self._bytes > self._limit and len(self._sequences) > 1:
            self._bytes -= self._sequences.popitem(last=False)[1].size

    def complete(self, datum: Datum, example: Example, place: str) -> Example:
        """Return an example for `stable_reinforce` with the recorded log-probabilities as `logprobs`.

        Tokens of prompts count nothing: their advantages become 0.

        Args:
            datum: the datum, for its spans.
            example: the same datum in the form of the engine.
            place: the name of the datum in messages, such as `data[3]`.

        Raises:
            UserFault: the datum has no spans, or they do not fit what was recorded.
        """
        targets, advantages = (example.inputs.get(name) for name in ("target_tokens", "advantages"))
        if not isinstance(targets, np.ndarray) or not isinstance(advantages, np.ndarray):
            return example  # the engine says what it misses
        spans = datum.loss_fn_input_spans or ()
        if sum(span.length for span in spans) != len(targets) or not targets.shape == advantages.shape:
            raise UserFault(
                f"{place}: {STABLE_REINFORCE} needs the provenance of each target: "
                "Datum.with_provenance adds it, and so do data.from_sample and data.from_samples"
            )
        logprobs, counted, at = np.zeros(len(targets)), np.zeros(len(targets)), 0
        for span in spans:
            if isinstance(span, SampledProvenanceSpan) and span.length:
                rows, part = slice(at, at + span.length), slice(span.offset, span.offset + span.length)
                found = self._find(span.sequence_id, place)
                if not np.array_equal(found.tokens[part], targets[rows]):
                    raise UserFault(
                        f"{place}.loss_fn_inputs['target_tokens'][{at}:{rows.stop}]: differs from the tokens "
                        f"{part.start} to {part.stop} of the sampled sequence {span.sequence_id}"
                    )
                logprobs[rows], counted[rows] = found.logprobs[part], 1.0
            at += span.length
        inputs = {**example.inputs, "logprobs": logprobs, "advantages": advantages * counted}
        return attrs.evolve(example, inputs=inputs)

    def _find(self, sequence_id: str, place: str) -> _Sequence:
        found = self._sequences.get(sequence_id)
        if found is None:
            raise UserFault(
                f"{place}: nothing is recorded of the sampled sequence {sequence_id!r}; sample with a client "
                "that was made with record_stability_info=True, since the start of the server"
            )
        return found


# ----------------------------------------------------------------------------------------------- the service


T = TypeVar("T")

UsageKind = Literal["training", "prefill", "prefill_cached", "sample", "checkpoint"]

SHUTTING_DOWN = "the server is shutting down"
UNSAVED = "unsaved:"
"""The beginning of the path that the store has for a sampler whose weights no checkpoint contains."""
_DISK_THREADS = 2
_TRACED = 10_000
_MOST_IGNORED = 1000
_MOST_EVENTS = 10_000

logger = logging.getLogger("tinker_sync.local")


@attrs.define(eq=False)
class LiveModel:
    """A model in memory: its base model, the settings of its adapter, and its lane, the queue of requests."""

    run_id: str
    session_id: str
    base: BaseModel
    lora: LoraSettings
    lane: Lane
    seen: datetime
    """The arrival of the last request. The store learns of it with each checkpoint."""


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
    """

    sampler_id: str
    session_id: str
    base: BaseModel
    adapter: str | None
    clones: int = 0
    seen: Seen = attrs.Factory(Seen)
    finished: dict[int, deque[tuple[int, FutureCompletion]]] = attrs.Factory(dict)
    cursor: int = 0
    news: set[asyncio.Future[None]] = attrs.Factory(set)
    unnumbered: int = 0
    follows: str | None = None


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


@attrs.frozen(eq=False)
class CustomLoss:
    """An uploaded loss. `rule(run, data, *, backward)` computes a pass, on the training thread."""

    loss_id: str
    session_id: str
    rule: Callable[..., LossOutput]


@attrs.define(eq=False)
class Upload:
    """An upload, with the files received so far. A finished one has the `path` of its checkpoint."""

    upload_id: str
    base: BaseModel
    lora: LoraSettings
    project_id: str | None
    expires_s: int
    files: dict[str, bytes] = attrs.Factory(dict)
    path: str | None = None


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
        self.losses: dict[str, CustomLoss] = {}
        self.recorded = RecordedSamples()
        self.uploads: dict[str, Upload] = {}
        self.numbered = Seen()
        self.events: deque[AuditLogEntry] = deque(maxlen=_MOST_EVENTS)
        self.usage: Counter[tuple[int, str, str, UsageKind]] = Counter()
        """The tokens, or checkpoints, since the start, by hour since 1970, session, base model and kind."""
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
        self._sweeper = self.loop.call_later(self.flags.sweep_s, self._sweep)

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

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in a task beside the request, and keep the task until it is done."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

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
        """Settle a promise with the result or the exception of an awaitable.

        A sample that the end of the server stops has no outcome, so that clients take it again from the next
        server, as after a crash.
        """
        started = self.clock.time()
        try:
            outcome: Result | Failure = Result(await work, to_protobuf)
        except asyncio.CancelledError:
            outcome = Failure(SHUTTING_DOWN if self.closing else "the model was let go", "server")
            if not (self.closing and promise.kind == "Sample"):
                self.promises.settle(promise, outcome)
            raise
        except Exception as problem:  # noqa: BLE001  # it is the outcome
            outcome = self.failure(problem, promise.kind)
            if self.closing and promise.kind == "Sample" and outcome.category == "server":
                return
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

    def count_usage(self, session_id: str, base_model: str, kind: UsageKind, amount: int) -> None:
        """Count tokens or checkpoints, for the bill of a session."""
        if amount:
            self.usage[int(self.clock.time()) // 3600, session_id, base_model, kind] += amount

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
            session = self.sessions.get(live.session_id)
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
            return (await self.on_disk(self.store.checkpoint, run_id, kind, name)).save_id
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

        The returned future ends when the model has left the host.
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
        self._sweeper = self.loop.call_later(self.flags.sweep_s, self._sweep)
        self.spawn(self._sweep_disk())
        oldest = self.clock.now() - self.flags.abandoned_after_s
        for session in [each for each in self.sessions.values() if each.seen_at_s < oldest]:
            self.release(session.session_id)
        # Work that was under way at a release may have added something after it.
        tables = (self.models, self.samplers, self.losses)
        owners = {each.session_id for table in tables for each in table.values()}
        for session_id in owners - self.sessions.keys():
            self.release(session_id)
        for upload in [each for each in self.uploads.values() if each.expires_s < self.clock.time()]:
            del self.uploads[upload.upload_id]

    async def _sweep_disk(self) -> None:
        try:
            await self.on_disk(self.store.sweep_expired)
        except StoreError as problem:  # the disk refused; the next sweep tries again
            logger.warning("expired checkpoints stay for now: %s", problem)
