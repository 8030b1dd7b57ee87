"""`Server`: the settings of one server, and the calls that one client makes to it.

The first call that needs the server asks it for its settings (`Handshake`), and gets the immutable
`ServerFacts`. Then the schedulers and the limits that depend on them are made, once. A failed start is not
stored: the next call tries again. Any thread may call the methods; a start blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

from tinker_sync.errors import (
    APIConnectionError,
    BillingError,
    ClientClosedError,
    TinkerError,
    UnsupportedByServerError,
)
from tinker_sync.runtime import sample
from tinker_sync.runtime.billing import PAUSE_S, BillingPause
from tinker_sync.runtime.byte_budget import ByteBudget
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.connection import Connection, Refresher
from tinker_sync.runtime.fetcher import POLL_TIMEOUT_S, Fetcher, Promise
from tinker_sync.runtime.handshake import Handshake, ServerFacts
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.runtime.lifecycle import Lifecycle
from tinker_sync.runtime.notices import Notices
from tinker_sync.runtime.poller import Poller
from tinker_sync.runtime.published import Published
from tinker_sync.runtime.rate_limiter import Gate, RateLimiter, key_fingerprint, shared_rate_limiter
from tinker_sync.runtime.rate_window import default_delay_s
from tinker_sync.runtime.retrieval import QueueNotice
from tinker_sync.runtime.sample_scheduler import SampleScheduler, SubmitPolicy
from tinker_sync.runtime.workers import WorkerPools
from tinker_sync.transport.call import Call
from tinker_sync.types.service import ClientDynamicConfigResponse

# With this budget four chunks of the usual 5 MB are under way at once, because a budget admits one more while
# it is not overdrawn. More chunks would not arrive sooner, and a compressed chunk is a copy of its data.
_TRAIN_BYTES: Final = 15_000_000


class Machinery(NamedTuple):
    """The facts about a server, and the schedulers and limits that depend on them."""

    facts: ServerFacts
    billing: BillingPause
    fetcher: Fetcher
    scheduler: SampleScheduler
    train_bytes: ByteBudget


class Server:
    """The settings of one server, and the calls that one client makes to it. Thread-safe.

    Args:
        connection: the connection to the server.
        poller: sends the requests.
        pools: run the jobs that may block.
        lifecycle: ends the calls when the client is closed.
        notices: receives reports on the server's queue.
        facts: the facts about the server, if another process has fetched them already. With None, `start`
            asks the server.
        limiter: a rate limiter for this client alone. None stands for the one that all clients of this base
            URL and key share.
    """

    def __init__(
        self,
        connection: Connection,
        poller: Poller,
        pools: WorkerPools,
        lifecycle: Lifecycle,
        notices: Notices,
        *,
        facts: ServerFacts | None = None,
        limiter: RateLimiter | None = None,
    ) -> None:
        self.poll_s = POLL_TIMEOUT_S
        """The seconds without an answer after which a poll for a result is sent again.

        `start` reads it once.
        """
        self.made: Lazy[Machinery] = Lazy(connection.clock.now)
        self.connection = connection
        """The connection to the server."""
        self._clock = connection.clock
        self._settings = connection.settings
        self.poller = poller
        """The poller, which sends requests for which no thread waits."""
        self._pools = pools
        self._lifecycle = lifecycle
        self._notices = notices
        self._known_facts = facts
        self._limiter = limiter
        self._has_forward: Lazy[bool] = Lazy()
        self.published = Published(connection.caller.call, connection.settings)
        """The description that an open server publishes of itself."""
        self._refresher = Refresher(
            connection.keys, connection.fetch_settings, pools.fetch.run, connection.clock
        )

    # -------------------------------------------------------------------------------------- its settings

    def start(self, deadline_at: float = math.inf) -> Machinery:
        """Return the parts that depend on the server's settings. The first call asks the server for them.

        Args:
            deadline_at: the time of the clock at which to give up.

        Raises:
            ClientClosedError: the client is closed.
            TinkerError: the server cannot be reached, or refuses the client. The next call tries again.
        """
        self.refuse_closed()
        made = self.made.value
        if made is None:
            made = self.made.get(lambda: self._make(deadline_at), deadline_at=deadline_at)
            self.refuse_closed()  # the client may have been closed in the meantime
        return made

    @property
    def dynamic(self) -> ClientDynamicConfigResponse:
        """The newest values of the settings that may change; the defaults before the start."""
        made = self.made.value
        known = self._refresher.settings
        return known or (ClientDynamicConfigResponse() if made is None else made.facts.dynamic)

    def refresh(self) -> None:
        """Begin to renew the token and the settings if they are due. Called with every heartbeat."""
        self._refresher.begin_if_due()

    def refuse_without_forward(self) -> None:
        """Raise if the server has no separate call for forward passes. The first call asks the server.

        This is for servers that do not know the field `forward_only` of a training pass.

        Raises:
            UnsupportedByServerError: the server has no such call.
        """
        if not self._has_forward.get(self._introduction().has_forward):
            raise UnsupportedByServerError("this server has no forward passes", feature="forward")

    def refuse_closed(self) -> None:
        """Raise if the client is closed.

        Raises:
            ClientClosedError: the client is closed.
        """
        if self._lifecycle.closed:
            raise ClientClosedError

    def left_s(self, deadline_at: float) -> float:
        """Return the seconds until a time of the clock, at least 0."""
        return max(deadline_at - self._clock.now(), 0.0)

    def _make(self, deadline_at: float) -> Machinery:
        facts = self._introduce(deadline_at)
        config = facts.config
        clock, pace = self._clock, self._settings.pace
        if facts.dialect.offers("dynamic_config"):
            self._refresher.know(facts.dynamic)
        billing = BillingPause(config.billing_exception_max_pause_duration_sec * pace, clock=clock)
        gate = self._gate()
        fetcher = Fetcher(
            self.poller,
            ByteBudget(config.inflight_response_bytes_semaphore_size, clock=clock),
            open_server=not self._settings.is_vendor_host,
            may_pause_billing=billing.may_pause,
            on_notice=_notice_into(self._notices, gate.limiter),
            on_trouble=self._notices.log_trouble,
            secrets=self.connection.secrets,
            read_timeout_s=self.poll_s,
            clock=clock,
            pace=pace,
        )
        places = 2**31 if config.sample_use_retrieve_futures else config.sample_max_concurrent_requests
        scheduler = SampleScheduler(
            fetcher,
            self._pools.fetch,
            gate,
            ByteBudget(config.sample_dispatch_bytes_semaphore_size, clock=clock),
            # A budget admits one more while it is not overdrawn, so it is one less than the number of places.
            ByteBudget(max(places - 1, 0), clock=clock),
            SubmitPolicy(self.connection.caller.judge, billing),
            has_idle_connection=self.connection.http.has_idle_connection,
            clock=clock,
        )
        train_bytes = ByteBudget(min(config.fwdbwd_dispatch_bytes_semaphore_size, _TRAIN_BYTES), clock=clock)
        self._lifecycle.waits = (scheduler, train_bytes, fetcher.inflight)
        return Machinery(facts, billing, fetcher, scheduler, train_bytes)

    def _introduce(self, deadline_at: float) -> ServerFacts:
        introduction = self._introduction(lambda: finite(self.left_s(deadline_at)))
        try:
            facts = self._known_facts
            return introduction.ask() if facts is None else introduction.adopt(facts)
        except TinkerError as error:
            self._refuse_if_closed(error)
            self._lifecycle.report(error)
            raise

    def _introduction(self, left_s: Callable[[], float | None] = lambda: None) -> Handshake:
        connection = self.connection
        return Handshake(connection.settings, connection.keys, connection.caller, left_s)

    def _gate(self) -> Gate:
        if self._limiter is None:
            key = self._settings.api_key
            fingerprint = key_fingerprint(key.reveal() if key is not None else "")
            self._limiter = shared_rate_limiter(
                self._settings.base_url, fingerprint, clock=self._clock, pace=self._settings.pace
            )
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
        deadline_at: float = math.inf,
        pause_billing: bool = True,
    ) -> Any:
        """Make one call of the API and wait for its answer. The other arguments are those of `make_call`.

        Args:
            deadline_at: the time of the clock at which to give up.
            pause_billing: wait out a 402 for as long as the server allows.

        Raises:
            ClientClosedError: the client is closed, or was closed during the call.
            TinkerError: the call fails.
        """
        # The server's settings come first, because they determine the credential of the call.
        made = self.start(deadline_at)
        call = make_call(
            name,
            self._settings,
            request,
            path=path,
            query=query,
            headers=headers,
            deadline_s=finite(self.left_s(deadline_at)),
            dialect=made.facts.dialect,
        )
        try:
            return self._send(call, name, pause_billing=pause_billing)
        except TinkerError as error:
            self._lifecycle.report(error)
            raise

    def _send(self, call: Call, name: str, *, pause_billing: bool) -> Any:
        """Make a call and return its answer as the type of its row.

        Wait out a 402 for as long as the server allows.

        Raises:
            ClientClosedError: the client is closed, or was closed during the call.
            TinkerError: the call fails.
        """
        self.refuse_closed()
        connection = self.connection
        pause_s = PAUSE_S * self._settings.pace
        limit_s = self._settings.deadline_s if call.deadline_s is None else call.deadline_s
        give_up_at = self._clock.now() + (math.inf if limit_s is None else limit_s)
        while True:
            try:
                return connection.caller.read(call, lambda reply: read_reply(name, reply, connection.secrets))
            except BillingError:
                if not pause_billing or not self.may_wait_out_billing(give_up_at):
                    raise
            except APIConnectionError as error:
                self._refuse_if_closed(error)
                raise
            if self._clock.wait(self._lifecycle.closing, pause_s):
                raise ClientClosedError
            call = call.but(deadline_s=finite(self.left_s(give_up_at)))

    def may_wait_out_billing(self, give_up_at: float) -> bool:
        """Return True if a call with a 402 may be repeated after `PAUSE_S`."""
        made = self.made.value
        in_time = self._clock.now() + PAUSE_S * self._settings.pace < give_up_at
        return in_time and made is not None and made.billing.may_pause()

    def closed_or(self, error: TinkerError) -> TinkerError:
        """Return `error`, or a `ClientClosedError` with `error` as its cause if the client is closed."""
        try:
            self._refuse_if_closed(error)
        except ClientClosedError as closed:
            return closed
        return error

    def abandon(self, request_id: str) -> None:
        """Cancel a sample at the server, if the server offers that. Do not wait for the answer."""
        if self._lifecycle.closed or not self.dynamic.sample_cancel_enabled:
            return
        call = make_call("cancel_future", self._settings, {"request_id": request_id})
        with suppress(RuntimeError):  # closed meanwhile
            self._pools.enter.run(partial(self.poller.start, call, _ignore))

    def _refuse_if_closed(self, error: TinkerError) -> None:
        if self._lifecycle.closed:
            raise ClientClosedError from error


def finite(seconds: float | None) -> float | None:
    """Return a finite number of seconds, or None if it is infinite or None."""
    return None if seconds is None or math.isinf(seconds) else seconds


def _ignore(_: object) -> None:
    """Ignore an answer that no call waits for."""


def _notice_into(notices: Notices, limiter: RateLimiter) -> Callable[[QueueNotice, Promise], None]:
    def take(notice: QueueNotice, promise: Promise) -> None:
        if notice.state.paused and promise.request_type == sample.REQUEST_TYPE:
            # More samples would only make the queue at the server longer.
            limiter.close_for(default_delay_s(0))
        notices.publish(notice, promise.request_type, promise.request_id)

    return take
