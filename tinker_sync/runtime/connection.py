"""`Connection`: the address, the keys and the sockets of one client.

`Refresher`: the renewal of the client's access token and of the server's settings.

The objects start no threads, and send requests only when their methods are called. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock
from tinker_sync._base.events import Events
from tinker_sync._base.log import Log
from tinker_sync._base.secret import Secret
from tinker_sync.config import Settings
from tinker_sync.errors import TinkerError
from tinker_sync.runtime import exits
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.transport.auth import KeyRing
from tinker_sync.transport.http import Http
from tinker_sync.transport.journal import Journal
from tinker_sync.transport.retries import Caller
from tinker_sync.types.service import ClientConfigRequest, ClientDynamicConfigResponse

SHORTEST_REFRESH_S: Final = 10.0

_log = Log("tinker_sync.session")


class Connection:
    """The address, the keys and the sockets of one client. Thread-safe.

    Args:
        settings: the address, the key and everything else that the user has configured.
        clock: measures time.
    """

    def __init__(self, settings: Settings, clock: Clock = SYSTEM_CLOCK) -> None:
        self.settings = settings
        self.clock = clock
        self.keys = KeyRing(settings, clock=clock)
        self.secrets = secrets = _secrets_of(self.keys)
        """A function that returns the values that must not appear in logs, errors and notices."""
        self.events = Events()
        """The stream of the events of the client."""
        self.journal = journal = Journal(
            self.events, base_url=settings.base_url, as_curl=settings.log_curl, secrets=secrets
        )
        self.http = Http(settings, self.keys, clock=clock, journal=journal)
        exits.hang_up_at_exit(self.http)
        self.caller = Caller(self.http, settings, clock=clock, journal=journal, secrets=secrets)

    def mask(self, text: str | None) -> str | None:
        """Return `text`, a secret of the user such as an access token, as a `str` whose repr hides it.

        From now on, the client masks the secret in logs and errors. It forgets the oldest of more than 100
        such secrets. Return None without a text.
        """
        if not text:
            return None
        secret = Secret(text)
        self.keys.keep(secret)
        return secret.reveal()

    def fetch_settings(self) -> ClientDynamicConfigResponse:
        """Ask the server for the settings that may change while a client lives, and return them.

        Raises:
            TinkerError: the call fails.
        """
        request = ClientConfigRequest(sdk_version=self.settings.sdk_version)
        reply = self.caller.call(make_call("dynamic_config", self.settings, request))
        fetched: ClientDynamicConfigResponse = read_reply("dynamic_config", reply, self.secrets)
        return fetched

    def renew_after_fork(self) -> None:
        """Replace the locks in a forked child. `exits` renews the sockets, also those of a lost client."""
        self.caller.renew_after_fork()
        self.keys.renew_after_fork()


def _secrets_of(keys: KeyRing) -> Callable[[], tuple[Secret, ...]]:
    # The function refers only to the key ring: other objects keep it, and must not keep the client alive.
    return lambda: keys.secrets


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
