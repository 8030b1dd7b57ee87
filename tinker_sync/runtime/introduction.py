"""The first exchange with a server: its settings for clients, what it speaks, and whether it wants tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from attrs import frozen

from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, UnsupportedByServerError, WireError
from tinker_sync.runtime.calls import make_call, odd_answer
from tinker_sync.transport.auth import KeyRing, read_grant
from tinker_sync.transport.caller import Caller
from tinker_sync.types.service import ClientConfigRequest, ClientConfigResponse, ClientDynamicConfigResponse
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.dialect import (
    PROBE_BODY,
    PROBE_CONTENT_TYPE,
    Dialect,
    DialectCache,
    NeedsProbe,
    decide,
    read_probe,
)
from tinker_sync.wire.endpoints import ENDPOINTS

_NO_SUCH_CALL: Final = (404, 405, 501)
_log = logging.getLogger(__name__)

# What probes have found, for all clients of this process.
_probed: Final = DialectCache()


@frozen
class ServerFacts:
    """What the server said of itself. Immutable."""

    config: ClientConfigResponse
    dynamic: ClientDynamicConfigResponse
    dialect: Dialect

    @classmethod
    def carried(
        cls,
        settings: Settings,
        config: ClientConfigResponse,
        dynamic: ClientDynamicConfigResponse,
        raw_config: Mapping[str, Any],
    ) -> ServerFacts:
        """The facts another process found and sent along."""
        decided = _decided(settings, 200, raw_config)
        dialect = Dialect.of_vendor() if isinstance(decided, NeedsProbe) else decided
        return cls(config, dynamic, dialect)


class Introduction:
    """Asks a server what a client has to know. `ask` is called by one thread at a time."""

    def __init__(self, settings: Settings, keys: KeyRing, caller: Caller) -> None:
        self._settings = settings
        self._keys = keys
        self._caller = caller

    def ask(self) -> ServerFacts:
        """Ask for everything.

        Raises:
            TinkerError: the server cannot be reached, or refuses us.
        """
        status, raw = self._get("client_config")
        config = _fitted("client_config", raw or {}, ClientConfigResponse)
        if config.pjwt_auth_enabled:
            enforce = config.credential_default_source == "credential_cmd"
            self._keys.use_exchange(_exchange(self._caller, self._settings), enforce_cmd=enforce)
        dialect = self._dialect(status, raw)
        dynamic = ClientDynamicConfigResponse()
        if dialect.offers("dynamic_config"):
            dynamic_status, raw_dynamic = self._get("dynamic_config")
            dialect = dialect.after_dynamic_config(dynamic_status, raw_dynamic)
            dynamic = _fitted("dynamic_config", raw_dynamic or {}, ClientDynamicConfigResponse)
        return ServerFacts(config, dynamic, dialect)

    def _get(self, name: str) -> tuple[int, Any]:
        """Status and JSON of a settings call; no JSON where the server knows no such call."""
        request = ClientConfigRequest(sdk_version=self._settings.sdk_version)
        try:
            reply = self._caller.call(make_call(name, self._settings, request))
        except APIStatusError as error:
            if error.status_code not in _NO_SUCH_CALL:
                raise
            return error.status_code, None
        try:
            return reply.status, wire_json.loads(reply.body)
        except WireError as error:
            raise odd_answer(ENDPOINTS[name], reply, error) from error

    def _dialect(self, status: int, raw: Any) -> Dialect:
        forced = self._settings.dialect
        if forced != "auto":
            return Dialect.forced(forced)
        decided = _decided(self._settings, status, raw)
        if isinstance(decided, Dialect):
            return decided
        known = _probed.get(self._settings.base_url)
        return known or _probed.keep(self._settings.base_url, self._probe(status, raw))

    def _probe(self, status: int, raw: Any) -> Dialect:
        """Ask in protobuf about a model that does not exist."""
        call = make_call("forward_backward", self._settings, body=PROBE_BODY, content_type=PROBE_CONTENT_TYPE)
        try:
            answered, complaint = self._caller.call(call).status, b""
        except APIStatusError as error:
            answered = error.status_code
            complaint = error.response.content if error.response is not None else b""
            if read_probe(answered, complaint) is None:
                raise
        spoken = read_probe(answered, complaint)
        found = decide(status, raw, probe=spoken, vendor=self._settings.is_vendor_host)
        if isinstance(found, NeedsProbe):
            raise UnsupportedByServerError(
                "what this server speaks cannot be told; choose with dialect='proto' or dialect='json'"
            )
        _log.debug("the server at %s speaks %s", self._settings.base_url, spoken)
        return found


def _decided(settings: Settings, status: int, raw: Any) -> Dialect | NeedsProbe:
    return decide(status, raw, vendor=settings.is_vendor_host)


def _fitted(name: str, raw: Any, kind: Any) -> Any:
    try:
        return wire_json.from_plain(raw, kind)
    except WireError as error:
        error.path = f"{name} {error.path}"
        raise


def _exchange(caller: Caller, settings: Settings) -> Callable[[], Any]:
    return lambda: read_grant(caller.call(make_call("auth_token", settings)))
