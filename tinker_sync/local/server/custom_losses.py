"""Custom losses: computations that a client uploads for a session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from tinker_sync.local.engine.custom_graph import compile_custom_loss
from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import UserFault
from tinker_sync.types.custom_loss import CreateCustomLossRequest, CreateCustomLossResponse
from tinker_sync.types.future import UntypedAPIFuture

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinker_sync.local.engine.losses import Example
    from tinker_sync.local.engine.training import AdapterTrainer, LossOutput
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import LiveModel, Service
    from tinker_sync.types.training import ForwardBackwardInput

calls = Calls()


@attrs.frozen(eq=False)
class CustomLoss:
    """An uploaded loss. `rule(run, data, *, backward)` computes a pass, on the training thread."""

    loss_id: str
    session_id: str
    rule: Callable[..., LossOutput]


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


def compute(
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
    loss: CustomLoss | None = service.losses.get(loss_id)
    if loss is None or loss.session_id != model.session_id:
        raise UserFault(f"loss_fn_config.loss_id: this session has no loss {loss_id!r}")
    return loss.rule(run, data, backward=backward)
