"""Creation of models, new or from checkpoints, and of custom losses, for the methods that create them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, field, frozen

from tinker_sync._base.events import ModelNamed
from tinker_sync._base.naming import carried
from tinker_sync._base.secret import Secret
from tinker_sync.clients._arguments import check_base_model, check_path, check_state_path, refuse_bare_path
from tinker_sync.clients._base import REST_S
from tinker_sync.errors import (
    APIResponseValidationError,
    BadRequestError,
    InvalidInputError,
    UnprocessableEntityError,
)
from tinker_sync.runtime.client import ClientRuntime
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.runtime.polls import Promise
from tinker_sync.runtime.training import OrderedCall, TrainingLine
from tinker_sync.types import (
    AdamOptimizerConfig,
    CreateModelRequest,
    CreateModelResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LoraConfig,
    OptimizerConfig,
    UntypedAPIFuture,
    WeightsInfoResponse,
)
from tinker_sync.types.custom_loss import CreateCustomLossRequest, CreateCustomLossResponse
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import fit
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.losses.handle import LossHandle

T = TypeVar("T")


@frozen
class NewModel:
    """A checked request for a new model.

    It has the number of the model in the session, by which the hosted service recognizes a retry.

    Attributes:
        request: the request, complete except for the session.
        deadline_at: the time of the clock at which to give up.
    """

    request: CreateModelRequest
    deadline_at: float

    @classmethod
    def of(
        cls,
        runtime: ClientRuntime,
        base_model: str,
        lora: LoraConfig | None,
        user_metadata: dict[str, str] | None,
        optimizer: OptimizerConfig | None,
        deadline_at: float,
    ) -> NewModel:
        """Check the arguments, take the next model number of the session, and return the request.

        Raises:
            InvalidInputError: the request cannot be sent.
        """
        check_base_model(base_model, "create_lora_training_client")
        if lora is not None and lora.rank < 0:
            raise InvalidInputError(
                "create_lora_training_client: rank: expected 1 or more, or 0 to train all weights, "
                f"got {lora.rank}"
            )
        runtime.lifecycle.refuse_if_leaving()
        request = CreateModelRequest(
            session_id="",
            model_seq_id=0,
            base_model=base_model,
            user_metadata=user_metadata,
            lora_config=lora,
            optimizer_config=optimizer or AdamOptimizerConfig(),
        )
        refuse_unsendable(request)
        number = runtime.server.session.next_model_seq_id()
        return cls(request.model_copy(update={"model_seq_id": number}), deadline_at)

    @property
    def model_seq_id(self) -> int:
        """The number of the model in its session."""
        return self.request.model_seq_id

    def make(self, line: TrainingLine) -> None:
        """Create the model, and set its id in `line`. Blocks."""
        line.model_id = create_model(line.runtime, self.request, self.deadline_at)


@frozen
class LoadedModel:
    """A checked request for a model with the weights of a checkpoint.

    Attributes:
        request: the request, complete except for the session and the number of the model.
        model_seq_id: the number of the model in the session.
        deadline_at: the time of the clock at which to give up.
    """

    request: LoadWeightsRequest = field(repr=False)  # it may hold an access token
    model_seq_id: int
    deadline_at: float

    @classmethod
    def of(cls, runtime: ClientRuntime, request: LoadWeightsRequest, deadline_at: float) -> LoadedModel:
        """Check the arguments, take the next model number of the session, and return the request.

        Args:
            runtime: the runtime of the client.
            request: the request, complete except for the session and the number of the model.
            deadline_at: the time of the clock at which to give up.

        Raises:
            InvalidInputError: the request cannot be sent.
        """
        check_path(request.path, "create_training_client_from_state", runtime.settings)
        check_state_path(request.path, "create_training_client_from_state")
        refuse_bare_path(request.path, "create_training_client_from_state")
        runtime.lifecycle.refuse_if_leaving()
        refuse_unsendable(request)
        return cls(request, runtime.server.session.next_model_seq_id(), deadline_at)

    def make(self, line: TrainingLine) -> None:
        """Create the model, and set its id in `line`. Blocks."""
        runtime = line.runtime
        line.last_state = self.request
        runtime.server.open_session(self.deadline_at)
        if not runtime.server.ready(self.deadline_at).facts.dialect.loads_into_new_models:
            self._make_in_three(line)
            return
        try:
            line.model_id = self._make_in_one(runtime)
        except (BadRequestError, UnprocessableEntityError) as refusal:
            if "model_id" not in str(refusal):
                raise
            # The server loads into existing models only, so it has not made a model.
            self._make_in_three(line)

    def _make_in_one(self, runtime: ClientRuntime) -> str:
        session_id = runtime.server.open_session(self.deadline_at)
        request = self.request.model_copy(
            update={"session_id": session_id, "model_seq_id": self.model_seq_id}
        )
        promise, loaded = promised(runtime, "load_weights", request, LoadWeightsResponse, self.deadline_at)
        model_id = loaded.model_id or promise.model_id or f"{session_id}:train:{self.model_seq_id}"
        runtime.lifecycle.notify(ModelNamed(model=model_id, base_model=request.base_model))
        return model_id

    def _make_in_three(self, line: TrainingLine) -> None:
        runtime, asked = line.runtime, self.request
        info = self._weights_info(runtime)
        request = CreateModelRequest(
            session_id="",
            model_seq_id=self.model_seq_id,
            base_model=asked.base_model or info.base_model,
            user_metadata=asked.user_metadata,
            lora_config=_adapter_of(info),
            optimizer_config=(
                info.optimizer_config if asked.optimizer else asked.optimizer_config or AdamOptimizerConfig()
            ),
        )
        line.model_id = create_model(runtime, request, self.deadline_at)
        load = LoadWeightsRequest(
            path=asked.path, optimizer=asked.optimizer, weights_access_token=asked.weights_access_token
        )
        call = OrderedCall(line, "load_weights", load, LoadWeightsResponse, self.deadline_at)
        line.submit_first(call).result()

    def _weights_info(self, runtime: ClientRuntime) -> WeightsInfoResponse:
        """Return the description of the checkpoint, requested with the key that may read it."""
        body = {"tinker_path": self.request.path}
        deadline_at = min(self.deadline_at, runtime.clock.now() + REST_S)
        with reading(runtime, self.request.weights_access_token) as reader:
            info: WeightsInfoResponse = reader.server.call("get_weights_info", body, deadline_at=deadline_at)
            return info


def _adapter_of(info: WeightsInfoResponse) -> LoraConfig | None:
    """Return the settings of a checkpoint's adapter; None for a checkpoint of all weights without a rank."""
    if info.lora_rank is None and not info.is_lora:
        return None
    flags = {
        name: True if getattr(info, name) is None else getattr(info, name)
        for name in ("train_unembed", "train_mlp", "train_attn")
    }
    # Some servers do not tell the rank of an adapter; 32 is the default of all.
    return LoraConfig(rank=32 if info.lora_rank is None else info.lora_rank, **flags)


@contextmanager
def reading(runtime: ClientRuntime, token: str | None) -> Iterator[ClientRuntime]:
    """Yield a runtime that may read a checkpoint: one with `token` as its key, or else `runtime`."""
    if token is None:
        yield runtime
        return
    foreign = ClientRuntime(evolve(runtime.settings, api_key=Secret(token)), clock=runtime.clock)
    for secret in runtime.connection.secrets():  # the same server has received these too, and may repeat them
        foreign.connection.keys.keep(secret)
    try:
        yield foreign
    finally:
        foreign.close("success")


def refuse_unsendable(request: Any) -> None:
    """Check that a request has a JSON form, so that the user's call raises the error and not a worker.

    Raises:
        InvalidInputError: a value in the request has no JSON form.
    """
    wire_json.encode(request)


def create_model(runtime: ClientRuntime, asked: CreateModelRequest, deadline_at: float) -> str:
    """Make a new model, and return its id. Blocks."""
    request = asked.model_copy(update={"session_id": runtime.server.open_session(deadline_at)})
    dialect = runtime.server.ready().facts.dialect
    request = fit(request, dialect)
    runtime.server.published.check_fields("create_model", request, dialect)
    runtime.server.warn_of_unlisted(request.base_model)
    _, made = promised(runtime, "create_model", request, CreateModelResponse, deadline_at)
    if not made.model_id:
        raise APIResponseValidationError("create_model: the result names no model")
    runtime.lifecycle.notify(ModelNamed(model=made.model_id, base_model=request.base_model))
    return made.model_id


def promised(
    runtime: ClientRuntime, name: str, request: Any, kind: type[T], deadline_at: float
) -> tuple[UntypedAPIFuture, T]:
    """Make a call that is answered with a promise. Return the promise and its result. Blocks."""
    began_at = runtime.clock.now()
    promise: UntypedAPIFuture = runtime.server.call(
        name, request, pause_billing=False, deadline_at=deadline_at
    )
    future: APIFuture[T] = runtime.lifecycle.make_future()
    fetch = partial(
        runtime.server.ready().polls.fetch,
        Promise(
            promise.request_id, ENDPOINTS[name].promises or name, roundtrip_s=runtime.clock.now() - began_at
        ),
        future,
        lambda _, tree: wire_json.from_plain(tree, kind),
        deadline_at=deadline_at,
    )
    runtime.pools.enter.run_call(fetch)
    return promise, future.result()


# -------------------------------------------------------------------------------------------- losses


_lock = threading.Lock()
# The keys of each session's losses. The server keeps a loss until the session ends, so `create` refuses to
# create the same loss twice.
_made: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()  # guarded by _lock


def create_loss(
    runtime: ClientRuntime, fn: Callable[..., Any], input_ranks: Mapping[str, int], deadline_at: float
) -> APIFuture[LossHandle]:
    """Trace a loss, and return the future of its handle.

    If the server computes losses, the future ends when the loss is stored there.
    `ServiceClient.create_custom_loss` documents the arguments and the errors.
    """
    from tinker_sync.losses.create import encode_graph, trace

    machinery = runtime.server.ready(deadline_at)
    handle = trace(fn, input_ranks, runtime.server.open_session(deadline_at))
    on_server = machinery.facts.config.custom_loss_server_side
    graph = encode_graph(handle.name, handle.graph) if on_server else None
    _remember(runtime, handle)
    future: APIFuture[LossHandle] = runtime.lifecycle.make_future()
    if graph is None:
        future.resolve(handle)
        return future
    future._before_end = partial(_forget_failed, weakref.ref(runtime), handle.key)
    try:
        request = CreateCustomLossRequest(
            session_id=handle.session_id,
            # Taken here, before the first attempt, because a retry must send the same request.
            custom_loss_seq_id=runtime.server.session.next_custom_loss_seq_id(),
            name=handle.name,
            inputs=list(handle.inputs),
            graph=graph,
        )
        request = fit(request, machinery.facts.dialect)
        runtime.pools.loss.run_call(carried(partial(_store, runtime, request, handle, future, deadline_at)))
    except BaseException as failure:
        future.fail(failure)
        raise
    return future


def _remember(runtime: ClientRuntime, handle: LossHandle) -> None:
    key = handle.key
    with _lock:
        made = _made.setdefault(runtime, set())
        known = key in made
        made.add(key)
    if known:
        raise InvalidInputError(
            f"create_custom_loss: the session already has {handle.name} with these inputs; "
            "keep its handle and use it again"
        )


def _forget_failed(runtime_ref: weakref.ref[ClientRuntime], key: str, succeeded: bool) -> None:
    """Forget the key of a loss whose creation failed, so that `create` accepts the same loss again."""
    runtime = runtime_ref()
    if runtime is not None and not succeeded:
        with _lock:
            _made.get(runtime, set()).discard(key)


def _store(
    runtime: ClientRuntime,
    request: CreateCustomLossRequest,
    handle: LossHandle,
    future: APIFuture[LossHandle],
    deadline_at: float,
) -> None:
    """Send the request, and poll for its result. Runs on a worker for losses."""
    if not future._begin():
        return
    future._mark_sending()
    began_at = runtime.clock.now()
    try:
        promise = runtime.server.call("create_custom_loss", request, deadline_at=deadline_at)
        future._mark_accepted(promise.request_id)
        runtime.server.ready().polls.fetch(
            Promise(
                promise.request_id,
                ENDPOINTS["create_custom_loss"].promises or "create_custom_loss",
                roundtrip_s=runtime.clock.now() - began_at,
            ),
            future,
            lambda _, tree: evolve(
                handle, loss_id=wire_json.from_plain(tree, CreateCustomLossResponse).loss_id
            ),
            deadline_at=deadline_at,
        )
    except BaseException as failure:  # noqa: BLE001  # the future must end in any case
        future.fail(failure)
