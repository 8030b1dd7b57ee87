"""`LossHandle`: a traced loss that the server or this process computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from tinker_sync.errors import InvalidInputError
from tinker_sync.types._model import AsDataclass
from tinker_sync.types._structured import refuse_all
from tinker_sync.types.custom_loss import CustomLossInput
from tinker_sync.types.datum import Datum

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch
    import torch.fx

PerDatumLossFn: TypeAlias = "Callable[..., tuple[torch.Tensor, Mapping[str, torch.Tensor]]]"
"""A loss of one datum. Takes `logprobs` and further `loss_fn_inputs` by name, as tensors. Returns a scalar
and scalar metrics named ``custom/<name>:sum`` or ``custom/<name>:mean``."""


@frozen
class LossHandle(AsDataclass):
    """A loss created by `ServiceClient.create_custom_loss`, for use in the same session. Immutable.

    Pass it as the loss to `forward_backward_custom`, `forward_backward` or `forward_custom` of a training
    client.

    Attributes:
        name: the name of the function.
        inputs: ``logprobs``, then the `loss_fn_inputs` of the function, in the order of its parameters.
        session_id: the session at the server in which the loss can be used.
        graph: the traced computation, which runs in place of the function.
        loss_id: the id of the loss on the server; None means that this process computes the loss.

    >>> LossHandle("nll", (CustomLossInput(name="logprobs", rank=1),), "session-1", graph=None).input_names
    ()
    """

    name: str
    inputs: tuple[CustomLossInput, ...]
    session_id: str
    graph: torch.fx.GraphModule = field(repr=False, eq=False)
    loss_id: str | None = None

    @property
    def key(self) -> str:
        """A digest of the computation and its inputs."""
        import hashlib  # loads OpenSSL

        digest = hashlib.sha256(self.graph.code.encode())
        digest.update(repr(self.inputs).encode())
        return digest.hexdigest()

    @property
    def input_names(self) -> tuple[str, ...]:
        """The `loss_fn_inputs` that the function reads, in the order of its parameters."""
        return tuple(each.name for each in self.inputs[1:])


def check_data(handle: LossHandle, data: Sequence[Datum]) -> None:
    """Check that data have the targets and the other inputs of a loss, each of the declared rank.

    Raises:
        InvalidInputError: an input is missing or has another rank; the text has a line for each problem.
    """
    wanted = [("target_tokens", handle.inputs[0]), *((each.name, each) for each in handle.inputs[1:])]
    problems = []
    for index, datum in enumerate(data):
        for key, declared in wanted:
            where = f"data[{index}].loss_fn_inputs[{key!r}]"
            tensor = datum.loss_fn_inputs.get(key)
            if tensor is None:
                problems.append(f"{where}: is missing; the loss {handle.name} takes it")
            elif len(tensor._effective_shape) != declared.rank:
                problems.append(
                    f"{where}: has rank {len(tensor._effective_shape)}, the loss {handle.name} was made for "
                    f"{declared.name} of rank {declared.rank}"
                )
    refuse_all(problems)


def run_on_each(
    handle: LossHandle, data: Sequence[Datum], logprobs: Sequence[Any]
) -> tuple[Any, dict[str, float]]:
    """Compute a loss on each datum. Return the sum of the losses, and the metrics.

    Metrics with a name that ends with ``:mean`` are averaged over the data, the others summed.

    Raises:
        InvalidInputError: the loss of a datum is not a scalar.
    """
    losses: list[Any] = []
    sums: dict[str, float] = {}
    for index, (datum, each) in enumerate(zip(data, logprobs, strict=True)):
        inputs = [datum.loss_fn_inputs[name].to_torch() for name in handle.input_names]
        loss, metrics = handle.graph(each, *inputs)
        if loss.ndim != 0:
            raise InvalidInputError(
                f"{handle.name} returned a loss of shape {tuple(loss.shape)} for data[{index}]; "
                "return a scalar, such as loss.sum()"
            )
        losses.append(loss)
        for key, value in metrics.items():
            sums[key] = sums.get(key, 0.0) + float(value.detach() if hasattr(value, "detach") else value)
    means = {key: value / len(data) if key.endswith(":mean") else value for key, value in sums.items()}
    return sum(losses[1:], losses[0]), means
