"""The unloading of a model from its server, by a call of the user or at the close of the client.

A server holds each model in memory, in one of a limited number of places.

Servers that finish sessions free the places themselves. Open servers have few places, and free them minutes
after the last heartbeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tinker_sync.errors import ClientClosedError, UnsupportedByServerError
from tinker_sync.runtime.calls import make_call
from tinker_sync.runtime.training_calls import OrderedCall
from tinker_sync.types.model import UnloadModelRequest, UnloadModelResponse
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.runtime.client_runtime import ClientRuntime
    from tinker_sync.runtime.training_calls import Operations, TrainingLine
    from tinker_sync.transport.call import Call

_NAME: Final = "unload_model"


class ModelPlace:
    """The place of a model in the memory of its server, with the call that frees it. Thread-safe.

    The lifecycle of the client sends `last_call` when the client ends and its session does not stay open.

    Args:
        runtime: the parts that the clients of a service share.
        line: the `TrainingLine` of the client.
    """

    def __init__(self, runtime: ClientRuntime, line: TrainingLine) -> None:
        self._server = runtime.server
        self._settings = runtime.settings
        self._line = line
        self.freed = False
        """True once `call` has made the call that unloads the model; False again if the server has no such
        call."""
        runtime.lifecycle.register_last_call(self)

    def refuse_freed(self) -> None:
        """Raise if the client has begun to unload the model.

        Raises:
            ClientClosedError: the model is unloaded, or its unloading has begun.
        """
        if self.freed:
            raise ClientClosedError("the model of this training client was unloaded; make a new one")

    def call(self, deadline_at: float) -> UnloadCall:
        """Return the call that unloads the model, and refuse later calls of the client."""
        request = UnloadModelRequest(model_id=self._line.model_id)
        call = UnloadCall(self._line, _NAME, request, UnloadModelResponse, deadline_at)
        call.place = self
        self.freed = True
        return call

    def last_call(self) -> Call | None:
        """Return the call that unloads the model when the client closes, or None if no call is needed.

        No call is needed if `freed` is True or the model never existed, or if the server frees the place when
        the session ends.
        """
        made, model_id = self._server.machinery.value, self._line.model_id
        if not model_id or self.freed or made is None:
            return None
        dialect = made.facts.dialect
        if dialect.offers("finish_session"):
            return None
        request = UnloadModelRequest(model_id=model_id)
        return make_call(_NAME, self._settings, request, dialect=dialect).but(max_retries=0, patient=False)


class UnloadCall(OrderedCall):
    """The call that unloads a model. It is the last call on the model, so it has no number."""

    numbered = False
    place: ModelPlace

    def prepare(self) -> Operations:
        """Return the operation for the queue.

        Raises:
            UnsupportedByServerError: the server has no such call; nothing was sent.
            TinkerError: as for `TrainingCall.prepare`.
        """
        server, dialect = self.line.runtime.server, self.line.runtime.server.ready().facts.dialect
        api = None if dialect.knows_all else server.published.api()
        if api is not None and not api.offers(ENDPOINTS[_NAME]):
            self.place.freed = False  # the model is still there
            raise UnsupportedByServerError(
                "this server has no call unload_model; it frees the place some time after the session's end",
                feature=_NAME,
            )
        return super().prepare()
