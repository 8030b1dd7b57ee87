"""Calls that make, describe and drop models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.lanes import Step
from tinker_sync.local.server.problems import Refused, UserFault
from tinker_sync.local.server.service import LiveModel
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.model import (
    CreateModelRequest,
    CreateModelResponse,
    GetInfoRequest,
    GetInfoResponse,
    LoraConfig,
    ModelData,
    UnloadModelRequest,
    UnloadModelResponse,
)
from tinker_sync.types.optim import AdamOptimizerConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import Service
    from tinker_sync.types.optim import OptimizerConfigBase

calls = Calls()


@calls.of("create_model")
async def create_model(service: Service, ask: Ask) -> Any:
    """Make a model: a new adapter for a base model."""
    request = ask.read(CreateModelRequest)
    await service.session(request.session_id)
    base = service.base_model(request.base_model)
    check_optimizer(request.optimizer_config)
    model_id = f"{request.session_id}:train:{request.model_seq_id}"
    settings = lora_settings(service, request.lora_config, model_id)

    async def work() -> Any:
        return CreateModelResponse(model_id=model_id)

    request_id = start_model(
        service,
        ask,
        kind="CreateModel",
        session_id=request.session_id,
        model_seq_id=request.model_seq_id,
        base_model=base.name,
        settings=settings,
        user_metadata=request.user_metadata,
        then=work,
    )
    return UntypedAPIFuture(request_id=request_id, model_id=model_id)


def check_optimizer(config: OptimizerConfigBase | None) -> None:
    """Raise `UserFault` for an optimizer that this server does not compute."""
    if config is not None and not isinstance(config, AdamOptimizerConfig):
        raise UserFault(f"optimizer {config.type!r} is not computed by this server; it has adamw")


def lora_settings(service: Service, config: LoraConfig | None, model_id: str) -> LoraSettings:
    """Return the settings of an adapter in the form of the engine. The server draws a missing seed.

    Raises:
        UserFault: the settings are not valid, the rank is too large, or the request is for no adapter.
    """
    if config is None or config.rank == 0:
        got = "rank: 0" if config is not None else "lora_config: none"
        raise UserFault(
            f"{got} asks to train all weights of the model, but this server trains LoRA adapters only; "
            "give a rank of 1 or more"
        )
    if config.rank > service.flags.max_rank:
        raise UserFault(f"rank: at most {service.flags.max_rank}, got {config.rank}")
    try:
        return LoraSettings(
            rank=config.rank,
            seed=service.chance("lora", model_id) if config.seed is None else abs(config.seed),
            train_attn=config.train_attn,
            train_mlp=config.train_mlp,
            train_unembed=config.train_unembed,
        )
    except ValueError as problem:
        raise UserFault(str(problem)) from None


def start_model(
    service: Service,
    ask: Ask,
    *,
    kind: str,
    session_id: str,
    model_seq_id: int,
    base_model: str,
    settings: LoraSettings,
    user_metadata: dict[str, Any] | None,
    then: Callable[[], Awaitable[Any]],
) -> str:
    """Begin to make a model, and run `then` when the model is in memory.

    Returns:
        The id of the promise, which the result of `then` settles; for a repeated request, the id of the first
        one's promise.

    Raises:
        Refused: `model_seq_id` was used for another request.
        UserFault: the base model is not offered.
    """
    model_id = f"{session_id}:train:{model_seq_id}"
    known = known_request(service, ask, model_id)
    if known is not None:
        return known
    check_free(service, model_id)
    model = LiveModel(model_id, session_id, service.base_model(base_model), settings, service.make_lane())
    promise = service.promises.open(kind, session_id)
    service.numbered.add(("model", model_id), ask.digest, promise.request_id)
    service.models[model_id] = model

    async def work() -> Any:
        try:
            await service.on_disk(
                service.store.add_run,
                model_id,
                session_id=session_id,
                model_seq_id=model_seq_id,
                base_model=base_model,
                lora=settings,
                user_metadata=user_metadata,
            )
            await service.computed(service.host.create(model_id, base_model, settings))
            return await then()
        except BaseException:
            service.drop_model(model)  # it was not made, or its weights were not loaded
            raise

    model.lane.add(None, b"", Step(promise, work))
    return promise.request_id


def known_request(service: Service, ask: Ask, model_id: str) -> str | None:
    """Return the id of the promise that the same request for a model got before, or None for a new request.

    Raises:
        Refused: the number of the model was used for another request.
    """
    known: str | None = service.numbered.get(("model", model_id), ask.digest)
    return known


def check_free(service: Service, model_id: str) -> None:
    """Raise `Refused` if a model in memory has this id."""
    if model_id in service.models:
        raise Refused(409, f"there is a model {model_id} already; use another model_seq_id")


@calls.of("get_info")
async def get_info(service: Service, ask: Ask) -> Any:
    """Return the base model, the tokenizer and the rank of a model, from memory or else from the store."""
    request = ask.read(GetInfoRequest)
    live = service.models.get(request.model_id)
    rank: int | None
    if live is not None:  # a new model may not be in the store yet
        name, rank = live.base.name, live.lora.rank
    else:
        row = await service.on_disk(service.store.run, request.model_id)
        name, rank = row.base_model, row.lora_rank
    base = service.host.models.get(name)
    return GetInfoResponse(
        type="get_info",
        model_data=ModelData(
            arch=None if base is None else base.arch,
            model_name=name,
            tokenizer_id=name if base is None else base.tokenizer_id,
        ),
        model_id=request.model_id,
        is_lora=True,
        lora_rank=rank,
        model_name=name,
    )


@calls.of("unload_model")
async def unload_model(service: Service, ask: Ask) -> Any:
    """Drop a model from memory once its requests whose turn has come are carried out.

    Requests of the model that then wait for a missing sequence number fail. Its checkpoints stay.
    """
    request = ask.read(UnloadModelRequest)
    model = service.model(request.model_id)
    promise = service.promises.open("UnloadModel", model.session_id)

    async def work() -> Any:
        await service.computed(service.drop_model(model))
        return UnloadModelResponse(model_id=model.run_id, type="unload_model")

    model.lane.add(None, b"", Step(promise, work))
    return UntypedAPIFuture(request_id=promise.request_id, model_id=model.run_id)
