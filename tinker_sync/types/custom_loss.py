"""Custom losses: the traced computation as plain data, and the request that stores it on the server."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import attrs

from tinker_sync.types._model import Model, model
from tinker_sync.types.scalars import CustomLossInputRank

CustomLossNodeOp: TypeAlias = Literal[
    "placeholder", "get_attr", "call_function", "call_method", "call_module", "output"
]
"""The operation of a node in a traced loss."""


@model
class CustomLossInput(Model):
    """One input of a custom loss, and its number of dimensions.

    Attributes:
        name: "logprobs", or a name in the datums' `loss_fn_inputs`.

    >>> CustomLossInput(name="logprobs", rank=1).rank
    1
    """

    name: str
    rank: CustomLossInputRank


@model
class CustomLossNode(Model):
    """One step in the computation of a custom loss.

    Attributes:
        name: the name by which later nodes refer to its value.
        target: the function (``torch.exp``), the method or the parameter.
        args: the arguments in order. A value that JSON does not have is an object with one key:
            ``{"ref": name}`` for another node's value, ``{"tuple": [...]}``, ``{"dict": {...}}``,
            ``{"slice": [start, stop, step]}``, ``{"ellipsis": true}``, ``{"float": "inf"}``,
            ``{"dtype": "float32"}`` and the like.
        kwargs: the arguments by name, in the same form.

    >>> CustomLossNode(op="call_function", name="exp", target="torch.exp", args=[{"ref": "logprobs"}]).kwargs
    {}
    """

    op: CustomLossNodeOp
    name: str
    target: str
    args: list[Any] = attrs.field(factory=list)
    kwargs: dict[str, Any] = attrs.field(factory=dict)


@model
class CustomLossGraph(Model):
    """The computation of a custom loss, as a list of steps. The server accepts only certain operations.

    >>> node = CustomLossNode(op="output", name="output", target="output", args=[{"ref": "loss"}])
    >>> CustomLossGraph(nodes=[node]).format
    1
    """

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


@model
class CreateCustomLossRequest(Model):
    """A request to store a custom loss at the server.

    `custom_loss_seq_id` is the number of the loss among those of its session. The first input is "logprobs".
    """

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


@model
class CreateCustomLossResponse(Model):
    """The id of a stored custom loss, by which training passes name the loss."""

    __response__ = True

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
