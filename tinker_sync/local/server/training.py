"""Calls that make and drop models, and that train them: passes, optimizer steps, and losses that clients
upload."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tinker_sync.local.engine.custom_graph import compile_custom_loss
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.engine.losses import Example, Listed
from tinker_sync.local.server.calls import Calls, Refused, UserFault
from tinker_sync.local.server.lanes import Step
from tinker_sync.local.server.state import STABLE_REINFORCE, CustomLoss, LiveModel
from tinker_sync.types.custom_loss import CreateCustomLossRequest, CreateCustomLossResponse
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
from tinker_sync.types.model_input import EncodedTextChunk
from tinker_sync.types.optim import AdamOptimizerConfig, AdamParams, OptimStepRequest, OptimStepResponse
from tinker_sync.types.tensor_data import TensorData, expand
from tinker_sync.types.training import ForwardBackwardOutput, ForwardBackwardRequest, ForwardRequest
from tinker_sync.wire.proto.outputs import encode_forward_backward_output
from tinker_sync.wire.proto.requests import decode_forward_backward_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from tinker_sync.local.engine.losses import Input
    from tinker_sync.local.engine.safetensors import Array
    from tinker_sync.local.engine.training import AdapterTrainer, LossOutput
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.lanes import Work
    from tinker_sync.local.server.state import Service
    from tinker_sync.types.datum import Datum
    from tinker_sync.types.model_input import ModelInput
    from tinker_sync.types.optim import OptimizerConfigBase
    from tinker_sync.types.training import ForwardBackwardInput

calls = Calls()


# ---------------------------------------------------------------------------------------------------- models


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
    base, seen = service.base_model(base_model), service.moment()
    model = LiveModel(model_id, session_id, base, settings, service.make_lane(), seen)
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


# ------------------------------------------------------------------------------------------------ conversion


_OUTPUT_TYPE: Final = "ArrayRecord"


def tokens_of(prompt: ModelInput, where: str) -> Array:
    """Return the token ids of an input; `where` names the input in messages.

    Raises:
        UserFault: the input has a chunk that is not text.
    """
    parts = []
    for index, chunk in enumerate(prompt.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            raise UserFault(
                f"{where}.chunks[{index}]: is of type {chunk.type}; the models of this server read text only"
            )
        parts.append(chunk.as_int32())
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)


def examples(data: Sequence[Datum]) -> list[Example]:
    """Return training data in the form of the engine. Raises `UserFault` for a chunk that is not text."""
    return [
        Example(
            tokens_of(datum.model_input, f"data[{index}].model_input"),
            {name: _input(tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for index, datum in enumerate(data)
    ]


def _input(tensor: TensorData) -> Input:
    if tensor._crow is None or tensor._col is None or tensor.shape is None:
        return tensor._numpy
    listed = expand(np.ones(len(tensor._col), bool), tensor.shape, tensor._crow, tensor._col, np.array(False))
    return Listed(tensor.to_numpy(), listed)


def loss_output(output: LossOutput) -> ForwardBackwardOutput:
    """Return the output of a pass in the form of the protocol."""
    records = [{"logprobs": TensorData._of(logprobs)} for logprobs in output.logprobs]
    return ForwardBackwardOutput(_OUTPUT_TYPE, records, dict(output.metrics))


# ------------------------------------------------------------------------------------------ passes and steps


logger = logging.getLogger("tinker_sync.local")

LARGE_BYTES = 256 * 1024
"""The size from which bodies are decoded on another thread."""


def submit(
    service: Service,
    ask: Ask,
    kind: str,
    model: LiveModel,
    seq_id: int | None,
    work: Work,
    to_protobuf: Callable[[Any], bytes] | None = None,
) -> UntypedAPIFuture:
    """Add a request to the lane (the queue) of its model, and return its promise.

    A repeated request with a sequence number gets the promise of the first one.

    Raises:
        Refused: `seq_id` was used for another request, or was skipped because it had not arrived.
    """
    request_id = model.lane.known(seq_id, ask.digest)
    if request_id is None:
        promise = service.promises.open(kind, model.session_id)
        model.lane.add(seq_id, ask.digest, Step(promise, work, to_protobuf))
        model.seen = service.moment()
        request_id = promise.request_id
    return UntypedAPIFuture(request_id=request_id, model_id=model.run_id)


@calls.of("forward_backward")
async def forward_backward(service: Service, ask: Ask) -> Any:
    """Run a pass over data, with gradients unless the request turns them off."""
    if ask.sends_protobuf:
        if service.flags.json_only:
            raise Refused(
                422,
                [
                    {
                        "type": "model_attributes_type",
                        "loc": ["body"],
                        "msg": "Input should be a valid dictionary or object to extract fields from",
                        "input": ask.body[:80].decode("utf-8", "replace"),
                    }
                ],
            )
        request, forward_only = await _read(
            service, ask, lambda body: decode_forward_backward_request(body, ask.ignored)
        )
    else:
        request = await _read(service, ask, lambda _: ask.read(ForwardBackwardRequest))
        forward_only = False
    return _pass(service, ask, request.forward_backward_input, request, backward=not forward_only)


@calls.of("forward")
async def forward(service: Service, ask: Ask) -> Any:
    """Run a pass without gradients, for older clients, which have a separate call for it."""
    request = await _read(service, ask, lambda _: ask.read(ForwardRequest))
    return _pass(service, ask, request.forward_input, request, backward=False)


async def _read(service: Service, ask: Ask, decode: Callable[[bytes], Any]) -> Any:
    if len(ask.body) < LARGE_BYTES:
        return decode(ask.body)
    return await service.on_disk(decode, ask.body)


def _pass(
    service: Service,
    ask: Ask,
    given: ForwardBackwardInput,
    request: ForwardBackwardRequest | ForwardRequest,
    *,
    backward: bool,
) -> Any:
    model = service.model(request.model_id)
    kind = "ForwardBackward" if backward else "Forward"

    async def work() -> Any:
        output = await service.computed(
            service.host.train(
                model.run_id, lambda run: compute(service, run, model, given, backward=backward)
            )
        )
        tokens = sum(datum.model_input.length for datum in given.data)
        service.count_usage(model.session_id, model.base.name, "training", tokens)
        return output

    return submit(service, ask, kind, model, request.seq_id, work, _to_protobuf)


def compute(
    service: Service, run: AdapterTrainer, model: LiveModel, given: ForwardBackwardInput, *, backward: bool
) -> ForwardBackwardOutput:
    """Compute a pass, and record its tokens as usage. This function runs on the training thread.

    Raises:
        ValueError: an input is wrong; the gradients stay unchanged.
    """
    if not given.data:
        raise UserFault("data: is empty; give at least one datum")
    data = examples(given.data)
    if given.loss_fn == STABLE_REINFORCE:
        data = [
            service.recorded.complete(datum, example, f"data[{index}]")
            for index, (datum, example) in enumerate(zip(given.data, data, strict=True))
        ]
    if given.loss_fn == "custom":
        output = compute_custom(service, run, model, given, data, backward=backward)
    else:
        one_pass = run.forward_backward if backward else run.forward
        # The loss refuses texts among its settings, by name.
        config: Any = given.loss_fn_config
        output = one_pass(data, given.loss_fn, config)
    return loss_output(output)


def _to_protobuf(output: ForwardBackwardOutput) -> bytes:
    return encode_forward_backward_output(output).join()


@calls.of("optim_step")
async def optim_step(service: Service, ask: Ask) -> Any:
    """Change the adapter of a model by one step of AdamW."""
    request = ask.read(OptimStepRequest)
    model = service.model(request.model_id)

    async def work() -> Any:
        params = request.optim_params
        if not isinstance(params, AdamParams):
            raise UserFault(f"optimizer {params.type!r} is not computed by this server; it has adamw")
        norm = await service.computed(service.host.train(model.run_id, lambda run: run.optim_step(params)))
        if norm == 0:
            logger.info(
                "optim_step %s of model %s has no gradients: no forward_backward since the last step, or "
                "all of its weights or advantages were 0",
                request.seq_id,
                model.run_id,
            )
        return OptimStepResponse(metrics={"grad_norm": norm, "learning_rate": params.learning_rate})

    return submit(service, ask, "OptimStep", model, request.seq_id, work)


# --------------------------------------------------------------------------------------------- custom losses


@calls.of("create_custom_loss")
async def create_custom_loss(service: Service, ask: Ask) -> Any:
    """Compile an uploaded loss, and keep it in memory, for the models of its session."""
    request = ask.read(CreateCustomLossRequest)
    session = await service.session(request.session_id)
    number = "loss", request.session_id, request.custom_loss_seq_id
    request_id: str | None = service.numbered.get(number, ask.digest)
    if request_id is None:
        promise = service.promises.open("CreateCustomLoss", session.session_id)
        request_id = promise.request_id
        service.numbered.add(number, ask.digest, request_id)

        async def work() -> Any:
            rule = await service.on_disk(compile_custom_loss, request.inputs, request.graph)
            loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
            service.losses[loss_id] = CustomLoss(loss_id, request.session_id, rule)
            return CreateCustomLossResponse(loss_id=loss_id)

        service.spawn(service.keep(promise, work()))
    return UntypedAPIFuture(request_id=request_id)


def compute_custom(
    service: Service,
    run: AdapterTrainer,
    model: LiveModel,
    given: ForwardBackwardInput,
    data: list[Example],
    *,
    backward: bool,
) -> LossOutput:
    """Compute a pass with an uploaded loss. This function runs on the training thread.

    Raises:
        ValueError: the session of the model has no such loss, or the loss cannot be computed.
    """
    settings = dict(given.loss_fn_config or {})
    loss_id = settings.pop("loss_id", None)
    if settings or not isinstance(loss_id, str):
        raise UserFault("loss_fn_config: a custom loss takes loss_id, and nothing else")
    loss = service.losses.get(loss_id)
    if loss is None or loss.session_id != model.session_id:
        raise UserFault(f"loss_fn_config.loss_id: this session has no loss {loss_id!r}")
    return loss.rule(run, data, backward=backward)
