"""Calls that train a model: passes and optimizer steps."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import attrs

from tinker_sync.local.engine.training import AdamSettings
from tinker_sync.local.server import convert, custom_losses
from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.lanes import Step
from tinker_sync.local.server.problems import Refused, UserFault
from tinker_sync.local.server.recorded import STABLE_REINFORCE
from tinker_sync.types.future import UntypedAPIFuture
from tinker_sync.types.optim import AdamParams, OptimStepRequest, OptimStepResponse
from tinker_sync.types.training import ForwardBackwardRequest, ForwardRequest
from tinker_sync.wire.proto.outputs import encode_forward_backward_output
from tinker_sync.wire.proto.requests import decode_forward_backward_request

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_sync.local.engine.training import AdapterTrainer
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.lanes import Work
    from tinker_sync.local.server.service import LiveModel, Service
    from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardOutput

calls = Calls()
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
        service.store.touch_run(model.run_id)
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
        return await service.computed(
            service.host.train(
                model.run_id, lambda run: compute(service, run, model, given, backward=backward)
            )
        )

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
    data = convert.examples(given.data)
    if given.loss_fn == STABLE_REINFORCE:
        data = [
            service.recorded.complete(datum, example, f"data[{index}]")
            for index, (datum, example) in enumerate(zip(given.data, data, strict=True))
        ]
    if given.loss_fn == "custom":
        output = custom_losses.compute(service, run, model, given, data, backward=backward)
    else:
        one_pass = run.forward_backward if backward else run.forward
        # The loss refuses texts among its settings, by name.
        config: Any = given.loss_fn_config
        output = one_pass(data, given.loss_fn, config)
    tokens = sum(len(example.tokens) for example in data)
    service.store.record_usage(model.session_id, model.run_id, model.base.name, "training", tokens)
    return convert.loss_output(output)


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
        settings = AdamSettings(
            **{field.name: getattr(params, field.name) for field in attrs.fields(AdamSettings)}
        )
        norm = await service.computed(service.host.train(model.run_id, lambda run: run.optim_step(settings)))
        if norm == 0:
            logger.info(
                "optim_step %s of model %s has no gradients: no forward_backward since the last step, or "
                "all of its weights or advantages were 0",
                request.seq_id,
                model.run_id,
            )
        return OptimStepResponse(metrics={"grad_norm": norm, "learning_rate": settings.learning_rate})

    return submit(service, ask, "OptimStep", model, request.seq_id, work)
