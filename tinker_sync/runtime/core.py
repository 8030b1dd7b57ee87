"""`Core`: the parts one client shares among its faces, made in order and closed in order.

Nothing touches the network before it is needed. The first call that needs the server asks it for its settings
(`Introduction`); what depends on those, the budgets and the lanes, is made then, once. A failed start is not
remembered. A core that is dropped, closed or forked leaves no thread behind.

It has no behaviour of its own beyond that; see the parts.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

from attrs import frozen

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.config import Settings
from tinker_sync.errors import APIConnectionError, BillingError, TinkerError
from tinker_sync.runtime import _fork, exits, training_part
from tinker_sync.runtime.billing import PAUSE_S, BillingPause
from tinker_sync.runtime.byte_budget import ByteBudget
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.fetcher import Fetcher, Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.introduction import Introduction, ServerFacts
from tinker_sync.runtime.notices import Notices
from tinker_sync.runtime.once import Once
from tinker_sync.runtime.poller import Poller
from tinker_sync.runtime.rate_limiter import Gate, RateLimiter, key_fingerprint, shared_rate_limiter
from tinker_sync.runtime.retrieval import QueueNotice
from tinker_sync.runtime.sample_lane import SampleLane
from tinker_sync.runtime.sample_verdict import SampleJudge
from tinker_sync.runtime.session import Session
from tinker_sync.runtime.workers import Workers
from tinker_sync.transport.auth import KeyRing
from tinker_sync.transport.call import Call, Reply
from tinker_sync.transport.caller import Caller
from tinker_sync.transport.http import Http
from tinker_sync.types.service import ClientConfigRequest, ClientDynamicConfigResponse
from tinker_sync.wire.dialect import Dialect

T = TypeVar("T")
FinishStatus = Literal["success", "errored", "interrupted"]

# Sixteen threads carry thousands of requests: none of them waits for an answer.
_FETCH_THREADS: Final = 16
# Those that send a training step's chunks do wait, for the promise of each.
_SEND_THREADS: Final = 8
_CALLBACK_THREADS: Final = 8
CLOSE_LIMIT_S: Final = 10.0
_FIRST_REFRESH_S: Final = 300.0
_SHORTEST_REFRESH_S: Final = 10.0

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
        self.http = Http(settings, self.keys, clock=clock)
        self.caller = Caller(self.http, settings, clock=clock, secrets=lambda: self.keys.secrets)
        self.send_pool = Workers("send", _SEND_THREADS)
        self.fetch_pool = Workers("fetch", _FETCH_THREADS)
        self.callback_pool = Workers("callback", _CALLBACK_THREADS)
        self.poller = Poller(self.http, self.fetch_pool, clock)
        self._limiter = limiter
        self._facts = facts
        self._machinery = Once(self._build)
        self._session = session
        self._session_id = Once(self._open_session)
        self._dynamic: ClientDynamicConfigResponse | None = None
        self._refresh_at = clock.now() + _FIRST_REFRESH_S
        self._close_lock = threading.Lock()
        self._closed: APIFuture[None] | None = None  # guarded by _close_lock
        self._parts = _Parts(self)
        self._finalizer = weakref.finalize(self, self._parts.shut)
        self._finalizer.atexit = False

    # -------------------------------------------------------------------------------------- the server

    @property
    def machinery(self) -> Machinery:
        """The parts that depend on the server's settings; the first use asks for them."""
        self._refuse_closed()
        return self._machinery.get()

    @property
    def dialect(self) -> Dialect:
        """What the server speaks."""
        return self.machinery.facts.dialect

    def _build(self) -> Machinery:
        introduction = Introduction(self.settings, self.keys, self.caller)
        facts = introduction.ask() if self._facts is None else introduction.adopt(self._facts)
        config = facts.config
        billing = BillingPause(config.billing_exception_max_pause_duration_sec, clock=self.clock)
        notices = self.notices
        fetcher = Fetcher(
            self.poller,
            ByteBudget(config.inflight_response_bytes_semaphore_size, clock=self.clock),
            open_server=not self.settings.is_vendor_host,
            may_pause_billing=billing.may_pause,
            on_notice=_notice_into(notices),
            clock=self.clock,
        )
        places = 2**31 if config.sample_use_retrieve_futures else config.sample_max_concurrent_requests
        lane = SampleLane(
            fetcher,
            self.fetch_pool,
            self._gate(),
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
            train_bytes=ByteBudget(config.fwdbwd_dispatch_bytes_semaphore_size, clock=self.clock),
        )
        self._parts.machinery = made
        return made

    def _gate(self) -> Gate:
        if self._limiter is None:
            key = self.settings.api_key
            fingerprint = key_fingerprint(key.reveal() if key is not None else "")
            self._limiter = shared_rate_limiter(self.settings.base_url, fingerprint, clock=self.clock)
        return self._limiter.gate()

    # -------------------------------------------------------------------------------------- calls

    def call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, object] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        pause_billing: bool = True,
    ) -> Any:
        """Make one call of the API and wait for its answer; arguments as for `make_call`.

        Args:
            pause_billing: wait out a 402 for as long as the server allows.
        """
        # The server's settings come first: they say which credential goes along.
        made = self.machinery
        call = make_call(
            name,
            self.settings,
            request,
            path=path,
            query=query,
            headers=headers,
            deadline_s=deadline_s,
            numbers_kept=made.facts.dialect.keeps_numbers,
        )
        return read_reply(name, self._through_billing(call, pause_billing))

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
            deadline_s=deadline_s,
            numbers_kept=self._keeps_numbers,
        )
        return self._through_billing(call, True)

    @property
    def _keeps_numbers(self) -> bool:
        made = self._machinery.made
        return made.facts.dialect.keeps_numbers if made is not None else self.settings.is_vendor_host

    def _through_billing(self, call: Call, pause: bool) -> Reply:
        while True:
            try:
                return self.caller.call(call)
            except BillingError:
                made = self._machinery.made
                if not pause or made is None or not made.billing.may_pause():
                    raise
            if self.clock.wait(self._parts.closing, PAUSE_S):
                raise _closed_error()

    def abandon(self, request_id: str) -> None:
        """Nobody waits for this sample any more: tell the server, where it wants to know."""
        made = self._machinery.made
        if made is None or not self.dynamic.sample_cancel_enabled or self.closed:
            return
        call = make_call("cancel_future", self.settings, {"request_id": request_id})
        self.poller.start(call, lambda _: None)

    @property
    def dynamic(self) -> ClientDynamicConfigResponse:
        """The server's settings that may change while we run."""
        return self._dynamic or self.machinery.facts.dynamic

    def upkeep(self) -> None:
        """What is due from time to time: newer settings, a newer token. Runs between heartbeats."""
        self.keys.step()
        now = self.clock.now()
        if now < self._refresh_at or not self.dialect.offers("dynamic_config"):
            return
        self._refresh_at = now + max(self.dynamic.refresh_interval_sec, _SHORTEST_REFRESH_S)
        try:
            self._dynamic = self.call(
                "dynamic_config", ClientConfigRequest(sdk_version=self.settings.sdk_version)
            )
        except TinkerError as error:
            _log.debug("the server's settings could not be refreshed: %s", error)

    # -------------------------------------------------------------------------------------- the session

    def session_id(self) -> str:
        """The session, created by the first who asks."""
        self._refuse_closed()
        return self._session_id.get()

    @property
    def known_session_id(self) -> str | None:
        """The session if there is one yet; never asks the server."""
        return self._session_id.made

    @property
    def session(self) -> Session:
        """What belongs to the session."""
        if self._session is None:
            raise TinkerError("this client has no session; make a ServiceClient for that")
        return self._session

    def training_sender(self) -> Callable[[training_part.TrainingPart, int], None]:
        """What sends the requests of one training client."""
        return training_part.sender(self)

    def _open_session(self) -> str:
        session = self.session
        machinery = self.machinery
        session_id = session.open(self)
        self._parts.session = session
        if session.owned and machinery.facts.dialect.offers("finish_session"):
            exits.remember(self._parts)
        return session_id

    # -------------------------------------------------------------------------------------- the end

    def close(
        self, status: FinishStatus, detail: str | None = None, *, limit_s: float = CLOSE_LIMIT_S
    ) -> APIFuture[None]:
        """End the session and everything under way; the first call counts, later ones get its future."""
        with self._close_lock:
            if self._closed is not None:
                return self._closed
            future = self._closed = APIFuture(clock=self.clock)
        threading.Thread(
            target=self._close, args=(future, status, detail, limit_s), name="tinker-close", daemon=True
        ).start()
        return future

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed is not None

    def _close(
        self, future: APIFuture[None], status: FinishStatus, detail: str | None, limit_s: float
    ) -> None:
        try:
            self._parts.finish(status, detail, limit_s)
        finally:
            self._finalizer.detach()
            self._parts.shut()
            future.resolve(None)

    def _refuse_closed(self) -> None:
        if self._closed is not None:
            raise RuntimeError("this client is closed; make a new ServiceClient")

    def __repr__(self) -> str:
        state = "closed" if self.closed else self.known_session_id or "not started"
        return f"<Core {self.settings.base_url} {state}>"


class _Parts:
    """What has to be ended, held apart from the core so that its end can be told."""

    def __init__(self, core: Core) -> None:
        self.closing = threading.Event()
        self.session: Session | None = None
        self.machinery: Machinery | None = None
        self._caller = core.caller
        self._poller = core.poller
        self._http = core.http
        self._pools = (core.send_pool, core.fetch_pool, core.callback_pool)
        self._generation = _fork.generation()

    def finish(self, status: FinishStatus, detail: str | None, limit_s: float) -> None:
        """Tell the server that the session is over; a server that does not answer is not waited for."""
        session, self.session = self.session, None
        exits.forget(self)
        if session is None or self._generation != _fork.generation():
            return
        session.stop_heartbeat()
        try:
            session.finish(self._caller, status, detail, limit_s)
        except TinkerError as error:
            _log.warning("the server was not told that the session is over: %s", error)
        except Exception:  # noqa: BLE001  # the end must come whatever happens
            _log.exception("the session could not be finished")

    def shut(self) -> None:
        """End every thread and connection; calls under way fail."""
        self.closing.set()
        exits.forget(self)
        if self.session is not None:
            self.session.stop_heartbeat()
        failure = _closed_error()
        if self.machinery is not None:
            self.machinery.lane.close(failure)
            self.machinery.train_bytes.close(failure)
            self.machinery.fetcher.inflight.close(failure)
        self._caller.close()
        self._poller.close()
        self._http.close()
        for pool in self._pools:
            with suppress(RuntimeError):
                pool.close(timeout=0)


def _closed_error() -> APIConnectionError:
    return APIConnectionError("The client was closed.")


def _notice_into(notices: Notices) -> Callable[[QueueNotice, Promise], None]:
    return lambda notice, promise: notices.publish(notice, promise.request_type, promise.request_id)
