"""What a client renews while it lives: its token, and the server's settings that may change.

`begin_if_due` is called with every heartbeat and returns at once; the work is done on a worker, since a token
may need a command to be run, and no heartbeat is to wait for that.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final, Protocol

from tinker_sync._clock import SYSTEM_CLOCK, Clock
from tinker_sync.errors import TinkerError
from tinker_sync.runtime import _fork
from tinker_sync.types.service import ClientDynamicConfigResponse

SHORTEST_REFRESH_S: Final = 10.0

_log = logging.getLogger("tinker_sync.session")


class Keys(Protocol):
    """Credentials that may have to be renewed."""

    def step(self) -> None: ...
    def next_refresh_in_s(self) -> float | None: ...


class Upkeep:
    """The renewals of one client. Thread-safe.

    Args:
        keys: renewed when they say so.
        fetch: asks the server for its settings.
        run: runs a job on a worker.
        clock: what time it is.
    """

    def __init__(
        self,
        keys: Keys,
        fetch: Callable[[], ClientDynamicConfigResponse],
        run: Callable[[Callable[[], object]], object],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._keys = keys
        self._fetch = fetch
        self._run = run
        self._clock = clock
        self._busy = threading.Lock()  # held while a worker is at it
        self._refresh_at = clock.now()
        self.settings: ClientDynamicConfigResponse | None = None
        """The newest there are; None where the server has no such call."""
        _fork.renew_in_child(self)

    def know(self, settings: ClientDynamicConfigResponse) -> None:
        """The server's settings are these; ask again when they say."""
        self.settings = settings
        self._refresh_at = self._clock.now() + max(settings.refresh_interval_sec, SHORTEST_REFRESH_S)

    def begin_if_due(self) -> None:
        """Have a worker renew what is due, unless one is at it."""
        if not (self._token_due() or self._settings_due()) or not self._busy.acquire(blocking=False):
            return
        try:
            self._run(self.step)
        except RuntimeError:  # the client is closed
            self._busy.release()

    def step(self) -> None:
        """Renew what is due. Runs on a worker, for which `begin_if_due` has taken the lock."""
        try:
            if self._token_due():
                self._keys.step()
            if self._settings_due():
                self._refresh()
        finally:
            self._busy.release()

    def renew_after_fork(self) -> None:
        """The parent's worker is not here."""
        self._busy = threading.Lock()

    def _token_due(self) -> bool:
        due_in_s = self._keys.next_refresh_in_s()
        return due_in_s is not None and due_in_s <= 0

    def _settings_due(self) -> bool:
        return self.settings is not None and self._clock.now() >= self._refresh_at

    def _refresh(self) -> None:
        settings = self.settings
        assert settings is not None  # noqa: S101  # else nothing was due
        try:
            settings = self._fetch()
        except TinkerError as error:
            _log.debug("the server's settings could not be refreshed: %s", error)
        self.know(settings)
