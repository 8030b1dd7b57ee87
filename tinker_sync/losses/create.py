"""`trace`: records the operations of a loss as a graph, which a server may compute (`create_custom_loss`).

`trace` runs the function once, with stand-ins for its tensors that record each operation. Later only the
recorded graph is computed, in this process or on a server, so the function must not do anything the
stand-ins cannot record. An error names the broken rule and, where it is known, shows the line of the
function. Needs torch.
"""

from __future__ import annotations

import builtins
import inspect
import linecache
import math
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, cast

from tinker_sync.errors import InvalidInputError, MissingExtraError
from tinker_sync.losses.evaluate import name_of
from tinker_sync.losses.handle import LossHandle
from tinker_sync.types.custom_loss import (
    CustomLossGraph,
    CustomLossInput,
    CustomLossNode,
)

if TYPE_CHECKING:
    import torch.fx

_FIRST: Final = "logprobs"
_MAX_INPUTS: Final = 16
_INPUT_NAME: Final = re.compile(r"[a-z_][a-z0-9_]{0,63}")
_METRIC_NAME: Final = re.compile(r"custom/[a-z0-9_./-]{1,64}:(sum|mean)")
# Python's arithmetic and indexing are recorded as functions of `_operator`.
_MODULES: Final = frozenset({"torch", "math", "operator", "_operator"})
_TO_PYTHON: Final = frozenset({"item", "numpy", "tolist"})


def trace(fn: Callable[..., Any], input_ranks: Mapping[str, int], session_id: str) -> LossHandle:
    """Trace a function, and return its handle with `loss_id=None`.

    Raises:
        InvalidInputError: the function or `input_ranks` break a rule.
        MissingExtraError: torch is not installed.
    """
    try:
        import torch.fx  # noqa: F401
    except ImportError:
        raise MissingExtraError("torch", feature="create_custom_loss") from None
    inputs = _declare_inputs(fn, input_ranks)
    recorded = _Recorder(fn)
    graph = recorded.trace()
    _check_graph(graph, recorded)
    return LossHandle(name_of(fn), inputs, session_id, graph)


# --------------------------------------------------------------------------------------------- parameters


def _declare_inputs(fn: Callable[..., Any], ranks: Mapping[str, int]) -> tuple[CustomLossInput, ...]:
    name = name_of(fn)
    where = _locate_definition(fn)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise _make_error(f"{name} has no readable signature ({error}); use a plain function") from error
    if not parameters or parameters[0].name != _FIRST:
        raise _make_error(
            f"{name} must take logprobs as its first parameter, then the loss_fn_inputs it reads, "
            "such as def loss(logprobs, advantages)",
            where,
        )
    if len(parameters) > _MAX_INPUTS:
        raise _make_error(
            f"{name} takes {len(parameters)} parameters; at most {_MAX_INPUTS} can be, logprobs included",
            where,
        )
    for parameter in parameters:
        problem = _find_parameter_problem(parameter)
        if problem is not None:
            raise _make_error(f"the parameter {parameter.name} of {name} {problem}", where)
    names = [parameter.name for parameter in parameters]
    if set(ranks) != set(names):
        raise _make_error(
            f"input_ranks must give a rank for each parameter of {name}: {', '.join(names)}; "
            f"got {', '.join(map(str, ranks)) or 'none'}",
            where,
        )
    for each, rank in ranks.items():
        if isinstance(rank, bool) or rank not in (0, 1, 2):
            raise _make_error(f"input_ranks[{each!r}] must be 0 (a scalar), 1 or 2, got {rank!r}")
    if ranks[_FIRST] == 0:
        raise _make_error("input_ranks['logprobs'] must be 1 (a value a token) or 2 (several a token)")
    return tuple(CustomLossInput(name=each, rank=cast("Any", ranks[each])) for each in names)


def _find_parameter_problem(parameter: inspect.Parameter) -> str | None:
    if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
        return (
            "must be a plain positional one: *args, **kwargs and keyword-only parameters cannot be declared"
        )
    if parameter.default is not parameter.empty:
        return "has a default; every parameter is read from the loss_fn_inputs of each datum"
    if not _INPUT_NAME.fullmatch(parameter.name):
        return "must be named with at most 64 lower-case letters, digits and underscores"
    return None


# -------------------------------------------------------------------------------------------- computation


class _Recorder:
    """A recorder of the graph of one function, with the source line of each node."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.name = name_of(fn)
        self._lines: dict[Any, str] = {}

    def trace(self) -> torch.fx.GraphModule:
        import torch.fx

        lines = self._lines

        class Tracer(torch.fx.Tracer):  # type: ignore[misc]  # torch is Any where types are checked
            def create_node(self, *args: Any, **kwargs: Any) -> Any:
                node = super().create_node(*args, **kwargs)
                lines[node] = _locate_frame(sys._getframe().f_back)
                return node

        tracer = Tracer()
        try:
            graph = tracer.trace(self.fn)
        except Exception as error:
            raise _make_error(
                f"{self.name} cannot be traced: {error}. A custom loss neither branches on the values of "
                "tensors nor hands them to other libraries than torch and math",
                _locate_traceback(error),
            ) from error
        return torch.fx.GraphModule(tracer.root, graph, self.name)

    def refuse(self, problem: str, node: Any) -> InvalidInputError:
        """Return an error that shows the source line of a node, or else of the function."""
        return _make_error(problem, self._lines.get(node, "") or _locate_definition(self.fn))


def _check_graph(graph: torch.fx.GraphModule, recorded: _Recorder) -> None:
    for node in graph.graph.nodes:
        problem = _find_node_problem(node, recorded.name)
        if problem is not None:
            raise recorded.refuse(problem, node)


def _find_node_problem(node: Any, name: str) -> str | None:
    if node.op == "call_function":
        return _find_function_problem(node.target, name)
    if node.op == "call_method":
        return _find_method_problem(node.target, name)
    if node.op == "call_module":
        return f"{name} uses the module {node.target!r}; call functions, such as those of torch.nn.functional"
    if node.op == "get_attr":
        return (
            f"{name} uses a tensor that is not one of its parameters ({node.target!r}); "
            "make it a parameter, to be read from loss_fn_inputs"
        )
    return _find_output_problem(node.args[0], name) if node.op == "output" else None


def _find_function_problem(target: Any, name: str) -> str | None:
    module = getattr(target, "__module__", None) or ""
    if target is builtins.getattr or module.partition(".")[0] in _MODULES:
        return None
    called = getattr(target, "__qualname__", None) or repr(target)
    return f"{name} calls {called} of {module or 'no module'}; only functions of torch and math can be called"


def _find_method_problem(target: str, name: str) -> str | None:
    import torch

    if not hasattr(torch.Tensor, target):
        return f"{name} calls the method {target}, which torch.Tensor does not have"
    if target == "backward":
        return f"{name} calls backward(); return the loss, its gradients are computed elsewhere"
    if target in _TO_PYTHON:
        return f"{name} calls {target}(), which leaves torch; keep everything a tensor, metrics too"
    return None


def _find_output_problem(output: Any, name: str) -> str | None:
    import torch.fx

    if not isinstance(output, (tuple, list)) or len(output) != 2:
        return f"{name} must return two things, (loss, metrics)"
    loss, metrics = output
    if not isinstance(loss, torch.fx.Node):
        return f"{name} must return a loss that is computed from its parameters, got {loss!r}"
    if not isinstance(metrics, dict):
        return f"{name} must return its metrics as a dict, which may be empty"
    for key, value in metrics.items():
        if not isinstance(key, str) or not _METRIC_NAME.fullmatch(key):
            return (
                f"{name} returns the metric {key!r}; metrics are named custom/NAME:sum or custom/NAME:mean, "
                "by how they are put together over the data, with NAME of lower-case letters, digits and _./-"
            )
        if not isinstance(value, torch.fx.Node):
            return f"{name} returns {value!r} as the metric {key!r}; it must be a tensor that is computed"
    return None


# ------------------------------------------------------------------------------------------------- places


def _make_error(problem: str, where: str = "") -> InvalidInputError:
    return InvalidInputError(f"create_custom_loss: {problem}{where}")


def _locate_definition(fn: Any) -> str:
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    code = getattr(fn, "__code__", None) or getattr(getattr(type(fn), "forward", None), "__code__", None)
    return _show_line(code, code.co_firstlineno) if isinstance(code, CodeType) else ""


def _locate_frame(frame: Any) -> str:
    """Return the innermost line of user code in the traced call; "" if there is none, as for the output."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if _is_user_code(frame.f_code):
            return _show_line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _locate_traceback(error: BaseException) -> str:
    lines = [_show_line(code, line) for code, line in _iterate_frames(error) if _is_user_code(code)]
    return lines[-1] if lines else ""


def _iterate_frames(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next


def _is_user_code(code: CodeType) -> bool:
    """Return True for code outside Python, installed packages, this package and generated modules."""
    return not code.co_filename.startswith((*_list_installed(), "<frozen", "<eval_with_key"))


@lru_cache(maxsize=1)
def _list_installed() -> tuple[str, ...]:
    """Return the folders of this package, of torch and other installed packages, and of Python."""
    import torch

    folders = [Path(__file__).parents[1], Path(torch.__file__).parents[1]]
    return (*map(str, folders), *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")))


def _show_line(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    place = f"{code.co_filename}, line {line}"
    return f"\n  {place}: {text}" if text else f"\n  {place}"


# ------------------------------------------------------------------------------------------------- encoding


def encode_graph(name: str, graph: torch.fx.GraphModule) -> CustomLossGraph:
    """Encode the graph of a loss as a value of the API, node for node.

    This function does not check the operations, because the server decides which ones it supports.

    Raises:
        InvalidInputError: an argument in the graph has no encoding.
    """
    return CustomLossGraph(nodes=[_encode_node(name, node) for node in graph.graph.nodes])


def _encode_node(name: str, node: Any) -> CustomLossNode:
    return CustomLossNode(
        op=node.op,
        name=node.name,
        target=_encode_target(node),
        args=[_encode_argument(name, node, each) for each in node.args],
        kwargs={key: _encode_argument(name, node, each) for key, each in node.kwargs.items()},
    )


def _encode_target(node: Any) -> str:
    if node.op != "call_function":
        return str(node.target)
    # Servers use the names that torch gives to functions in generated code.
    from torch.fx.node import _get_qualified_name

    target: str = _get_qualified_name(node.target)
    # Python keeps its operators in a private module.
    return target.removeprefix("_") if target.startswith("_operator.") else target


def _encode_argument(name: str, node: Any, value: Any) -> Any:
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
        return {
            "slice": [_encode_argument(name, node, each) for each in (value.start, value.stop, value.step)]
        }
    if isinstance(value, (list, tuple)):
        each_encoded = [_encode_argument(name, node, each) for each in value]
        return {"tuple": each_encoded} if isinstance(value, tuple) else each_encoded
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _encode_argument(name, node, each) for key, each in value.items()}}
    kinds = {
        torch.dtype: "dtype",
        torch.device: "device",
        torch.layout: "layout",
        torch.memory_format: "memory_format",
    }
    if type(value) in kinds:
        return {kinds[type(value)]: str(value).removeprefix("torch.")}
    raise InvalidInputError(
        f"create_custom_loss: {name} passes a {type(value).__name__} to {node.target}, which cannot be sent; "
        "pass numbers, text, tensors, and lists of them"
    )
