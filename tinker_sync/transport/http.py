"""`Http`: one attempt to send a `Call`, which ends with a `Reply` or with `SendFailed`.

The retries are in `caller.py`. An attempt follows redirects. If the server has closed an idle connection in
the meantime, the attempt sends again over a new one, unless this could repeat a call that must not be
repeated.

`Http.send` waits for the reply. `Http.open` returns before it, for a poller, a thread that reads the answers
of many calls; `exchange.py` describes how.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.secret import Secret
from tinker_sync._embedded import hold_server
from tinker_sync.config import Settings
from tinker_sync.config.settings import DefaultInt
from tinker_sync.errors import APIConnectionError
from tinker_sync.transport.call import Call, Reply, SendFailed
from tinker_sync.transport.exchange import Exchange, Launcher
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.pools import MAX_IDLE, Pools, Route
from tinker_sync.transport.request import RequestHeads
from tinker_sync.transport.scheme import speaks_tls, with_tls
from tinker_sync.transport.session import SessionRules
from tinker_sync.transport.socket_line import Limits
from tinker_sync.wire.http1.client import Unanswered

__all__ = ["Call", "Credentials", "Exchange", "Http", "Reply", "SendFailed"]


# A port that does not use TLS may take the greeting for a partial request and wait for the rest.
_GREETING_S: Final = 1.0


class Credentials(Protocol):
    """A source of the credentials that `Http` sends, such as `KeyRing`."""

    def credential(self) -> str: ...
    def for_exchange(self) -> str: ...
    def renewed(self, rejected: Secret) -> Secret | None: ...


class Http:
    """A sender of calls to one base URL. Thread-safe.

    Args:
        settings: the address, timeouts, headers, and the user's session.
        keys: the source of credentials, read at each attempt; None sends none.
        clock: the source of time.
        journal: records every request, answer and failure.
        max_idle: the most idle connections to keep.
    """

    def __init__(
        self,
        settings: Settings,
        keys: Credentials | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        journal: Journal | None = None,
        max_idle: int = MAX_IDLE,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._clock = clock
        self._heads = RequestHeads(settings)
        self._origin = self._heads.origin
        self._embedded = hold_server(settings.base_url, settings.api_key)
        self._rules = SessionRules(
            settings.session, direct=self._embedded is not None or settings.api_key_source == "local"
        )
        self._pools = Pools(clock, max_idle=max_idle)
        self.has_idle_connection = self._pools.has_idle
        self._launcher = Launcher(
            self._heads, self._rules, self._pools, clock, journal or Journal(), self.start_server
        )
        self._renewed = None if keys is None else keys.renewed
        self._kind_limits_answer = isinstance(settings.max_body_bytes, DefaultInt)
        # Set by any thread once the server has answered or its port was probed for TLS; never reset.
        self._heard = False

    def send(self, call: Call) -> Reply:
        """Make one attempt to send a call, and return the answer of any status.

        Raises:
            SendFailed: No answer came.
            CredentialError: The call needs a key and none is usable.
            TinkerError: The exchange of the key for the first token failed.
            ConfigurationError: A certificate file or a proxy cannot be used.
            ConfigurationError, MissingExtraError: The embedded server cannot be started.
            InvalidInputError: An array of the body has changed since an earlier try.
        """
        try:
            reply = self.open(call).finish()
        except SendFailed as failed:
            if self._was_meant_for_tls(failed, call):
                message = with_tls(self._origin.netloc)
                raise SendFailed(message, maybe_received=False, final=True) from failed
            raise
        self._heard = True
        return reply

    def open(self, call: Call) -> Exchange:
        """Send a call and return the exchange that reads its answer. Connecting and sending may block.

        Raises:
            SendFailed: The call could not be sent.
            TinkerError: As for `send`.
        """
        keys = self._keys
        if keys is None or call.credential != "usual":
            credential = self._credential(call, keys)
        else:
            credential = keys.credential()
        renew = self._renewed if credential and call.credential == "usual" else None
        head = self._heads.write(call, credential) if self._rules.adds_nothing else None
        return Exchange(call, head, credential, self._limits(call), self._launcher, renew)

    def start_server(self) -> None:
        """Start the embedded server if these calls go to it and it is not running.

        Raises:
            SendFailed: The server has ended by itself.
            ConfigurationError: Its directory or its model cannot be used.
            MissingExtraError: A package that it needs is not installed.
        """
        if self._embedded is None:
            return
        try:
            self._embedded.start()
        except APIConnectionError as error:
            raise SendFailed(str(error), maybe_received=False, final=True) from error

    def _was_meant_for_tls(self, failed: SendFailed, call: Call) -> bool:
        """Return True if the first request failed because it was plain HTTP and the port uses TLS.

        This method probes the port at most once.
        """
        origin = self._origin
        unanswered = isinstance(failed.cause, (OSError, Unanswered)) and not (
            failed.timed_out or failed.final
        )
        if self._heard or not unanswered or origin.scheme != "http" or self._embedded is not None:
            return False
        self._heard = True
        direct = self.route().proxy is None
        left_s = _GREETING_S if call.deadline_s is None else min(_GREETING_S, call.deadline_s)
        return direct and speaks_tls(origin.host, origin.port, left_s)

    def route(self) -> Route:
        """Return the route of requests to the configured server.

        Raises:
            ConfigurationError: A certificate file or a proxy cannot be used.
        """
        return self._rules.way_to(self._origin).route

    def forget_idle(self) -> None:
        """Close the idle connections, so that the next requests use new ones."""
        self._pools.forget_idle()

    def close(self) -> None:
        """Close all connections, and release the hold that keeps the embedded server running.

        Requests under way fail. May be called twice, from any thread.
        """
        self._pools.close()
        self._rules.close()
        if self._embedded is not None:
            self._embedded.release()

    @property
    def closed(self) -> bool:
        return self._pools.closed

    def renew_after_fork(self) -> None:
        """Drop the copies of the parent's connections, in a forked child.

        The child's first call also does this.
        """
        self._pools.renew_after_fork()
        self._rules.renew_after_fork()

    def __repr__(self) -> str:
        return f"<Http {self._settings.base_url} {self._pools!r}>"

    @staticmethod
    def _credential(call: Call, keys: Credentials | None) -> str:
        """Return the text of the call's credential, or "" if the call carries none."""
        if keys is None:
            return ""
        if call.credential == "usual":
            return keys.credential()
        return keys.for_exchange() if call.credential == "exchange" else ""

    def _limits(self, call: Call) -> Limits:
        timeout = call.timeout or self._settings.timeout
        read_s = call.read_s or timeout.read
        left_s = math.inf if call.deadline_s is None else call.deadline_s
        most_bytes = self._settings.max_body_bytes
        if self._kind_limits_answer:
            most_bytes = min(most_bytes, call.answer_bytes)
        return Limits(
            connect_s=timeout.connect,
            read_s=read_s,
            idle_s=timeout.idle or read_s,
            give_up_s=self._clock.now() + left_s,
            max_body_bytes=most_bytes,
        )
