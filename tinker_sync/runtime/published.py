"""`Published`: the description that an open server publishes of itself (OpenAPI), fetched on first use.

Any thread may call the methods. The first call that needs the description fetches it, and others wait for it.
A server that is known to have the whole protocol is not asked for its description.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from tinker_sync._base.log import Log
from tinker_sync._base.policy import NO_SUCH_CALL
from tinker_sync.config import Settings
from tinker_sync.errors import APIStatusError, TinkerError, UnsupportedByServerError
from tinker_sync.runtime.calls import make_call, read_reply
from tinker_sync.runtime.lazy import Lazy
from tinker_sync.transport.call import Call, Reply
from tinker_sync.types._model import Model
from tinker_sync.wire.dialect import Dialect
from tinker_sync.wire.endpoints import row_of
from tinker_sync.wire.published import PATH, PublishedApi, used_fields

if TYPE_CHECKING:
    from tinker_sync.types.described import SupportedModel

_CAPABILITIES: Final = "get_server_capabilities"
_READ_S: Final = 10.0
# The answer for a path without a route, of the framework that most open servers use.
_NO_ROUTE: Final = {"detail": "Not Found"}

_log = Log("tinker_sync.session")


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
            _log.warning("%s", text)

    def _fetch(self) -> list[PublishedApi]:
        call = Call(method="GET", path=PATH, read_s=_READ_S, deadline_s=2 * _READ_S, max_retries=1)
        try:
            api = PublishedApi.read(self._send(call).body)
        except TinkerError as error:
            _log.debug("the server publishes no description of itself: %s", error)
            return []
        return [] if api is None else [api]

    def _list_models(self) -> list[SupportedModel]:
        call = make_call(_CAPABILITIES, self._settings, deadline_s=2 * _READ_S)
        try:
            return list(read_reply(_CAPABILITIES, self._send(call)).supported_models)
        except TinkerError as error:
            _log.debug("the server does not list its models: %s", error)
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
