"""What a server says of itself: its settings, and the description that an open server publishes (OpenAPI).

`Handshake` is the first exchange, about the settings for clients, the dialect and the access tokens.
`Published` fetches the description when it is first needed. A server that is known to have the whole protocol
is not asked for it. Any thread may call the methods of `Published`; other threads wait for the one that asks.
"""

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
from tinker_sync.runtime.calls import make_call, odd_answer, read_reply
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.transport.call import Call, Reply
from tinker_sync.transport.retries import Caller
from tinker_sync.types._model import Model
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
from tinker_sync.wire.endpoints import ENDPOINTS, row_of
from tinker_sync.wire.published import PATH, PublishedApi, used_fields

if TYPE_CHECKING:
    from tinker_sync.runtime.client import Connection
    from tinker_sync.types.service import SupportedModel

T = TypeVar("T")

# A server without protobuf may fail on every probe. The failure identifies it, so few retries are enough.
_PROBE_RETRIES: Final = 2
# The statuses with which an existing call may answer an empty body.
_WRONG_BODY: Final = (400, 415, 422, 500)
_CAPABILITIES: Final = "get_server_capabilities"
_READ_S: Final = 10.0
# The answer for a path without a route, of the framework that most open servers use.
_NO_ROUTE: Final = {"detail": "Not Found"}
_log = Log(__name__)
_session_log = Log("tinker_sync.session")

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


# ------------------------------------------------------------------------------------------ its description


class Published:
    """The calls and fields of one server, as far as its description shows them, and its models. Thread-safe.

    Args:
        send: makes a call and returns the answer.
        settings: the server's address and the timeouts.
    """

    def __init__(self, send: Callable[[Call], Reply], settings: Settings) -> None:
        self._send = send
        self._settings = settings
        # Lists, because Lazy holds no None.
        self._api: Lazy[list[PublishedApi]] = Lazy()
        self._models: Lazy[list[SupportedModel]] = Lazy()
        self._warned: dict[str, object] = {}  # by text: the call that has logged it

    def api(self) -> PublishedApi | None:
        """Return the description that the server publishes, or None if none could be fetched.

        The server is asked once.
        """
        return next(iter(self._api.get(self._fetch)), None)

    def lacks_route(self, name: str, error: APIStatusError, dialect: Dialect) -> bool:
        """Return True if an error shows that an open server has no route for a call.

        Only a 404, a 405 or a 501 can show this. If the server publishes a description, the description
        decides. Otherwise a 405 or a 501 shows it, and so does the 404 that web frameworks return for an
        unknown path.
        """
        if error.status_code not in NO_SUCH_CALL or dialect.vendor:
            return False
        api = None if dialect.knows_all else self.api()
        if api is not None:
            return not api.offers(row_of(name))
        return error.status_code != 404 or error.body == _NO_ROUTE

    def check_fields(self, name: str, request: Model, dialect: Dialect) -> None:
        """Check a request for fields that the server would ignore silently, as its description shows.

        For a field without effect on the result, log a warning, once. Without a description, check nothing.

        Raises:
            UnsupportedByServerError: the server would ignore a field that changes the result of the call.
        """
        used = [] if dialect.knows_all else used_fields(name, request)
        api = self.api() if used else None
        if api is None:
            return
        for each in used:
            if not api.drops(row_of(name), each.place):
                continue
            if each.changes_result:
                raise UnsupportedByServerError(
                    f"this server does not know {each.name} of {name} and would leave it out silently",
                    feature=each.name,
                )
            self.warn_once(f"this server does not know {each.name} of {name} and leaves it out")

    def check_model(self, base_model: str) -> None:
        """Log a warning, once, if the server lists its base models and `base_model` is not among them.

        Some servers then train another model.
        """
        listed = [model.model_name for model in self.models() if model.model_name]
        if listed and base_model not in listed:
            self.warn_once(
                f"this server does not list the base model {base_model!r}, and may use another one: "
                f"it lists {', '.join(listed)}"
            )

    def context_length(self, base_model: str | None) -> int | None:
        """Return the context length of a model, or None if the server does not give it.

        A `base_model` of None stands for the only model that the server lists.
        """
        found = [model for model in self.models() if base_model in (None, model.model_name)]
        return found[0].max_context_length if len(found) == 1 else None

    def models(self) -> list[SupportedModel]:
        """Return the models that the server lists, asked for once; an empty list if it does not list them."""
        return self._models.get(self._list_models)

    def warn_once(self, text: str) -> None:
        """Log a warning, unless this object has logged the same text before."""
        mine = object()
        if self._warned.setdefault(text, mine) is mine:
            _session_log.warning("%s", text)

    def _fetch(self) -> list[PublishedApi]:
        call = Call(method="GET", path=PATH, read_s=_READ_S, deadline_s=2 * _READ_S, max_retries=1)
        try:
            api = PublishedApi.read(self._send(call).body)
        except TinkerError as error:
            _session_log.debug("the server publishes no description of itself: %s", error)
            return []
        return [] if api is None else [api]

    def _list_models(self) -> list[SupportedModel]:
        call = make_call(_CAPABILITIES, self._settings, deadline_s=2 * _READ_S)
        try:
            return list(read_reply(_CAPABILITIES, self._send(call)).supported_models)
        except TinkerError as error:
            _session_log.debug("the server does not list its models: %s", error)
            return []


def explain_missing_route(name: str, error: APIStatusError, instead: str) -> UnsupportedByServerError:
    """Return the error for a call for which the server has no route.

    Args:
        name: the name of the call.
        error: the answer of the server.
        instead: a sentence about what to do instead; may be empty.
    """
    allowed = error.response.headers.get("allow") if error.response is not None else None
    says = f"it answers {error.status_code}" + (f" and allows {allowed}" if allowed else "")
    exists = "; the object may well exist" if row_of(name).path.names else ""
    text = f"this server does not offer {name} ({says}){exists}"
    return UnsupportedByServerError(f"{text}. {instead}" if instead else text, feature=name)
