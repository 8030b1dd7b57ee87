"""The first exchange with a server, about its settings for clients, its dialect and its use of tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from attrs import field, frozen

from tinker_sync._policy import NO_SUCH_CALL
from tinker_sync._secret import Secret
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, UnsupportedByServerError, WireError
from tinker_sync.runtime.calls import make_call, odd_answer
from tinker_sync.transport.auth import KeyRing
from tinker_sync.transport.call import Reply
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

# A server without protobuf may fail on every probe. The failure identifies it, so few retries are enough.
_PROBE_RETRIES: Final = 2
# The statuses with which an existing call may answer an empty body.
_WRONG_BODY: Final = (400, 415, 422, 500)
_log = logging.getLogger(__name__)

# The dialects that probes have found, for all clients of this process.
_probed: Final = DialectCache()


class ServerFacts(NamedTuple):
    """The settings and the dialect of a server. Immutable."""

    config: ClientConfigResponse
    dynamic: ClientDynamicConfigResponse
    dialect: Dialect


@frozen(eq=False)
class _Said:
    """An answer and its JSON. The repr hides the JSON, because servers may repeat secrets in it."""

    reply: Reply
    tree: Any = field(default=None, repr=False)

    @property
    def status(self) -> int:
        return self.reply.status


class Handshake:
    """The first exchange of a client with its server. One thread at a time may call `ask`.

    Args:
        settings: the settings of the client, with the address of the server.
        keys: the key ring, which exchanges the key for tokens if the server wants them.
        caller: makes the calls.
        left_s: returns the time that the next call may take; None for that of the settings.
    """

    def __init__(
        self,
        settings: Settings,
        keys: KeyRing,
        caller: Caller,
        left_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._settings = settings
        self._keys = keys
        self._caller = caller
        self._left_s = left_s

    def ask(self) -> ServerFacts:
        """Ask the server for its settings and find its dialect.

        Raises:
            TinkerError: the server cannot be reached, or refuses the client.
        """
        said = self._get("client_config")
        config = self._fitted("client_config", said, ClientConfigResponse)
        self._use_tokens(config)
        dialect = self._dialect(said)
        dynamic = ClientDynamicConfigResponse()
        if dialect.offers("dynamic_config"):
            said = self._get("dynamic_config")
            dialect = dialect.after_dynamic_config(said.status, said.tree)
            dynamic = self._fitted("dynamic_config", said, ClientDynamicConfigResponse)
        return ServerFacts(config, dynamic, dialect)

    def has_forward(self) -> bool:
        """Return True if the server has a separate call for forward passes, as older servers have.

        The method sends a request to find out.
        """
        call = make_call("forward", self._settings, {}, deadline_s=self._left_s())
        try:
            self._caller.call(call.but(max_retries=_PROBE_RETRIES))
        except APIStatusError as error:
            if error.status_code in NO_SUCH_CALL:
                return False
            if error.status_code not in _WRONG_BODY:
                raise
        return True

    def adopt(self, facts: ServerFacts) -> ServerFacts:
        """Use the facts that another process has fetched, instead of asking the server. Return them."""
        self._use_tokens(facts.config)
        return facts

    def _use_tokens(self, config: ClientConfigResponse) -> None:
        if config.pjwt_auth_enabled:
            enforce = config.credential_default_source == "credential_cmd"
            self._keys.use_exchange(_exchange(self._caller, self._settings), enforce_cmd=enforce)

    def _get(self, name: str) -> _Said:
        """Return the answer to a settings call; it has no JSON if the server knows no such call."""
        request = ClientConfigRequest(sdk_version=self._settings.sdk_version)
        call = make_call(name, self._settings, request, deadline_s=self._left_s())
        try:
            # Later refreshes may fail, but the first exchange retries with patience.
            return self._caller.read(call.but(max_retries=None), lambda reply: self._heard(name, reply))
        except APIStatusError as error:
            if error.status_code not in NO_SUCH_CALL:
                raise
            return _Said(Reply(error.status_code, {}))

    def _heard(self, name: str, reply: Reply) -> _Said:
        try:
            return _Said(reply, wire_json.loads(reply.body))
        except WireError as error:
            raise odd_answer(ENDPOINTS[name], reply, error, self._secrets) from error

    def _fitted(self, name: str, said: _Said, kind: Any) -> Any:
        try:
            return wire_json.from_plain(said.tree or {}, kind)
        except WireError as error:
            raise odd_answer(ENDPOINTS[name], said.reply, error, self._secrets) from error

    def _secrets(self) -> tuple[Secret, ...]:
        return self._keys.secrets

    def _dialect(self, said: _Said) -> Dialect:
        forced = self._settings.dialect
        if forced != "auto":
            return Dialect.forced(forced).with_settings(
                said.tree, client_config=said.status not in NO_SUCH_CALL
            )
        decided = _decided(self._settings, said)
        if isinstance(decided, Dialect):
            return decided
        known = _probed.get(self._settings.base_url)
        return known or _probed.keep(self._settings.base_url, self._probe(said))

    def _probe(self, said: _Said) -> Dialect:
        """Send a protobuf request for a model that does not exist.

        Return the dialect that the answer shows.
        """
        call = make_call(
            "forward_backward",
            self._settings,
            body=PROBE_BODY,
            content_type=PROBE_CONTENT_TYPE,
            deadline_s=self._left_s(),
        )
        try:
            answered, complaint = self._caller.call(call.but(max_retries=_PROBE_RETRIES)).status, b""
        except APIStatusError as error:
            answered = error.status_code
            complaint = error.response.content if error.response is not None else b""
            if read_probe(answered, complaint) is None:
                raise
        spoken = read_probe(answered, complaint)
        found = decide(said.status, said.tree, probe=spoken, vendor=self._settings.is_vendor_host)
        if isinstance(found, NeedsProbe):
            raise UnsupportedByServerError(
                "what this server speaks cannot be told; choose with dialect='proto' or dialect='json'"
            )
        _log.debug("the server at %s speaks %s", self._settings.base_url, spoken)
        return found


def _decided(settings: Settings, said: _Said) -> Dialect | NeedsProbe:
    return decide(said.status, said.tree, vendor=settings.is_vendor_host)


def _exchange(caller: Caller, settings: Settings) -> Callable[[], Any]:
    def exchange() -> Any:
        from tinker_sync.transport.tokens import read_grant

        return read_grant(caller.call(make_call("auth_token", settings)))

    return exchange
