"""Making models, new or from checkpoints: the one path behind all methods that do."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from attrs import evolve, field, frozen

from tinker_sync._observe import ModelNamed
from tinker_sync._secret import Secret
from tinker_sync.clients import _deadlines
from tinker_sync.runtime.core import Core
from tinker_sync.runtime.fetcher import Promise
from tinker_sync.runtime.futures import APIFuture
from tinker_sync.types import (
    AdamOptimizerConfig,
    CreateModelRequest,
    CreateModelResponse,
    LoadWeightsRequest,
    LoadWeightsResponse,
    LoraConfig,
    OptimizerConfig,
    WeightsInfoResponse,
)
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import refuse_unsupported
from tinker_sync.wire.endpoints import ENDPOINTS

if TYPE_CHECKING:
    from tinker_sync.clients.training import TrainingClient

T = TypeVar("T")


@frozen
class Checkpoint:
    """What to load, and how."""

    path: str
    with_optimizer: bool
    base_model: str | None
    user_metadata: dict[str, Any] | None
    access_token: str | None = field(repr=False)
    optimizer: OptimizerConfig | None


def create_model(
    core: Core,
    base_model: str,
    lora: LoraConfig,
    user_metadata: dict[str, Any] | None,
    optimizer: OptimizerConfig,
    deadline_at: float,
) -> TrainingClient:
    """A new model. Its number is drawn before the request, which may so be repeated."""
    from tinker_sync.clients.training import TrainingClient

    session_id = core.session_id(deadline_at)
    model_seq_id = core.session.next_model_seq_id()
    request = CreateModelRequest(
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=base_model,
        user_metadata=user_metadata,
        lora_config=lora,
        optimizer_config=optimizer,
    )
    refuse_unsupported(request, core.dialect)
    made: CreateModelResponse = promised(core, "create_model", request, CreateModelResponse, deadline_at)
    core.tell(ModelNamed(model=made.model_id, base_model=base_model))
    return TrainingClient(core, model_seq_id, made.model_id)


def load_model(core: Core, checkpoint: Checkpoint, deadline_at: float) -> TrainingClient:
    """A new model with a checkpoint's weights: in one request where the server offers that, else in three."""
    if core.ready(deadline_at).facts.config.create_model_via_load_weights:
        return _load_at_once(core, checkpoint, deadline_at)
    info = weights_info(core, checkpoint, deadline_at)
    flags = {
        name: True if getattr(info, name) is None else getattr(info, name)
        for name in ("train_unembed", "train_mlp", "train_attn")
    }
    client = create_model(
        core,
        checkpoint.base_model or info.base_model,
        LoraConfig(rank=info.lora_rank if info.lora_rank is not None else 32, **flags),
        checkpoint.user_metadata,
        info.optimizer_config if checkpoint.with_optimizer else checkpoint.optimizer or AdamOptimizerConfig(),
        deadline_at,
    )
    left_s = max(deadline_at - core.clock.now(), 0.0)
    client.load_first(
        checkpoint.path, checkpoint.access_token, optimizer=checkpoint.with_optimizer, deadline=left_s
    )
    return client


def _load_at_once(core: Core, checkpoint: Checkpoint, deadline_at: float) -> TrainingClient:
    from tinker_sync.clients.training import TrainingClient

    session_id = core.session_id(deadline_at)
    model_seq_id = core.session.next_model_seq_id()
    request = LoadWeightsRequest(
        session_id=session_id,
        model_seq_id=model_seq_id,
        base_model=checkpoint.base_model,
        user_metadata=checkpoint.user_metadata,
        path=checkpoint.path,
        optimizer=checkpoint.with_optimizer,
        optimizer_config=None if checkpoint.with_optimizer else checkpoint.optimizer,
        weights_access_token=checkpoint.access_token,
    )
    promised(core, "load_weights", request, LoadWeightsResponse, deadline_at)
    model_id = f"{session_id}:train:{model_seq_id}"
    core.tell(ModelNamed(model=model_id, base_model=checkpoint.base_model))
    return TrainingClient(core, model_seq_id, model_id)


def weights_info(core: Core, checkpoint: Checkpoint, deadline_at: float) -> WeightsInfoResponse:
    """What a checkpoint holds, asked under the key that may read it."""
    body = {"tinker_path": checkpoint.path}
    limit_s = min(max(deadline_at - core.clock.now(), 0.0), _deadlines.REST_S)
    info: WeightsInfoResponse
    if checkpoint.access_token is None:
        info = core.call("get_weights_info", body, deadline_s=limit_s)
        return info
    settings = evolve(core.settings, api_key=Secret(checkpoint.access_token))
    foreign = Core(settings, clock=core.clock)
    for secret in core.secrets():  # the same server has heard these too, and may repeat them
        foreign.keys.keep(secret)
    try:
        info = foreign.call("get_weights_info", body, deadline_s=limit_s)
        return info
    finally:
        foreign.close("success")


def promised(core: Core, name: str, request: Any, kind: type[T], deadline_at: float) -> T:
    """Make a call that answers with a promise, and wait for what it turns into."""
    future: APIFuture[T] = core.future()
    began_at = core.clock.now()
    promise = core.call(name, request, pause_billing=False, deadline_s=max(deadline_at - began_at, 0.0))
    fetch = partial(
        core.machinery.fetcher.fetch,
        Promise(
            promise.request_id,
            ENDPOINTS[name].promises or name,
            roundtrip_s=core.clock.now() - began_at,
        ),
        future,
        lambda _, tree: wire_json.from_plain(tree, kind),
        deadline_at=deadline_at,
    )
    core.enter(fetch)
    return future.result()
