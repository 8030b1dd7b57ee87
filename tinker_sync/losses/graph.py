"""A traced loss as plain data, node for node; the server decides what of it it computes. Needs torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinker_sync.errors import InvalidInputError
from tinker_sync.types.custom_loss import CustomLossGraph, CustomLossNode

if TYPE_CHECKING:
    import torch.fx


def encode_graph(name: str, graph: torch.fx.GraphModule) -> CustomLossGraph:
    """The graph of a loss of this name.

    Raises:
        InvalidInputError: an argument in it cannot be written down.
    """
    return CustomLossGraph(nodes=[_node(name, node) for node in graph.graph.nodes])


def _node(name: str, node: Any) -> CustomLossNode:
    return CustomLossNode(
        op=node.op,
        name=node.name,
        target=_target(node),
        args=[_argument(name, node, each) for each in node.args],
        kwargs={key: _argument(name, node, each) for key, each in node.kwargs.items()},
    )


def _target(node: Any) -> str:
    if node.op != "call_function":
        return str(node.target)
    # The names that servers know are those torch itself gives to functions in generated code.
    from torch.fx.node import _get_qualified_name

    target: str = _get_qualified_name(node.target)
    # Python keeps its operators in a private module.
    return target.removeprefix("_") if target.startswith("_operator.") else target


def _argument(name: str, node: Any, value: Any) -> Any:
    import torch.fx

    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.fx.Node):
        return {"ref": value.name}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, slice):
        return {"slice": [_argument(name, node, each) for each in (value.start, value.stop, value.step)]}
    if isinstance(value, (list, tuple)):
        each_encoded = [_argument(name, node, each) for each in value]
        return {"tuple": each_encoded} if isinstance(value, tuple) else each_encoded
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _argument(name, node, each) for key, each in value.items()}}
    kinds = {
        torch.dtype: "dtype",
        torch.device: "device",
        torch.layout: "layout",
        torch.memory_format: "memory_format",
    }
    if type(value) in kinds:
        return {kinds[type(value)]: str(value).removeprefix("torch.")}
    raise InvalidInputError(
        f"create_custom_loss: {name} gives a {type(value).__name__} to {node.target}, which no server "
        "could be told; give numbers, text, tensors, and lists of them"
    )
