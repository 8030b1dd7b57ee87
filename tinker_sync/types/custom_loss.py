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
    """One input of a loss and its number of dimensions.

    Attributes:
        name: "logprobs", or a name in the datums' `loss_fn_inputs`.

    >>> CustomLossInput(name="logprobs", rank=1).rank
    1
    """

    name: str
    rank: CustomLossInputRank


@model
class CustomLossNode(Model):
    """One step of the computation.

    Attributes:
        name: the name by which later nodes refer to its value.
        target: the function (``torch.exp``), the method or the parameter.
        args: plain JSON values, or objects with one key for the rest: ``{"ref": name}`` for another
            node's value, ``{"tuple": [...]}``, ``{"dict": {...}}``, ``{"slice": [start, stop, step]}``,
            ``{"ellipsis": true}``, ``{"float": "inf"}``, ``{"dtype": "float32"}`` and the like.
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
    """A traced loss: its steps in order. The server rebuilds it from operations that it allows.

    >>> node = CustomLossNode(op="output", name="output", target="output", args=[{"ref": "loss"}])
    >>> CustomLossGraph(nodes=[node]).format
    1
    """

    format: Literal[1] = 1
    nodes: list[CustomLossNode]


@model
class CreateCustomLossRequest(Model):
    """A request to store a loss; `custom_loss_seq_id` counts from 0, `inputs` begin with "logprobs"."""

    session_id: str
    custom_loss_seq_id: int
    name: str
    inputs: list[CustomLossInput]
    graph: CustomLossGraph
    type: Literal["create_custom_loss"] = "create_custom_loss"


@model
class CreateCustomLossResponse(Model):
    """The id by which passes use the loss."""

    __response__ = True

    loss_id: str
    type: Literal["create_custom_loss"] = "create_custom_loss"
