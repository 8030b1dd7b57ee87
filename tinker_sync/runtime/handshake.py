"""The first exchange with a server, about its settings for clients, its dialect and its access tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from attrs import field, frozen

from tinker_sync._base.log import Log
from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, TinkerError, UnsupportedByServerError, WireError
from tinker_sync.runtime.calls import make_call, odd_answer
from tinker_sync.transport.call import Reply
from tinker_sync.transport.retries import Caller
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

if TYPE_CHECKING:
    from tinker_sync.runtime.client import Connection

T = TypeVar("T")

# A server without protobuf may fail on every probe. The failure identifies it, so few retries are enough.
_PROBE_RETRIES: Final = 2
# The statuses with which an existing call may answer an empty body.
_WRONG_BODY: Final = (400, 415, 422, 500)
_log = Log(__name__)

# The dialects that probes have found, for all clients of this process.
_probed: Final = DialectCache()


Ahead = Future[T] | None
"""A call that was sent before the server's settings were known, or None."""


class ServerFacts(NamedTuple):
    """The settings of a server, those of them that may change (`dynamic`), and its dialect. Immutable."""

    config: ClientConfigResponse
    dynamic: ClientDynamicConfigResponse
    dialect: Dialect


@frozen(eq=False)
class _Answer:
    """An answer to a settings call, and its JSON. The repr hides the JSON, which may repeat secrets."""

    reply: Reply
    tree: Any = field(default=None, repr=False)

    @property
    def status(self) -> int:
        return self.reply.status


class Handshake:
    """The first exchange of a client with its server. One thread at a time may call `ask`.

    Args:
        connection: makes the calls; its key ring is set to exchange the key for access tokens if the server
            wants them.
        left_s: returns the seconds that the next call may take; None stands for the limit in the settings.
    """

    def __init__(self, connection: Connection, left_s: Callable[[], float | None] = lambda: None) -> None:
        self._settings = connection.settings
        self._keys = connection.keys
        self._caller = connection.caller
        self._secrets = connection.secrets
        self._left_s = left_s

    def ask(self, begin: Callable[[Callable[[], _Answer]], Ahead[_Answer]] | None = None) -> ServerFacts:
        """Ask the server for its settings and find its dialect.

        Args:
            begin: begins to ask for the settings that may change, at the same time as for the others; None to
                ask for them later, if the server has them.

        Raises:
            TinkerError: the server cannot be reached, refuses the client, or answers in an unknown form.
        """
        ask_dynamic = partial(self._get, "dynamic_config")
        begun = None if begin is None else begin(ask_dynamic)
        answer, config = self.sign_in()
        dialect = self._dialect(answer)
        dynamic = ClientDynamicConfigResponse()
        if dialect.offers("dynamic_config"):
            answer = outcome_of_ahead(begun, ask_dynamic, lambda: config.pjwt_auth_enabled)
            dialect = dialect.after_dynamic_config(answer.status, answer.tree)
            dynamic = self._convert("dynamic_config", answer, ClientDynamicConfigResponse)
        return ServerFacts(config, dynamic, dialect)

    def sign_in(self) -> tuple[_Answer, ClientConfigResponse]:
        """Ask the server for its settings, and set up access tokens if it wants them.

        Raises:
            TinkerError: the server cannot be reached, refuses the client, or answers in an unknown form.
        """
        answer = self._get("client_config")
        config: ClientConfigResponse = self._convert("client_config", answer, ClientConfigResponse)
        self._use_tokens(config)
        return answer, config

    def has_forward(self) -> bool:
        """Return True if the server has a separate call for forward passes, as older servers have.

        The method sends a request to find out.

        Raises:
            TinkerError: the server cannot be reached, or its answer does not show this.
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
        """Set up access tokens by the facts that another process has fetched. Return the facts."""
        self._use_tokens(facts.config)
        return facts

    def _use_tokens(self, config: ClientConfigResponse) -> None:
        if config.pjwt_auth_enabled:
            enforce = config.credential_default_source == "credential_cmd"
            self._keys.use_exchange(_exchange(self._caller, self._settings), enforce_cmd=enforce)

    def _get(self, name: str) -> _Answer:
        """Return the answer to a settings call; it has no JSON if the server knows no such call."""
        request = ClientConfigRequest(sdk_version=self._settings.sdk_version)
        call = make_call(name, self._settings, request, deadline_s=self._left_s())
        try:
            # Later refreshes may fail, but the first exchange retries with patience.
            return self._caller.read(call.but(max_retries=None), lambda reply: self._read_tree(name, reply))
        except APIStatusError as error:
            if error.status_code not in NO_SUCH_CALL:
                raise
            return _Answer(Reply(error.status_code, {}))

    def _read_tree(self, name: str, reply: Reply) -> _Answer:
        try:
            return _Answer(reply, wire_json.loads(reply.body))
        except WireError as error:
            raise odd_answer(ENDPOINTS[name], reply, error, self._secrets) from error

    def _convert(self, name: str, answer: _Answer, kind: Any) -> Any:
        try:
            return wire_json.from_plain({} if answer.tree is None else answer.tree, kind)
        except WireError as error:
            raise odd_answer(ENDPOINTS[name], answer.reply, error, self._secrets) from error

    def _dialect(self, answer: _Answer) -> Dialect:
        forced = self._settings.dialect
        if forced != "auto":
            return Dialect.forced(forced).with_settings(
                answer.tree, client_config=answer.status not in NO_SUCH_CALL
            )
        decided = decide(answer.status, answer.tree, vendor=self._settings.is_vendor_host)
        if isinstance(decided, Dialect):
            return decided
        known = _probed.get(self._settings.base_url)
        return known or _probed.keep(self._settings.base_url, self._probe(answer))

    def _probe(self, answer: _Answer) -> Dialect:
        """Send a protobuf request for a model that does not exist. Return the dialect that the answer shows.

        Raises:
            TinkerError: the server cannot be reached, or its answer does not show the dialect.
        """
        call = make_call(
            "forward_backward",
            self._settings,
            body=PROBE_BODY,
            content_type=PROBE_CONTENT_TYPE,
            deadline_s=self._left_s(),
        )
        try:
            status, complaint = self._caller.call(call.but(max_retries=_PROBE_RETRIES)).status, b""
        except APIStatusError as error:
            status = error.status_code
            complaint = error.response.content if error.response is not None else b""
            if read_probe(status, complaint) is None:
                raise
        spoken = read_probe(status, complaint)
        found = decide(answer.status, answer.tree, probe=spoken, vendor=self._settings.is_vendor_host)
        if isinstance(found, NeedsProbe):
            raise UnsupportedByServerError(
                "what this server speaks cannot be told; choose with dialect='proto' or dialect='json'"
            )
        _log.debug("the server at %s speaks %s", self._settings.base_url, spoken)
        return found


def outcome_of_ahead(begun: Ahead[T], again: Callable[[], T], would_differ: Callable[[], bool]) -> T:
    """Return the outcome of a call that was sent before the server's settings were known.

    Args:
        begun: the call; None if it was not sent.
        again: makes the call in line.
        would_differ: returns True if the call that failed would be another one now that the settings are
            known, with a token or without newer fields, so that it is made again.

    Raises:
        TinkerError: the call failed.
    """
    try:
        if begun is not None:
            return begun.result()
    except CancelledError:  # the client is closed
        pass
    except TinkerError:
        if not would_differ():
            raise
    return again()


def _exchange(caller: Caller, settings: Settings) -> Callable[[], Any]:
    def exchange() -> Any:
        from tinker_sync.transport.tokens import read_grant

        return read_grant(caller.call(make_call("auth_token", settings)))

    return exchange
