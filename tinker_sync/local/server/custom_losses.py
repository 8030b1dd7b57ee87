"""Custom losses: computations that a client uploads for a session. The server checks them and keeps them.

`tinker_sync.local.engine.custom_graph` computes them. At the upload, this module calls
`custom_graph.compile_custom_loss(inputs, graph)`, which raises `ValueError` for a loss that it does not
compute. The result is a rule: `rule(run, data, *, backward)` runs on the training thread and returns a
`LossOutput`.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from typing import TYPE_CHECKING, Any, Final

import attrs

from tinker_sync.local.server.calls import Calls
from tinker_sync.local.server.problems import UserFault
from tinker_sync.types.custom_loss import CreateCustomLossRequest, CreateCustomLossResponse
from tinker_sync.types.future import UntypedAPIFuture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tinker_sync.local.engine.loss_inputs import Example
    from tinker_sync.local.engine.training import AdapterTrainer, LossOutput
    from tinker_sync.local.server.calls import Ask
    from tinker_sync.local.server.service import LiveModel, Service
    from tinker_sync.types.custom_loss import CustomLossInput, CustomLossNode
    from tinker_sync.types.training import ForwardBackwardInput

calls = Calls()

COMPUTER: Final = "tinker_sync.local.engine.custom_graph"
MAX_INPUTS: Final = 16
MAX_NODES: Final = 10_000
_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
_ROOTS: Final = ("torch", "math", "operator", "_operator")
_FORBIDDEN_METHODS: Final = ("backward", "item", "numpy", "tolist")
_OPS: Final = ("placeholder", "call_function", "call_method", "output")
_MARKS: Final = frozenset(
    {"ref", "tuple", "dict", "slice", "ellipsis", "float", "dtype", "device", "layout", "memory_format"}
)


@attrs.frozen(eq=False)
class CustomLoss:
    """An uploaded loss that passed the checks. `rule` is None if the module `custom_graph` is missing."""

    loss_id: str
    session_id: str
    name: str
    inputs: tuple[CustomLossInput, ...]
    rule: Callable[..., LossOutput] | None


@calls.of("create_custom_loss")
async def create_custom_loss(service: Service, ask: Ask) -> Any:
    """Check an uploaded loss, compile it, and keep it in memory, for the models of its session."""
    request = ask.read(CreateCustomLossRequest)
    session = await service.session(request.session_id)
    number = "loss", request.session_id, request.custom_loss_seq_id
    request_id: str | None = service.numbered.get(number, ask.digest)
    if request_id is None:
        promise = service.promises.open("CreateCustomLoss", session.session_id)
        request_id = promise.request_id
        service.numbered.add(number, ask.digest, request_id)

        async def work() -> Any:
            check(request)
            rule = await service.on_disk(_rule, request)
            loss_id = f"{request.session_id}:loss:{request.custom_loss_seq_id}"
            service.losses[loss_id] = CustomLoss(
                loss_id, request.session_id, request.name, tuple(request.inputs), rule
            )
            return CreateCustomLossResponse(loss_id=loss_id)

        service.spawn(service.keep(promise, work()))
    return UntypedAPIFuture(request_id=request_id)


def _rule(request: CreateCustomLossRequest) -> Callable[..., LossOutput] | None:
    if importlib.util.find_spec(COMPUTER) is None:
        return None
    made: Callable[..., LossOutput] = importlib.import_module(COMPUTER).compile_custom_loss(
        request.inputs, request.graph
    )
    return made


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
    if loss.rule is None:
        raise UserFault(
            "loss_fn: this server keeps custom losses but does not compute them; "
            "without custom_loss_server_side among its settings clients compute them themselves"
        )
    return loss.rule(run, data, backward=backward)


# ------------------------------------------------------------------------------------------ checks


def check(request: CreateCustomLossRequest) -> None:
    """Check an uploaded loss.

    Raises:
        UserFault: the loss is not allowed; the text names the first problem.
    """
    _check_inputs(request.inputs)
    nodes = request.graph.nodes
    if len(nodes) > MAX_NODES:
        raise UserFault(f"graph: {len(nodes)} nodes, at most {MAX_NODES} are taken")
    known: set[str] = set()
    for index, node in enumerate(nodes):
        where = f"graph.nodes[{index}]"
        _check_node(node, where)
        for name in _references([node.args, node.kwargs], where):
            if name not in known:
                raise UserFault(f"{where}: refers to {name!r}, which no earlier node is called")
        if node.name in known:
            raise UserFault(f"{where}: there already is a node {node.name!r}")
        known.add(node.name)
    placeholders = [node.target for node in nodes if node.op == "placeholder"]
    if placeholders != [each.name for each in request.inputs]:
        raise UserFault("graph: its placeholders are not the inputs")
    if not nodes or nodes[-1].op != "output" or sum(node.op == "output" for node in nodes) != 1:
        raise UserFault("graph: must end with its only output")
    _check_output(nodes[-1])


def _check_inputs(inputs: Sequence[CustomLossInput]) -> None:
    names = [each.name for each in inputs]
    if not names or names[0] != "logprobs" or len(names) > MAX_INPUTS:
        raise UserFault(f"inputs: 1 to {MAX_INPUTS} of them, the first is logprobs")
    if len(set(names)) < len(names) or not all(_NAME.fullmatch(name) for name in names):
        raise UserFault("inputs: names are different, of lower-case letters, digits and _")
    if inputs[0].rank == 0:
        raise UserFault("inputs: logprobs has 1 or 2 dimensions")


def _check_node(node: CustomLossNode, where: str) -> None:
    if node.op not in _OPS:
        raise UserFault(f"{where}: {node.op} is not taken")
    if node.op == "call_function":
        root = node.target.partition(".")[0]
        if root not in _ROOTS and node.target not in ("getattr", "builtins.getattr"):
            raise UserFault(f"{where}: function {node.target!r} is not taken")
    if node.op == "call_method" and (node.target in _FORBIDDEN_METHODS or node.target.startswith("_")):
        raise UserFault(f"{where}: method {node.target!r} is not taken")


def _references(value: Any, where: str) -> list[str]:
    """Return the names of the nodes that arguments refer to.

    Raises:
        UserFault: an argument has an unknown form.
    """
    found: list[str] = []
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += each
        elif isinstance(each, dict):
            if each is value or len(each) != 1 or next(iter(each)) not in _MARKS:
                if not _is_keywords(each, value):
                    raise UserFault(f"{where}: an argument has an unknown form")
                pending += each.values()
            elif "ref" in each:
                found.append(str(each["ref"]))
            elif isinstance(inner := next(iter(each.values())), dict):
                pending += inner.values()
            else:
                pending.append(inner)
    return found


def _is_keywords(each: Mapping[str, Any], value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and each is value[1]


def _check_output(node: CustomLossNode) -> None:
    pair = node.args[0] if len(node.args) == 1 else None
    parts = pair.get("tuple", ()) if isinstance(pair, dict) else pair
    if not isinstance(parts, list) or len(parts) != 2 or not _is_reference(parts[0]):
        raise UserFault("graph: its output must be a loss and a dict of metrics")
    metrics = parts[1].get("dict") if isinstance(parts[1], dict) else None
    if not isinstance(metrics, dict):
        raise UserFault("graph: the second part of its output must be a dict of metrics")
    for name, value in metrics.items():
        if not _METRIC.fullmatch(name) or not _is_reference(value):
            raise UserFault(
                f"graph: metric {name!r} must be called custom/NAME:sum or :mean, and be computed"
            )


def _is_reference(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"ref"}
