"""`Server`: the settings of one server, the session there, and the calls to it that a thread waits for.

The first call that needs the server asks it for its settings (`Handshake`), and gets the immutable
`ServerFacts`. Then the schedulers and the limits that depend on them are made, once. The first call that
needs the session opens it. Both kinds of settings and the session are asked for at the same time, because a
distant server takes a tenth of a second for each answer. A failed start is not stored: the next call tries
again. Any thread may call the methods; these first calls block.

While a client lives, its heartbeats have the access token and the settings renewed (`Refresher`). After a
402 (payment required), calls are repeated for a limited time, in which the user may pay (`BillingPause`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.log import Log
from tinker_sync._base.naming import carried
from tinker_sync._base.policy import BLOCKED_PAUSE_S
from tinker_sync.errors import (
    APIConnectionError,
    BillingError,
    ClientClosedError,
    InvalidInputError,
    TinkerError,
    UnsupportedByServerError,
)
from tinker_sync.runtime.admission import Admission
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.flows import Flows, Quota
from tinker_sync.runtime.handshake import Ahead, Handshake, Published, ServerFacts
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.runtime.polls import POLL_TIMEOUT_S, Notices, Polls, Promise, QueueNotice
from tinker_sync.runtime.rate_limiter import RateLimiter, key_fingerprint, shared_rate_limiter
from tinker_sync.runtime.samples import SubmitPolicy
from tinker_sync.runtime.session import Session
from tinker_sync.runtime.workers import WorkerPools
from tinker_sync.transport.call import Call, Reply
from tinker_sync.transport.uplink import Uplink
from tinker_sync.types.future import QueueState
from tinker_sync.types.service import ClientConfigRequest, ClientDynamicConfigResponse
from tinker_sync.wire import zstd

if TYPE_CHECKING:
    from tinker_sync.runtime.client import Connection, Lifecycle

T = TypeVar("T")

# So four chunks of the usual 5 MB are being sent at once, because a budget admits one more while it is not
# overdrawn. More would not arrive sooner. The server's own budget counts those too that it has not accepted.
_SENDING_BYTES: Final = 15_000_000
SHORTEST_REFRESH_S: Final = 10.0
_QUEUE_PAUSE_S: Final = 1.0

_LOG_EVERY_S: Final = 60.0
# After this long without a 402 the incident is over, and the next 402 begins a new one.
_INCIDENT_ENDS_AFTER_S: Final = 300.0

_log = Log("tinker_sync.session")
_billing_log = Log("tinker_sync.billing")


class Machinery(NamedTuple):
    """The facts about a server, and the objects of a client that depend on them, such as the limits."""

    facts: ServerFacts
    billing: BillingPause
    polls: Polls
    admission: Admission
    policy: SubmitPolicy
    train_bytes: Quota
    """For the chunks that the server has not accepted."""
    sending_bytes: Quota
    """For the chunks that are being sent."""
    uplink: Uplink | None
    """None if bodies are not compressed."""


class Server:
    """The settings of one server, the session there, and the calls that a thread waits for. Thread-safe.

    Args:
        connection: the connection to the server; sends the calls that a thread waits for.
        flows: the lives of the calls for which no thread waits; its reactor sends their requests.
        pools: run the jobs that may block.
        lifecycle: ends the calls when the client is closed.
        notices: receives reports on the server's queue.
        session: the session to open; None for a client that needs none.
        facts: the facts about the server, if another process has fetched them already. With None, `start`
            asks the server.
        limiter: a rate limiter for this client alone. None stands for the one that all clients of this base
            URL and key share.
    """

    def __init__(
        self,
        connection: Connection,
        flows: Flows,
        pools: WorkerPools,
        lifecycle: Lifecycle,
        notices: Notices,
        *,
        session: Session | None = None,
        facts: ServerFacts | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.poll_s = POLL_TIMEOUT_S
        """The seconds without an answer after which a poll for a result is sent again.

        `start` reads it once.
        """
        self.connection = connection
        """The connection to the server."""
        self._clock = connection.clock
        self._settings = connection.settings
        self.flows = flows
        self.reactor = flows.reactor
        """The reactor, which sends requests for which no thread waits."""
        self._pools = pools
        self.lifecycle = lifecycle
        self._notices = notices
        self._session = session
        self._facts = facts
        if facts is not None:
            Handshake(connection).adopt(facts)
        self._limiter = limiter
        self._has_forward: Lazy[bool] = Lazy()
        self.published = Published(connection.caller.call, connection.settings)
        """The description that an open server publishes of itself."""
        self._begin()

    def _begin(self) -> None:
        connection = self.connection
        self.machinery: Lazy[Machinery] = Lazy(self._clock.now)
        self._opened: Lazy[Session] = Lazy(self._clock.now)
        self._refresher = Refresher(
            connection.keys, partial(_fetch_settings, connection), self._pools.fetch.run, self._clock
        )

    # -------------------------------------------------------------------------------------- its settings

    def start(self, deadline_at: float = math.inf) -> Machinery:
        """Return what depends on the server's settings. The first call asks the server for them.

        Also start the heartbeats of a session that exists, if this process does not send them yet.

        Args:
            deadline_at: the time of the clock at which to give up.

        Raises:
            ClientClosedError: the client is closed.
            TinkerError: the server cannot be reached, or refuses the client. The next call tries again.
        """
        made = self.machinery.value
        if made is None or self.lifecycle.closed:
            made = self._make_once(deadline_at)
        if self._opened.value is None and self._session is not None and self._session.needs_heartbeat:
            self._open_once(deadline_at)
        return made

    def ready(self, deadline_at: float = math.inf) -> Machinery:
        """Return the same as `start`, for a call that needs the session; raise if the session is lost.

        Raises:
            SessionLostError: the server has dropped the session.
            TinkerError: as for `start`.
        """
        made = self.start(deadline_at)
        session = self._session
        if session is not None and session._lost is not None:
            session.refuse_lost()
        return made

    @property
    def dynamic(self) -> ClientDynamicConfigResponse:
        """The newest values of the server's settings that may change; the defaults before they are known."""
        facts = self._facts
        known = self._refresher.settings
        return known or (ClientDynamicConfigResponse() if facts is None else facts.dynamic)

    def refresh_if_due(self) -> None:
        """Begin to renew the token and the server's settings, if they are due. Every heartbeat calls this."""
        if not self.lifecycle.closed:
            self._refresher.begin_if_due()

    def refuse_without_forward(self) -> None:
        """Raise if the server has no separate call for forward passes. The first call asks the server.

        This is for servers that do not know the field `forward_only` of a training pass.

        Raises:
            UnsupportedByServerError: the server has no such call.
            TinkerError: the server could not be asked.
        """
        if not self._has_forward.get(Handshake(self.connection).has_forward):
            raise UnsupportedByServerError("this server has no forward passes", feature="forward")

    def warn_of_unlisted(self, base_model: str | None) -> None:
        """Log a warning, soon, if the server lists its base models and `base_model` is not among them."""
        dialect = self.start().facts.dialect
        if base_model is None or dialect.knows_all:
            return
        with suppress(RuntimeError):  # closed, or the system starts no thread
            self._pools.ahead.run(carried(partial(self.published.check_model, base_model)))

    def refuse_closed(self) -> None:
        """Raise if the client is closed.

        Raises:
            ClientClosedError: the client is closed.
        """
        if self.lifecycle.closed:
            raise ClientClosedError

    def _make_once(self, deadline_at: float) -> Machinery:
        self.refuse_closed()
        make = partial(self._make, deadline_at)
        made = self._pools.off_main(partial(self.machinery.get, make, deadline_at=deadline_at))
        self.refuse_closed()  # the client may have been closed in the meantime
        return made

    def _make(self, deadline_at: float) -> Machinery:
        facts = self._introduce(deadline_at)
        config = facts.config
        clock = self._clock
        if facts.dialect.offers("dynamic_config"):
            self._refresher.know(facts.dynamic)
        billing = BillingPause(clock.shorten(config.billing_exception_max_pause_duration_sec), clock=clock)
        gate = self.rate_limiter.gate()
        polls = Polls(
            self.flows,
            Quota(config.inflight_response_bytes_semaphore_size),
            self._pools.fetch,
            open_server=not self._settings.is_vendor_host,
            may_pause_billing=billing.may_pause,
            on_notice=_notice_into(self._notices, gate.limiter, clock),
            on_trouble=self._notices.log_trouble,
            secrets=self.connection.secrets,
            read_timeout_s=self.poll_s,
            clock=clock,
        )
        admission = Admission(
            self.flows,
            self._pools.fetch,
            gate,
            2**31 if config.sample_use_retrieve_futures else max(config.sample_max_concurrent_requests, 1),
            config.sample_dispatch_bytes_semaphore_size,
            clock,
        )
        policy = SubmitPolicy(self.connection.caller.judge, billing)
        train_bytes = Quota(config.fwdbwd_dispatch_bytes_semaphore_size)
        self.lifecycle.gate = gate
        uplink = Uplink() if facts.dialect.zstd and zstd.is_available() else None
        return Machinery(facts, billing, polls, admission, policy, train_bytes, Quota(_SENDING_BYTES), uplink)

    def _introduce(self, deadline_at: float) -> ServerFacts:
        if self._facts is not None:
            return self._facts
        try:
            handshake = Handshake(self.connection, lambda: self._left_s(deadline_at))
            facts = self._facts = handshake.ask(self._ahead)
        except TinkerError as error:
            if self.lifecycle.closed:
                raise ClientClosedError from error
            self.lifecycle.report(error)
            raise
        return facts

    def _ahead(self, ask: Callable[[], T]) -> Ahead[T]:
        """Begin a call before the server's settings are known, unless its credential may depend on them."""
        if self._settings.credential_cmd or self.connection.http.embedded:
            return None
        try:
            return self._pools.ahead.submit(carried(ask))
        except RuntimeError:  # closed, or the system starts no thread
            return None

    @property
    def rate_limiter(self) -> RateLimiter:
        """The rate limiter of the user, or else the one that all clients with this address and key share."""
        if self._limiter is None:
            key = self._settings.api_key
            fingerprint = key_fingerprint(key.reveal() if key is not None else "")
            self._limiter = shared_rate_limiter(self._settings.base_url, fingerprint, clock=self._clock)
        return self._limiter

    # -------------------------------------------------------------------------------------- the session

    @property
    def session(self) -> Session:
        """The session at the server.

        Raises:
            TinkerError: the client has no session.
        """
        if self._session is None:
            raise TinkerError("this client has no session; make a ServiceClient for that")
        return self._session

    @property
    def known_session_id(self) -> str | None:
        """The id of the session, or None before it is created. This never asks the server."""
        return self._session.session_id if self._session is not None else None

    def open_session(self, deadline_at: float = math.inf) -> str:
        """Return the id of the session. The first call opens the session.

        Args:
            deadline_at: the time of the clock at which to give up.

        Raises:
            ClientClosedError: the client is closed.
            SessionLostError: the server has dropped the session.
            TinkerError: the client has no session, or the session cannot be created.
        """
        self.refuse_closed()
        session = self.session
        session.refuse_lost()
        if session.session_id is None or session.needs_heartbeat:
            self._open_once(deadline_at)
        assert session.session_id is not None  # noqa: S101  # `open` has set it
        return session.session_id

    def _open_once(self, deadline_at: float) -> None:
        open_session = partial(self._open, deadline_at)
        self._pools.off_main(partial(self._opened.get, open_session, deadline_at=deadline_at))

    def _open(self, deadline_at: float) -> Session:
        session = self.session
        if self.machinery.value is None and self._facts is None:
            session.ask_ahead(lambda ask: self._ahead(partial(ask, self, deadline_at)))
        facts = self._make_once(deadline_at).facts
        try:
            session.open(self, facts, deadline_at)
        except TinkerError as error:
            self.lifecycle.report(error)
            raise
        self.lifecycle.session = session
        if session.owned:
            self.lifecycle.finish_at_exit()
        if self.lifecycle.closed:  # closed while the session was created: nothing else would end it
            self.lifecycle.shut()
            self.refuse_closed()
        return session

    def renew_after_fork(self) -> None:
        """Keep the facts about the server in a forked child. The first call there makes all else again."""
        if self._facts is not None:
            self._facts = self._facts._replace(dynamic=self.dynamic)
        if self._session is not None:
            self._session.renew_after_fork()
        self._begin()

    # -------------------------------------------------------------------------------------- calls

    def call(
        self,
        name: str,
        request: Any = None,
        *,
        path: Mapping[str, object] | None = None,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        deadline_at: float = math.inf,
        usual_s: float = math.inf,
        pause_billing: bool = True,
        read: Callable[[Reply], Any] | None = None,
    ) -> Any:
        """Make one call of the API, wait for its answer, and return the answer in the type of its row.

        The other arguments are those of `make_call`.

        Args:
            deadline_at: the time of the clock at which to give up. Infinity stands for the deadline of the
                settings, or for `usual_s` from now if they have none.
            usual_s: the longest time for a call without a deadline, in seconds.
            pause_billing: repeat the call after a 402 (payment required), until the deadline and for as long
                as the server allows.
            read: reads the answer; None: as the type of its row.

        Raises:
            ClientClosedError: the client is closed, or was closed during the call.
            TinkerError: the call fails.
        """
        if deadline_at == math.inf:
            deadline_at = self.give_up_at(None, usual_s)
        # The server's settings come first, because they determine the credential of the call.
        made = self.start(deadline_at)
        call = make_call(
            name, self._settings, request, path=path, query=query, headers=headers, dialect=made.facts.dialect
        )
        try:
            read = read or partial(read_reply, name, secrets=self.connection.secrets)
            send = partial(self.send, call, read, deadline_at, pause_billing=pause_billing)
            return self._pools.off_main(send)
        except TinkerError as error:
            self.lifecycle.report(error)
            raise

    def send(
        self, call: Call, read: Callable[[Reply], Any], deadline_at: float, *, pause_billing: bool
    ) -> Any:
        """Send a call, again after a 402 if that is allowed, and return its answer as `read` reads it.

        Blocks, and must not run on the main thread. Errors as for `call`, which also reports them.
        """
        connection = self.connection
        while True:
            call = call.but(deadline_s=self._left_s(deadline_at))
            try:
                return connection.caller.read(call, read)
            except BillingError:
                if not pause_billing or not self.may_wait_out_billing(deadline_at):
                    raise
            except APIConnectionError as error:
                if self.lifecycle.closed:
                    raise ClientClosedError from error
                raise
            if self._clock.wait(self.lifecycle.closing, self._clock.shorten(BLOCKED_PAUSE_S)):
                raise ClientClosedError

    def give_up_at(self, deadline_s: float | None, usual_s: float) -> float:
        """Return the time of the clock at which a call gives up; infinity if it has no deadline.

        The first of these durations that is set counts: `deadline_s` of the call, the deadline of the
        settings, `usual_s`.

        Raises:
            InvalidInputError: `deadline_s` is no number, NaN or negative infinity.
        """
        if deadline_s is None:
            deadline_s = self._settings.deadline_s
        limit_s = usual_s if deadline_s is None else deadline_s
        try:
            if math.isfinite(limit_s):
                return self._clock.now() + limit_s
            if limit_s > 0:
                return math.inf
        except TypeError:
            pass
        raise InvalidInputError(
            f"deadline: expected a number of seconds, or math.inf for no limit, got {limit_s!r}"
        )

    def may_wait_out_billing(self, give_up_at: float) -> bool:
        """Return True if a call with a 402 may be repeated after a pause, before the time to give up."""
        made = self.machinery.value
        in_time = self._clock.now() + self._clock.shorten(BLOCKED_PAUSE_S) < give_up_at
        return in_time and made is not None and made.billing.may_pause()

    def closed_or(self, error: TinkerError) -> TinkerError:
        """Return `error`, or a `ClientClosedError` with `error` as its cause if the client is closed."""
        if not self.lifecycle.closed:
            return error
        closed = ClientClosedError()
        closed.__cause__ = error
        return closed

    def abandon(self, request_id: str) -> None:
        """Cancel a sample at the server, if it offers that and the client is open. Ignore the answer."""
        if self.lifecycle.closed or not self.dynamic.sample_cancel_enabled:
            return
        call = make_call("cancel_future", self._settings, {"request_id": request_id})
        with suppress(RuntimeError):  # closed meanwhile
            self._pools.enter.run(partial(self.reactor.start, call, lambda _: None))

    def _left_s(self, deadline_at: float) -> float | None:
        """Return the seconds until a time of the clock, at least 0; None if that time never comes."""
        return None if math.isinf(deadline_at) else max(deadline_at - self._clock.now(), 0.0)


def _notice_into(
    notices: Notices, limiter: RateLimiter, clock: Clock
) -> Callable[[QueueNotice, Promise], None]:
    def take(notice: QueueNotice, promise: Promise) -> None:
        # More samples would only make the queue at the server longer: that of the account, or of one model.
        if promise.pause is not None:
            if notice.state is QueueState.PAUSED_RATE_LIMIT:
                limiter.close_for(_QUEUE_PAUSE_S, reported=True)
            elif notice.state.paused:
                promise.pause.begin(clock, _QUEUE_PAUSE_S)
        notices.publish(notice, promise.request_type, promise.request_id)

    return take


def _fetch_settings(connection: Connection) -> ClientDynamicConfigResponse:
    """Ask the server for the settings that may change while a client lives, and return them."""
    request = ClientConfigRequest(sdk_version=connection.settings.sdk_version)
    reply = connection.caller.call(make_call("dynamic_config", connection.settings, request))
    fetched: ClientDynamicConfigResponse = read_reply("dynamic_config", reply, connection.secrets)
    return fetched


class Refreshable(Protocol):
    """A credential that may have to be renewed."""

    def step(self) -> None: ...
    def next_refresh_in_s(self) -> float | None: ...


class Refresher:
    """The renewal of the access token and the server's settings while a client lives. Thread-safe.

    Each heartbeat calls `begin_if_due`, which returns at once. A worker does the work, because the renewal of
    a token may run a command.

    Args:
        keys: renews the token.
        fetch: asks the server for its settings.
        run: runs a job on a worker.
        clock: measures time.
    """

    def __init__(
        self,
        keys: Refreshable,
        fetch: Callable[[], ClientDynamicConfigResponse],
        run: Callable[[Callable[[], object]], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._keys = keys
        self._fetch = fetch
        self._run = run
        self._clock = clock
        self._busy = threading.Lock()  # held while a worker renews
        self._refresh_at = clock.now()
        self.settings: ClientDynamicConfigResponse | None = None
        """The newest settings; None until `know`, which is not called if the server does not offer them."""

    def know(self, settings: ClientDynamicConfigResponse) -> None:
        """Store the server's settings. They are due for renewal after the interval in them, at least 10 s."""
        self.settings = settings
        self._refresh_at = self._clock.now() + max(settings.refresh_interval_sec, SHORTEST_REFRESH_S)

    def begin_if_due(self) -> None:
        """If the token or the settings are due, make a worker renew them, unless one is at work already."""
        if not (self._is_token_due() or self._are_settings_due()) or not self._busy.acquire(blocking=False):
            return
        try:
            self._run(self.step)
        except RuntimeError:  # the client is closed
            self._busy.release()

    def step(self) -> None:
        """Renew the token and the settings that are due, on a worker. Log a failure and keep the old ones.

        `begin_if_due` takes the lock `_busy`, so that one worker at a time renews. This method releases it.
        """
        try:
            if self._is_token_due():
                self._keys.step()
            if self._are_settings_due():
                self._refresh()
        finally:
            self._busy.release()

    def _is_token_due(self) -> bool:
        due_in_s = self._keys.next_refresh_in_s()
        return due_in_s is not None and due_in_s <= 0

    def _are_settings_due(self) -> bool:
        return self.settings is not None and self._clock.now() >= self._refresh_at

    def _refresh(self) -> None:
        settings = self.settings
        assert settings is not None  # noqa: S101  # otherwise they are not due
        try:
            settings = self._fetch()
        except TinkerError as error:
            _log.debug("the server's settings could not be refreshed: %s", error)
        self.know(settings)


class BillingPause:
    """The decision about calls with an answer 402: repeat the call after a pause, or fail it. Thread-safe.

    Args:
        max_pause_s: the time after the first 402 in which calls are repeated. After five minutes without a
            402, the next one counts as the first again.
        clock: measures time.

    >>> BillingPause(3600).may_pause()
    True
    >>> BillingPause(0).may_pause()
    False
    """

    def __init__(self, max_pause_s: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self.max_pause_s = max_pause_s
        self._clock = clock
        self._lock = threading.Lock()
        self._began_at: float | None = None  # guarded by _lock
        self._seen_at: float | None = None  # guarded by _lock
        self._logged_at: float | None = None  # guarded by _lock

    def may_pause(self) -> bool:
        """Record and log a 402. Return True if the call should be repeated after a pause, else False.

        While calls are repeated, this logs at most once a minute.
        """
        now = self._clock.now()
        with self._lock:
            if self._seen_at is None or now - self._seen_at > _INCIDENT_ENDS_AFTER_S:
                self._began_at = self._logged_at = None
            self._seen_at = now
            began_at = self._began_at = now if self._began_at is None else self._began_at
            over = now - began_at >= self.max_pause_s
            say = over or self._logged_at is None or now - self._logged_at >= _LOG_EVERY_S
            if say:
                self._logged_at = now
        if over:
            blocked_s = now - began_at
            _billing_log.error("the account is still blocked after %.0f s; not waiting any longer", blocked_s)
        elif say:
            longest_s = self.max_pause_s
            _billing_log.warning("the account is blocked; waiting up to %.0f s for that to change", longest_s)
        return not over
