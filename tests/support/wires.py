"""Parts of the transport for tests."""

from __future__ import annotations

import threading
from typing import Any

from support.servers import ScriptedServer

from tinker_sync._base.events import Event, Events, Observer
from tinker_sync._base.secret import Secret
from tinker_sync.config import Settings, Timeout
from tinker_sync.transport.http import Call, Http

KEY = "tml-marked-0123456789"


class Keys:
    """A double of the source of credentials, whose keys are easy to find in texts."""

    def __init__(self, key: str = KEY, long_lived: str = "tml-longlived-0123456789") -> None:
        self.asked = 0
        self._key, self._long_lived = Secret(key), Secret(long_lived)

    def credential(self) -> str:
        self.asked += 1
        return self._key.reveal()

    def for_exchange(self) -> str:
        return self._long_lived.reveal()

    def renewed(self, rejected: Secret) -> Secret | None:
        return None


class Notebook:
    """An observer that records events. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[Event] = []

    def observe(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    @property
    def names(self) -> list[str]:
        """Return the names of the events so far."""
        with self._lock:
            return [type(event).__name__ for event in self._events]

    @property
    def events(self) -> list[Event]:
        with self._lock:
            return list(self._events)


def heard_by(observer: Observer) -> Events:
    """Return a stream of events with one observer, which gets all."""
    events = Events()
    events.listen(observer)
    return events


def settings_for(server: ScriptedServer | str, **options: Any) -> Settings:
    """Return settings for a server, with timeouts that only a hang can reach."""
    options.setdefault("timeout", Timeout(connect=10, read=10))
    base_url = server if isinstance(server, str) else server.url
    return Settings.resolve(base_url=base_url, **options)


class BriefHttp(Http):
    """An `Http` that is closed at the end of a `with` block."""

    def __enter__(self) -> BriefHttp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def http_for(server: ScriptedServer | str, **options: Any) -> BriefHttp:
    """Return an `Http` for a server."""
    parts = {name: options.pop(name) for name in ("clock", "journal", "keys", "max_idle") if name in options}
    parts.setdefault("keys", Keys())
    return BriefHttp(settings_for(server, **options), **parts)


def post(path: str = "/api/v1/x", body: bytes = b"{}", **fields: Any) -> Call:
    """Return a POST call."""
    return Call(**{"method": "POST", "path": path, "body": body, **fields})


def get(path: str = "/api/v1/x", **fields: Any) -> Call:
    """Return a GET call."""
    return Call(**{"method": "GET", "path": path, **fields})
