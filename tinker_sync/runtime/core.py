"""`Core`: the parts one client shares among its faces, made in order and closed in order.

Nothing touches the network before it is needed. The first call that needs the server asks it for its settings
(`Introduction`); what depends on those, the budgets and the lanes, is made then, once. A failed start is not
remembered. A core that is dropped, closed or forked leaves no thread behind; calls under way keep it from
being dropped.

It has no behaviour of its own beyond that; see the parts.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal, TypeVar

from attrs import frozen

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync._observe import Event, Observer
from tinker_sync._secret import Secret
from tinker_sync.config import Settings
from tinker_sync.errors import (
    APIConnectionError,
    BillingError,
    ClientClosedError,
    TinkerError,
    UnsupportedByServerError,
)
from tinker_sync.runtime import _fork, exits, sample, training_part
from tinker_sync.runtime.admission import Admission
from tinker_sync.runtime.billing import PAUSE_S, BillingPause
from tinker_sync.runtime.byte_budget import ByteBudget
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.fetcher import POLL_TIMEOUT_S, Fetcher, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.introduction import Introduction, ServerFacts
from tinker_sync.runtime.naming import carried
from tinker_sync.runtime.notices import Notices
from tinker_sync.runtime.once import Once
from tinker_sync.runtime.parts import Acknowledging, Companion, Parts, shut_elsewhere
from tinker_sync.runtime.poller import Poller
from tinker_sync.runtime.published import Published
from tinker_sync.runtime.rate_limiter import (
    Gate,
    RateLimiter,
    default_delay_s,
    key_fingerprint,
    shared_rate_limiter,
)
from tinker_sync.runtime.retrieval import QueueNotice
from tinker_sync.runtime.sample_lane import SampleLane
from tinker_sync.runtime.sample_verdict import SampleJudge
from tinker_sync.runtime.session import Session
from tinker_sync.runtime.upkeep import Upkeep
from tinker_sync.runtime.workers import Workers
from tinker_sync.transport.auth import KeyRing
from tinker_sync.transport.call import Call, Reply
from tinker_sync.transport.caller import Caller
from tinker_sync.transport.http import Http
from tinker_sync.transport.journal import Journal
from tinker_sync.types.service import ClientConfigRequest, ClientDynamicConfigResponse
from tinker_sync.wire.dialect import Dialect

T = TypeVar("T")
FinishStatus = Literal["success", "errored", "interrupted"]

# Sixteen threads carry thousands of requests: none of them waits for an answer.
_FETCH_THREADS: Final = 16
# Those that send a training step's chunks do wait, for the promise of each.
_SEND_THREADS: Final = 8
# So four chunks of the usual 5 MB are under way at once: a budget lets one more in while nothing is
# overdrawn. More of them are no sooner at the server, and fresh memory for each takes longer than to fill it.
_TRAIN_BYTES: Final = 15_000_000
_CALLBACK_THREADS: Final = 8
# Losses that users compute between two passes keep one processor each.
_LOSS_THREADS: Final = 4
# Awaited calls that block hold one each.
_AWAIT_THREADS: Final = 32
# Creations that are under way hold one each.
_CREATE_THREADS: Final = 32
CLOSE_LIMIT_S: Final = 10.0

_log = logging.getLogger("tinker_sync.session")


@frozen
class Machinery:
    """What is made once the server's settings are known."""

    facts: ServerFacts
    billing: BillingPause
    fetcher: Fetcher
    lane: SampleLane
    train_bytes: ByteBudget


class Core:
    """The shared parts of one client. Thread-safe.

    Args:
        settings: everything the user said.
        session: what to create a session with; None for a client that needs none.
        limiter: a rate limiter of its own, where isolation is wanted; None: the one all clients of this base
            URL and key share.
        clock: what time it is.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        session: Session | None = None,
        limiter: RateLimiter | None = None,
        facts: ServerFacts | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = settings
        self.clock = clock
        self.notices = Notices(clock)
        self.keys = KeyRing(settings, clock=clock)
        self.secrets = secrets = _secrets_of(self.keys)
        """What must not appear in logs, errors and notices."""
        journal = Journal(base_url=settings.base_url, as_curl=settings.log_curl, secrets=secrets)
        self.http = Http(settings, self.keys, clock=clock, journal=journal)
        self.caller = Caller(self.http, settings, clock=clock, journal=journal, secrets=secrets)
        self.send_pool = Workers("send", _SEND_THREADS)
        self.fetch_pool = Workers("fetch", _FETCH_THREADS)
        self.callback_pool = Workers("callback", _CALLBACK_THREADS)
        self.loss_pool = Workers("loss", _LOSS_THREADS)
        self._await_pool = Workers("await", _AWAIT_THREADS)
        self._create_pool = Workers("create", _CREATE_THREADS)
        self._entrance = Workers("enter", 1)
        self.poller = Poller(self.http, self.fetch_pool, clock, pace=settings.pace)
        self.poll_s = POLL_TIMEOUT_S
        """How long a poll for a result may be silent before it is asked again; read at the start."""
        self._limiter = limiter
        self._facts = facts
        self._machinery: Once[Machinery] = Once()
        self._has_forward: Once[bool] = Once()
        self.published = Published(self.caller.call, settings)
        """What an open server publishes of itself."""
        self._session = session
        self._opened: Once[Session] = Once()
        pools = (
            *(self._entrance, self._create_pool, self.send_pool, self.fetch_pool),
            *(self.loss_pool, self.callback_pool, self._await_pool),
        )
        fetch_settings = _settings_fetcher(self.caller, settings, secrets)
        self._upkeep = Upkeep(self.keys, fetch_settings, self.fetch_pool.run, clock)
        self._parts = Parts(settings, self.caller, self.poller, self.http, pools)
        self.admission = Admission(self._parts.tell)
        """Asked before a pass or a sample is sent, and told what came of it."""
        self._close_lock = threading.Lock()
        self._closed: APIFuture[None] | None = None  # guarded by _close_lock
        self._finalizer = weakref.finalize(self, shut_elsewhere, self._parts)
        self._finalizer.atexit = False
        _fork.renew_in_child(self)

    # -------------------------------------------------------------------------------------- the server

    @property
    def machinery(self) -> Machinery:
        """The parts that depend on the server's settings; the first use asks for them.

        Raises:
            SessionLostError: the server does not keep our session any more.
        """
        return self.ready()

    def ready(self, deadline_at: float = math.inf) -> Machinery:
        """The same, for calls in the session, with a moment of the clock at which to give up."""
        made = self.start(deadline_at)
        if self._session is not None:
            self._session.refuse_lost()
        return made

    def start(self, deadline_at: float = math.inf) -> Machinery:
        """Ask the server for its settings, the first time; give what depends on them.

        Args:
            deadline_at: the moment of the clock at which to give up.

        Raises:
            ClientClosedError: this is closed.
            TinkerError: the server cannot be reached, or refuses us. The next call tries again.
        """
        self.refuse_closed()
        made = self._machinery.made
        if made is None:
            made = self._machinery.get(lambda: self._build(deadline_at), limit_s=self._left_s(deadline_at))
            self.refuse_closed()  # in the meantime, perhaps
        if self._session is not None and self._session.heartless:
            self._begin_heartbeats(deadline_at)
        return made

    def _left_s(self, deadline_at: float) -> float:
        return max(deadline_at - self.clock.now(), 0.0)

    @property
    def dialect(self) -> Dialect:
        """What the server speaks."""
        return self.machinery.facts.dialect

    def _build(self, deadline_at: float) -> Machinery:
        facts = self._introduce(deadline_at)
        config = facts.config
        if facts.dialect.offers("dynamic_config"):
            self._upkeep.know(facts.dynamic)
        pace = self.settings.pace
        billing = BillingPause(config.billing_exception_max_pause_duration_sec * pace, clock=self.clock)
        notices = self.notices
        gate = self._gate()
        fetcher = Fetcher(
            self.poller,
            ByteBudget(config.inflight_response_bytes_semaphore_size, clock=self.clock),
            open_server=not self.settings.is_vendor_host,
            may_pause_billing=billing.may_pause,
            on_notice=_notice_into(notices, gate.limiter),
            secrets=self.secrets,
            read_timeout_s=self.poll_s,
            clock=self.clock,
            pace=pace,
        )
        places = 2**31 if config.sample_use_retrieve_futures else config.sample_max_concurrent_requests
        lane = SampleLane(
            fetcher,
            self.fetch_pool,
            gate,
            ByteBudget(config.sample_dispatch_bytes_semaphore_size, clock=self.clock),
            # A budget lets one more in while nothing is overdrawn: it holds one less than there are places.
            ByteBudget(max(places - 1, 0), clock=self.clock),
            SampleJudge(self.caller.judge, billing),
            clock=self.clock,
        )
        made = Machinery(
            facts=facts,
            billing=billing,
            fetcher=fetcher,
            lane=lane,
            train_bytes=ByteBudget(
                min(config.fwdbwd_dispatch_bytes_semaphore_size, _TRAIN_BYTES), clock=self.clock
            ),
        )
        self._parts.waits = (lane, made.train_bytes, fetcher.inflight)
        return made

    def _introduce(self, deadline_at: float) -> ServerFacts:
        introduction = Introduction(
            self.settings, self.keys, self.caller, lambda: _finite(self._left_s(deadline_at))
        )
        try:
            return introduction.ask() if self._facts is None else introduction.adopt(self._facts)
        except TinkerError as error:
            self._say_if_closed(error)
            self._parts.report(error)
            raise

    def refuse_without_forward(self) -> None:
        """Ask, once, whether a server without `forward_only` has a call for forward passes.

        Raises:
            UnsupportedByServerError: it has none.
        """
        introduction = Introduction(self.settings, self.keys, self.caller)
        if not self._has_forward.get(introduction.has_forward):
            raise UnsupportedByServerError("this server has no forward passes", feature="forward")

    def _gate(self) -> Gate:
        if self._limiter is None:
            key = self.settings.api_key
            fingerprint = key_fingerprint(key.reveal() if key is not None else "")
            settings = self.settings
            self._limiter = shared_rate_limiter(
                settings.base_url, fingerprint, clock=self.clock, pace=settings.pace
            )
        return self._limiter.gate()

    # -------------------------------------------------------------------------------------- calls

    def hide(self, text: str | None) -> str | None:
        """A user's text that nobody may see, such as an access token, in a form whose repr shows nothing.

        From now on it is masked wherever the server repeats it. Assign the argument anew with it, first of
        all: tracebacks show local variables.
        """
        if not text:
            return None
        secret = Secret(text)
        self.keys.keep(secret)
        return secret.reveal()

    def call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, object] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        usual_s: float | None = None,
        pause_billing: bool = True,
    ) -> Any:
        """Make one call of the API and wait for its answer; arguments as for `make_call`.

        Args:
            deadline_s: how long it may take in all; None: as the settings say.
            usual_s: how long where these say nothing either.
            pause_billing: wait out a 402 for as long as the server allows.

        Raises:
            ClientClosedError: this is closed, or was while we waited.
            TinkerError: there is no good answer.
        """
        # The server's settings come first: they say which credential goes along.
        limits = (deadline_s, self.settings.deadline_s, usual_s, math.inf)
        give_up_at = self.clock.now() + next(limit_s for limit_s in limits if limit_s is not None)
        made = self.start(give_up_at)
        call = make_call(
            name,
            self.settings,
            request,
            path=path,
            query=query,
            headers=headers,
            deadline_s=_finite(self._left_s(give_up_at)),
            dialect=made.facts.dialect,
        )
        try:
            reply = self._through_billing(call, pause_billing)
            return read_reply(name, reply, self.secrets)
        except TinkerError as error:
            self._parts.report(error)
            raise

    def send(
        self,
        name: str,
        body: bytes,
        *,
        content_type: str,
        headers: Mapping[str, str],
        deadline_s: float | None,
    ) -> Reply:
        """Send a request that is already encoded, and wait for the answer, which is a promise."""
        call = make_call(
            name,
            self.settings,
            body=body,
            headers=headers,
            content_type=content_type,
            deadline_s=_finite(deadline_s),
            dialect=self.dialect,
        )
        return self._through_billing(call, True)

    def future(self) -> APIFuture[Any]:
        """A future for a call of the user: it ends when this is closed, at the latest."""
        made: APIFuture[Any] = APIFuture(submit=self.callback_pool.run, clock=self.clock)
        self.end_with_this(made)
        return made

    def end_with_this(self, future: APIFuture[Any]) -> None:
        """End a future when this is closed, at the latest."""
        self._parts.unfinished.add(future)

    def _through_billing(self, call: Call, pause: bool) -> Reply:
        self.refuse_closed()
        give_up_at = self.clock.now() + (math.inf if call.deadline_s is None else call.deadline_s)
        while True:
            try:
                return self.caller.call(call)
            except BillingError:
                made = self._machinery.made
                in_time = self.clock.now() + PAUSE_S < give_up_at
                if not pause or not in_time or made is None or not made.billing.may_pause():
                    raise
            except APIConnectionError as error:
                self._say_if_closed(error)
                raise
            if self.clock.wait(self._parts.closing, PAUSE_S * self.settings.pace):
                raise ClientClosedError

    def enter(self, step: Callable[[], object]) -> None:
        """Take a step into the runtime for a thread of the user; steps are taken in the order of the calls.

        On a thread of ours, since Ctrl-C may meet the main thread between any two lines, also between those
        of which both must be done or none.

        Raises:
            ClientClosedError: this was closed.
        """
        self.refuse_closed()
        try:
            self._entrance.run(step)
        except RuntimeError as error:
            raise ClientClosedError from error

    def run_awaited(self, job: Callable[[], object]) -> None:
        """Run a call that blocks and that somebody awaits."""
        self.refuse_closed()
        self._await_pool.run(job)

    def run_creating(self, job: Callable[[], object]) -> None:
        """Run a job that creates a client; it may block.

        Raises:
            ClientClosedError: this was closed.
        """
        self.refuse_closed()
        try:
            self._create_pool.run(job)
        except RuntimeError as error:
            raise ClientClosedError from error

    def _say_if_closed(self, error: TinkerError) -> None:
        if self.closed:
            raise ClientClosedError from error

    def abandon(self, request_id: str) -> None:
        """Nobody waits for this sample any more: tell the server, where it wants to know."""
        made = self._machinery.made
        if made is None or not self.dynamic.sample_cancel_enabled or self.closed:
            return
        call = make_call("cancel_future", self.settings, {"request_id": request_id})
        with suppress(ClientClosedError):
            self.enter(partial(self.poller.start, call, _ignore))

    @property
    def dynamic(self) -> ClientDynamicConfigResponse:
        """The server's settings that may change while we run."""
        return self._upkeep.settings or self.machinery.facts.dynamic

    def upkeep(self) -> None:
        """Begin with what is due: newer settings, a newer token. Comes with every heartbeat."""
        if not self.closed:
            self._upkeep.begin_if_due()

    def watch(self, companion: Companion) -> None:
        """Have somebody told what happens to sessions and calls; he ends with this."""
        self._parts.companion = companion

    @property
    def companion(self) -> Companion | None:
        """The companion given to `watch`."""
        return self._parts.companion

    def listen(self, observer: Observer) -> None:
        """Have somebody else told of it too."""
        self._parts.observers = (*self._parts.observers, observer)

    def owe(self, acknowledging: Acknowledging) -> None:
        """Have the last call of this sent before the connections are closed."""
        self._parts.owe(acknowledging)

    def tell(self, event: Event) -> None:
        """Tell who watches."""
        self._parts.tell(event)

    # -------------------------------------------------------------------------------------- the session

    def session_id(self, deadline_at: float = math.inf) -> str:
        """The session, created by the first who asks.

        Args:
            deadline_at: the moment of the clock at which to give up.
        """
        self.refuse_closed()
        session = self.session
        session.refuse_lost()
        if session.session_id is None or session.heartless:
            self._begin_heartbeats(deadline_at)
        assert session.session_id is not None  # noqa: S101  # it is opened now
        return session.session_id

    def get_session_id(self) -> str:
        """The same, under the name that scripts know."""
        return self.session_id()

    @property
    def known_session_id(self) -> str | None:
        """The session if there is one yet; never asks the server."""
        return self._session.session_id if self._session is not None else None

    @property
    def session(self) -> Session:
        """What belongs to the session."""
        if self._session is None:
            raise TinkerError("this client has no session; make a ServiceClient for that")
        return self._session

    def training_sender(self) -> Callable[[training_part.TrainingPart, int], None]:
        """What sends the requests of one training client."""
        return training_part.sender(self)

    def run_sending(self, job: Callable[[], object]) -> None:
        """Run a job that sends a training request; the worker also asks for the result, when it is done."""
        self.send_pool.run(partial(self.poller.step_on_worker, job))

    def _begin_heartbeats(self, deadline_at: float) -> None:
        self._opened.get(lambda: self._open_session(deadline_at), limit_s=self._left_s(deadline_at))

    def _open_session(self, deadline_at: float) -> Session:
        session = self.session
        limit_s = self._left_s(deadline_at)
        made = self._machinery.get(lambda: self._build(deadline_at), limit_s=limit_s)
        session.open(self, made.facts.dialect, _finite(self._left_s(deadline_at)))
        self._parts.session = session
        if session.owned:
            exits.remember(self._parts)
        if self.closed:  # while it was being created: nobody else ends it now
            self._parts.shut()
            self.refuse_closed()
        return session

    # -------------------------------------------------------------------------------------- the end

    def close(
        self, status: FinishStatus = "success", detail: str | None = None, *, limit_s: float = CLOSE_LIMIT_S
    ) -> APIFuture[None]:
        """End the session and everything under way; the first call counts, later ones get its future.

        Args:
            status: how it went.
            detail: a word about it.
            limit_s: how long to try to tell the server.
        """
        with self._close_lock:
            if self._closed is not None:
                return self._closed
            future = self._closed = APIFuture(clock=self.clock)
            self._parts.asked_to_end = (status, detail)
        thread = threading.Thread(
            target=carried(self._close),
            args=(future, status, detail, limit_s),
            name="tinker-close",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError:  # the process is ending and starts no more threads
            self._close(future, status, detail, limit_s)
        return future

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed is not None

    def _close(
        self, future: APIFuture[None], status: FinishStatus, detail: str | None, limit_s: float
    ) -> None:
        try:
            self._finalizer.detach()
            self._parts.refuse()
            finished = self._parts.finish(status, detail, limit_s)
            if finished is not None:
                self.clock.wait(finished, limit_s)
        except Exception:  # noqa: BLE001  # the end must come whatever happens
            _log.exception("the client could not be closed in order")
        finally:
            try:
                self._parts.shut()
            finally:
                future.resolve(None)

    def refuse_closed(self) -> None:
        """Raise when `close` was called.

        Raises:
            ClientClosedError: that is so.
        """
        if self._closed is not None:
            raise ClientClosedError

    def renew_after_fork(self) -> None:
        """A child keeps what is known and begins anew with all that lives: connections, heartbeats, locks."""
        self._close_lock = threading.Lock()
        if self._closed is not None and not self._closed.done():
            self._closed = APIFuture(clock=self.clock)  # the parent's is closing; this is closed
            self._closed.resolve(None)
        self._parts.renew_after_fork()
        self.http.renew_after_fork()
        self.caller.renew_after_fork()
        self.keys.renew_after_fork()
        if self._session is not None:
            self._session.renew_after_fork()
        self._opened = Once()

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.known_session_id or "not started"
        return f"<Core {self.settings.base_url} {state}>"


def _ignore(_: object) -> None:
    """For answers that nobody waits for."""


def _finite(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


def _secrets_of(keys: KeyRing) -> Callable[[], tuple[Secret, ...]]:
    # Not a lambda where the core is made: that would hold the core, and so keep it from ever being dropped.
    return lambda: keys.secrets


def _settings_fetcher(
    caller: Caller, settings: Settings, secrets: Callable[[], Iterable[Secret]]
) -> Callable[[], ClientDynamicConfigResponse]:
    def fetch() -> ClientDynamicConfigResponse:
        request = ClientConfigRequest(sdk_version=settings.sdk_version)
        reply = caller.call(make_call("dynamic_config", settings, request))
        fetched: ClientDynamicConfigResponse = read_reply("dynamic_config", reply, secrets)
        return fetched

    return fetch


def _notice_into(notices: Notices, limiter: RateLimiter) -> Callable[[QueueNotice, Promise], None]:
    def tell(notice: QueueNotice, promise: Promise) -> None:
        if notice.state.paused and promise.request_type == sample.REQUEST_TYPE:
            # What waits already would only wait longer with more behind it.
            limiter.close_for(default_delay_s(0))
        notices.publish(notice, promise.request_type, promise.request_id)

    return tell
