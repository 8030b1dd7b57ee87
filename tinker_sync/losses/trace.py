"""From a function to a graph of torch calls, and the rules such a function has to keep.

It is run once, with stand-ins for its tensors that write down what is done to them; only what they saw is
computed later, here or on a server. So the function may do nothing that they cannot see. Every refusal names
the rule and shows the line of the function that breaks it. Needs torch.
"""

from __future__ import annotations

import builtins
import inspect
import linecache
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, cast

from tinker_sync.errors import InvalidInputError, MissingExtraError
from tinker_sync.losses._kinds import name_of
from tinker_sync.losses.handle import LossHandle
from tinker_sync.types.custom_loss import CustomLossInput

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
    """Make a handle of a function, without an id of a server.

    Raises:
        InvalidInputError: the function or the ranks break a rule.
        MissingExtraError: torch is not installed.
    """
    try:
        import torch.fx  # noqa: F401
    except ImportError:
        raise MissingExtraError("torch", feature="create_custom_loss") from None
    inputs = _declared(fn, input_ranks)
    recorded = _Record(fn)
    graph = recorded.trace()
    _check(graph, recorded)
    return LossHandle(name_of(fn), inputs, session_id, graph)


# --------------------------------------------------------------------------------------------- parameters


def _declared(fn: Callable[..., Any], ranks: Mapping[str, int]) -> tuple[CustomLossInput, ...]:
    name = name_of(fn)
    where = _definition(fn)
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise _refusal(
            f"{name} has no signature that can be read ({error}); give a plain function"
        ) from error
    if not parameters or parameters[0].name != _FIRST:
        raise _refusal(
            f"{name} must take logprobs as its first parameter, then the loss_fn_inputs it reads, "
            "such as def loss(logprobs, advantages)",
            where,
        )
    if len(parameters) > _MAX_INPUTS:
        raise _refusal(
            f"{name} takes {len(parameters)} parameters; at most {_MAX_INPUTS} can be, logprobs included",
            where,
        )
    for parameter in parameters:
        problem = _problem_of(parameter)
        if problem is not None:
            raise _refusal(f"the parameter {parameter.name} of {name} {problem}", where)
    names = [parameter.name for parameter in parameters]
    if set(ranks) != set(names):
        raise _refusal(
            f"input_ranks must give a rank for each parameter of {name}: {', '.join(names)}; "
            f"got {', '.join(map(str, ranks)) or 'none'}",
            where,
        )
    for each, rank in ranks.items():
        if isinstance(rank, bool) or rank not in (0, 1, 2):
            raise _refusal(f"input_ranks[{each!r}] must be 0 (a scalar), 1 or 2, got {rank!r}")
    if ranks[_FIRST] == 0:
        raise _refusal("input_ranks['logprobs'] must be 1 (a value a token) or 2 (several a token)")
    return tuple(CustomLossInput(name=each, rank=cast("Any", ranks[each])) for each in names)


def _problem_of(parameter: inspect.Parameter) -> str | None:
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


class _Record:
    """One function, its graph, and the line each node of it comes from."""

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
                lines[node] = _line_of_frame(sys._getframe().f_back)
                return node

        tracer = Tracer()
        try:
            graph = tracer.trace(self.fn)
        except Exception as error:
            raise _refusal(
                f"{self.name} cannot be traced: {error}. A custom loss neither branches on the values of "
                "tensors nor hands them to other libraries than torch and math",
                _line_of_traceback(error),
            ) from error
        return torch.fx.GraphModule(tracer.root, graph, self.name)

    def refuse(self, problem: str, node: Any) -> InvalidInputError:
        """The error for a node, with the line it comes from."""
        return _refusal(problem, self._lines.get(node, "") or _definition(self.fn))


def _check(graph: torch.fx.GraphModule, recorded: _Record) -> None:
    for node in graph.graph.nodes:
        problem = _problem_of_node(node, recorded.name)
        if problem is not None:
            raise recorded.refuse(problem, node)


def _problem_of_node(node: Any, name: str) -> str | None:
    if node.op == "call_function":
        return _problem_of_function(node.target, name)
    if node.op == "call_method":
        return _problem_of_method(node.target, name)
    if node.op == "call_module":
        return f"{name} uses the module {node.target!r}; call functions, such as those of torch.nn.functional"
    if node.op == "get_attr":
        return (
            f"{name} uses a tensor that is not one of its parameters ({node.target!r}); "
            "make it a parameter, to be read from loss_fn_inputs"
        )
    return _problem_of_output(node.args[0], name) if node.op == "output" else None


def _problem_of_function(target: Any, name: str) -> str | None:
    module = getattr(target, "__module__", None) or ""
    if target is builtins.getattr or module.partition(".")[0] in _MODULES:
        return None
    called = getattr(target, "__qualname__", None) or repr(target)
    return f"{name} calls {called} of {module or 'no module'}; only functions of torch and math can be called"


def _problem_of_method(target: str, name: str) -> str | None:
    import torch

    if not hasattr(torch.Tensor, target):
        return f"{name} calls the method {target}, which torch.Tensor does not have"
    if target == "backward":
        return f"{name} calls backward(); return the loss, its gradients are computed elsewhere"
    if target in _TO_PYTHON:
        return f"{name} calls {target}(), which leaves torch; keep everything a tensor, metrics too"
    return None


def _problem_of_output(output: Any, name: str) -> str | None:
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


def _refusal(problem: str, where: str = "") -> InvalidInputError:
    return InvalidInputError(f"create_custom_loss: {problem}{where}")


def _definition(fn: Any) -> str:
    fn = inspect.unwrap(getattr(fn, "__func__", fn))
    code = getattr(fn, "__code__", None) or getattr(getattr(type(fn), "forward", None), "__code__", None)
    return _shown(code, code.co_firstlineno) if isinstance(code, CodeType) else ""


def _line_of_frame(frame: Any) -> str:
    """The innermost line of the user's in what is being traced; none once that has returned."""
    while frame is not None and frame.f_code.co_filename != __file__:
        if _is_the_users(frame.f_code):
            return _shown(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _line_of_traceback(error: BaseException) -> str:
    lines = [_shown(code, line) for code, line in _frames(error) if _is_the_users(code)]
    return lines[-1] if lines else ""


def _frames(error: BaseException) -> Iterator[tuple[CodeType, int]]:
    traceback = error.__traceback__
    while traceback is not None:
        yield traceback.tb_frame.f_code, traceback.tb_lineno
        traceback = traceback.tb_next


def _is_the_users(code: CodeType) -> bool:
    """Neither ours nor installed, nor generated."""
    return not code.co_filename.startswith((*_installed(), "<frozen", "<eval_with_key"))


@lru_cache(maxsize=1)
def _installed() -> tuple[str, ...]:
    """Where what is not the user's lives: this package, torch and its neighbours, Python."""
    import torch

    folders = [Path(__file__).parents[1], Path(torch.__file__).parents[1]]
    return (*map(str, folders), *(sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")))


def _shown(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    place = f"{code.co_filename}, line {line}"
    return f"\n  {place}: {text}" if text else f"\n  {place}"
