"""The calls of `forward_backward_custom` and `forward_custom`, with a function or with a `LossHandle`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tinker_sync.errors import InvalidInputError
from tinker_sync.losses.evaluate import NumpyLossFn, TorchLossFn
from tinker_sync.losses.handle import LossHandle, check_data
from tinker_sync.losses.two_passes import TwoPassCall
from tinker_sync.runtime.training import PassCall, TrainingCall, TrainingLine
from tinker_sync.types.datum import Datum
from tinker_sync.types.training import ForwardBackwardInput, listed_data

if TYPE_CHECKING:
    from typing import TypeAlias

    from tinker_sync.runtime.client_runtime import ClientRuntime

CustomLossFn: TypeAlias = "NumpyLossFn | TorchLossFn | LossHandle"


def check_loss_type_input(given: Any) -> None:
    """Raise InvalidInputError if `loss_type_input` is neither None nor "logprobs", which mean the same."""
    if given not in (None, "logprobs"):
        raise InvalidInputError(f"loss_type_input: expected 'logprobs', got {given!r}")


def custom_call(line: TrainingLine, data: Sequence[Datum], loss_fn: Any, deadline_at: float) -> TrainingCall:
    """Return the call that `TrainingClient.forward_backward_custom` submits; see there for the errors."""
    data = listed_data(data)
    if isinstance(loss_fn, LossHandle):
        check_session(loss_fn, line.runtime)
        check_data(loss_fn, data)
        if loss_fn.loss_id is not None:
            whole = ForwardBackwardInput(data, "custom", {"loss_id": loss_fn.loss_id})
            return PassCall(line, "forward_backward", whole, deadline_at)
    return TwoPassCall(line, data, loss_fn, deadline_at)


def evaluation(line: TrainingLine, data: Sequence[Datum], loss_fn: Any, deadline_at: float) -> TrainingCall:
    """Return the call that `TrainingClient.forward_custom` submits; this process computes the loss."""
    data = listed_data(data)
    if isinstance(loss_fn, LossHandle):
        check_session(loss_fn, line.runtime)
        check_data(loss_fn, data)
    return TwoPassCall(line, data, loss_fn, deadline_at, train=False)


def check_session(handle: LossHandle, runtime: ClientRuntime) -> None:
    """Raise InvalidInputError for a handle of another session: in this one its id may name another loss."""
    if handle.session_id != runtime.server.known_session_id:
        raise InvalidInputError(
            f"the loss {handle.name} was made in session {handle.session_id}, not in "
            f"{runtime.server.known_session_id}; create it again with create_custom_loss of the "
            "ServiceClient that created this training client"
        )
