"""Losses that users upload: graphs of torch calls, restricted to allowed calls.

A graph names functions, methods and attributes. Only names in the tables below resolve. They allow arithmetic
on the tensors of one datum: no files, no modules, no random numbers. This module needs torch, which is
imported with the first loss. Any thread may compute a loss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from attrs import frozen

from tinker_sync.local.engine.losses import LossRule, Term
from tinker_sync.local.engine.safetensors import Array

if TYPE_CHECKING:
    from tinker_sync.local.engine.losses import Example
    from tinker_sync.local.engine.training import AdapterTrainer, LossOutput
    from tinker_sync.types.custom_loss import CustomLossGraph, CustomLossInput, CustomLossNode


def _split(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Allowed functions of torch, also as methods if a tensor has them.
_TORCH: Final = _split("""
    abs absolute acos acosh add addcdiv addcmul all allclose amax amin any argmax argmin argsort asin asinh
    atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_to cat ceil chunk clamp
    clamp_max clamp_min clip clone concat concatenate cos cosh cosine_similarity count_nonzero cummax cummin
    cumprod cumsum deg2rad detach diag diagonal diff digamma div divide dot einsum eq erf erfc erfinv exp
    exp2 expm1 flatten flip floor floor_divide fmax fmin fmod frac full_like gather ge greater greater_equal
    gt hardshrink heaviside hstack hypot index_select isclose isfinite isinf isnan ldexp le lerp less
    less_equal lgamma log log10 log1p log2 log_softmax logaddexp logaddexp2 logcumsumexp logical_and
    logical_not logical_or logical_xor logit logsumexp lt masked_fill masked_select matmul max maximum mean
    median min minimum mm movedim mul multiply mv nan_to_num nanmean nansum narrow ne neg negative norm
    not_equal ones_like outer permute pow prod quantile rad2deg ravel reciprocal relu remainder reshape roll
    round rsqrt select selu sgn sigmoid sign sin sinc sinh softmax sort split sqrt square squeeze stack std
    std_mean sub subtract sum swapaxes t take_along_dim tan tanh tile topk transpose tril triu true_divide
    trunc unbind unflatten unsqueeze var var_mean vstack where xlogy zeros_like
""")
_METHODS: Final = _TORCH | _split("""
    bool contiguous dim double expand expand_as float half int long masked_fill ndimension new_full new_ones
    new_zeros numel repeat reshape_as size sum_to_size to type_as view view_as
""")
_FUNCTIONAL: Final = _split("""
    binary_cross_entropy binary_cross_entropy_with_logits celu cosine_similarity elu gelu hardshrink
    hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss kl_div l1_loss leaky_relu log_softmax
    logsigmoid margin_ranking_loss mish mse_loss normalize pad relu relu6 selu sigmoid silu smooth_l1_loss
    softmax softmin softplus softshrink softsign tanh tanhshrink threshold
""")
_SPECIAL: Final = _split("""
    digamma entr erf erfc erfinv exp2 expit expm1 gammaln log1p log_softmax logit logsumexp sinc softmax
    xlog1py xlogy
""")
_OPERATORS: Final = _split("""
    abs add and_ eq floordiv ge getitem gt iadd imul invert isub itruediv le lt matmul mod mul ne neg or_
    pos pow sub truediv xor
""")
_MATH: Final = _split("""
    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh degrees erf erfc exp expm1 fabs floor fmod
    gamma hypot isclose isfinite isinf isnan ldexp lgamma log log10 log1p log2 pow radians sin sinh sqrt tan
    tanh trunc
""")
_ATTRIBUTES: Final = _split("T device dtype mT ndim shape")
_DTYPES: Final = _split("bfloat16 bool float16 float32 float64 int16 int32 int64 int8 uint8")
_CONSTANTS: Final[Mapping[str, frozenset[str]]] = {
    "dtype": _DTYPES,
    "layout": _split("strided"),
    "memory_format": _split("channels_last contiguous_format preserve_format"),
}
# Private modules of torch whose functions have public names; traced graphs use the private ones.
_PRIVATE_MODULES: Final = (
    ("torch._C._special.special_", "torch.special."),
    ("torch._C._nn.", "torch.nn.functional."),
    ("torch.functional.", "torch."),
    ("_operator.", "operator."),
)
_PRIVATE_NAMES: Final = {
    "torch.nn.functional.log_sigmoid": "torch.nn.functional.logsigmoid",
    "torch.nn.functional._threshold": "torch.nn.functional.threshold",
    "builtins.getattr": "getattr",
}
_MAX_DEPTH: Final = 50

Value = Callable[[Mapping[str, Any]], Any]


class _UnsupportedError(ValueError):
    """An error for a part of a graph that this server does not compute."""


def compile_custom_loss(
    inputs: Sequence[CustomLossInput], graph: CustomLossGraph
) -> Callable[..., LossOutput]:
    """Compile an uploaded loss to a function `rule(trainer, data, *, backward)`, which computes a pass.

    Raises:
        ValueError: the graph has a part that this server does not compute, or torch is not installed.
    """
    rule = compile_rule(inputs, graph)

    def compute(trainer: AdapterTrainer, data: Sequence[Example], *, backward: bool) -> LossOutput:
        return (trainer.forward_backward if backward else trainer.forward)(data, rule)

    return compute


def compile_rule(inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> LossRule:
    """Compile an uploaded loss to a `LossRule`. Raises as `compile_custom_loss` does."""
    program = _Program.compile(inputs, graph)
    return LossRule(
        lambda p, given, _: program.term(p, given),
        ("target_tokens", *(each.name for each in inputs[1:])),
        name="custom",
        ranks={each.name: each.rank for each in inputs},
    )


@frozen(eq=False)
class _Step:
    """One call of a graph, with functions that compute its arguments from the results of earlier steps."""

    name: str
    what: str
    call: Callable[..., Any]
    args: Value
    kwargs: Value


@frozen(eq=False)
class _Program:
    """The steps of a graph, in order, and its output. Immutable."""

    names: tuple[str, ...]
    inputs: Mapping[str, str]
    steps: tuple[_Step, ...]
    output: Value

    @classmethod
    def compile(cls, inputs: Sequence[CustomLossInput], graph: CustomLossGraph) -> _Program:
        _import_torch()
        placeholders: dict[str, str] = {}
        steps: list[_Step] = []
        known: set[str] = set()
        output: Value | None = None
        for index, node in enumerate(graph.nodes):
            try:
                if node.op == "placeholder":
                    placeholders[node.target] = node.name
                elif node.op == "output":
                    output = _compile_output(node, known)
                else:
                    what = f"graph.nodes[{index}] ({node.target})"
                    steps.append(
                        _Step(
                            node.name,
                            what,
                            _find_callable(node),
                            _compile_argument(node.args, known),
                            _compile_mapping(node.kwargs, known),
                        )
                    )
            except _UnsupportedError as problem:
                raise ValueError(f"graph.nodes[{index}] ({node.target}): {problem}") from None
            known.add(node.name)
        names = tuple(each.name for each in inputs)
        if not names or names[0] != "logprobs" or inputs[0].rank == 0:
            raise ValueError("inputs: the first must be logprobs, of 1 or 2 dimensions")
        if output is None or set(placeholders) != set(names):
            raise ValueError("graph: must have the inputs as its placeholders, and one output")
        return cls(names, placeholders, tuple(steps), output)

    def term(self, p: Array, given: Mapping[str, Array]) -> Term:
        """Compute the loss of one datum with its derivatives.

        Raises:
            ValueError: a call fails, a result is not a scalar, or the loss or a derivative is not finite.
        """
        torch = _import_torch()
        leaf = torch.tensor(p, dtype=torch.float32).requires_grad_(True)
        tensors = {name: torch.tensor(given[name]) for name in self.names[1:]}
        with torch.enable_grad():
            loss, metrics = self._run({self.names[0]: leaf, **tensors})
            if loss.requires_grad:
                loss.backward()
        slope = np.zeros(p.shape) if leaf.grad is None else leaf.grad.numpy().astype(np.float64)
        value = float(loss.detach())
        if not math.isfinite(value) or not np.isfinite(slope).all():
            raise ValueError("custom loss: its value or one of its derivatives is not finite")
        return Term(value, slope, metrics)

    def _run(self, tensors: Mapping[str, Any]) -> tuple[Any, dict[str, float]]:
        known = {self.inputs[name]: tensor for name, tensor in tensors.items()}
        for step in self.steps:
            try:
                known[step.name] = step.call(*step.args(known), **step.kwargs(known))
            except Exception as problem:  # torch raises many types for bad arguments
                first = str(problem).strip().partition("\n")[0]
                raise ValueError(f"custom loss: {step.what}: {first or type(problem).__name__}") from problem
        loss, metrics = self.output(known)
        if not _is_scalar(loss):
            raise ValueError(f"custom loss: its value must be a scalar tensor, got {_describe(loss)}")
        for name, value in metrics.items():
            if not _is_scalar(value):
                raise ValueError(
                    f"custom loss: metric {name} must be a scalar tensor, got {_describe(value)}"
                )
        return loss, {name: float(value.detach()) for name, value in metrics.items()}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, _import_torch().Tensor) and value.ndim == 0


def _describe(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if hasattr(value, "shape") else type(value).__name__


# ------------------------------------------------------------------------------------------ allowed calls


def _import_torch() -> Any:
    try:
        import torch
    except ImportError:
        raise ValueError("custom losses need torch on this server: pip install torch") from None
    return torch


def _find_callable(node: CustomLossNode) -> Callable[..., Any]:
    if node.op == "call_method":
        return _find_method(node.target)
    if node.op != "call_function":
        raise _UnsupportedError(f"{node.op} is not computed by this server")
    target = _public_name(node.target)
    if target == "getattr":
        return _read_attribute
    module, _, name = target.rpartition(".")
    torch = _import_torch()
    modules = {
        "operator": (_OPERATORS, operator),
        "math": (_MATH, math),
        "torch": (_TORCH, torch),
        "torch.nn.functional": (_FUNCTIONAL, torch.nn.functional),
        "torch.special": (_SPECIAL, torch.special),
        "torch.Tensor": (_METHODS, torch.Tensor),
    }
    allowed, owner = modules.get(module, (frozenset(), None))
    found = getattr(owner, name, None) if name in allowed else None
    if not callable(found):
        raise _UnsupportedError("this function is not computed by this server")
    call: Callable[..., Any] = found
    return call


def _public_name(target: str) -> str:
    """Return the public name of a torch function.

    >>> _public_name("torch._C._nn.log_sigmoid")
    'torch.nn.functional.logsigmoid'
    """
    for private, public in _PRIVATE_MODULES:
        if target.startswith(private):
            target = public + target.removeprefix(private)
            break
    return _PRIVATE_NAMES.get(target, target)


def _find_method(name: str) -> Callable[..., Any]:
    if name not in _METHODS or not hasattr(_import_torch().Tensor, name):
        raise _UnsupportedError("this method is not computed by this server")

    def call(subject: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(subject, _import_torch().Tensor):
            raise TypeError(f"{name} of a {type(subject).__name__}, which is not a tensor")
        return getattr(subject, name)(*args, **kwargs)

    return call


def _read_attribute(subject: Any, name: str) -> Any:
    if name not in _ATTRIBUTES or not isinstance(subject, _import_torch().Tensor):
        raise TypeError(f"the attribute {name!r} of a {type(subject).__name__} is not known to this server")
    return getattr(subject, name)


# ------------------------------------------------------------------------------------------ arguments


def _compile_output(node: CustomLossNode, known: Collection[str]) -> Value:
    pair = node.args[0] if len(node.args) == 1 else None
    parts = pair.get("tuple") if isinstance(pair, dict) else pair
    if not (
        isinstance(parts, list) and len(parts) == 2 and isinstance(parts[1], dict) and "dict" in parts[1]
    ):
        raise _UnsupportedError("the output must be a loss and a dict of metrics")
    return _compile_argument(parts, known)


def _compile_argument(encoded: Any, known: Collection[str], depth: int = 0) -> Value:
    """Return a function that computes an argument from a mapping: inputs and results of steps, by name.

    `known` has the names of the earlier nodes.
    """
    if depth > _MAX_DEPTH:
        raise _UnsupportedError("an argument is nested too deeply")
    if encoded is None or isinstance(encoded, (bool, int, float, str)):
        return lambda _: encoded
    if isinstance(encoded, list):
        parts = [_compile_argument(each, known, depth + 1) for each in encoded]
        return lambda values: [part(values) for part in parts]
    if not isinstance(encoded, dict) or len(encoded) != 1:
        raise _UnsupportedError("an argument has an unknown form")
    ((kind, inside),) = encoded.items()
    return _compile_tagged(kind, inside, known, depth + 1)


def _compile_tagged(kind: str, inside: Any, known: Collection[str], depth: int) -> Value:
    if kind == "ref" and isinstance(inside, str):
        if inside not in known:
            raise _UnsupportedError(f"refers to {inside!r}, which no earlier node is called")
        return lambda values: values[inside]
    if kind in ("tuple", "slice") and isinstance(inside, list) and (kind == "tuple" or len(inside) == 3):
        parts = _compile_argument(inside, known, depth)
        make: Callable[[Any], Any] = tuple if kind == "tuple" else lambda three: slice(*three)
        return lambda values: make(parts(values))
    if kind == "dict" and isinstance(inside, dict):
        return _compile_mapping(inside, known, depth)
    if kind == "ellipsis":
        return lambda _: Ellipsis
    if kind == "float" and inside in ("inf", "-inf", "nan"):
        number = float(inside)
        return lambda _: number
    if kind == "device" and inside == "cpu":
        return lambda _: _import_torch().device("cpu")
    if isinstance(inside, str) and inside in _CONSTANTS.get(kind, ()):
        return lambda _: getattr(_import_torch(), inside)
    raise _UnsupportedError(f"{kind} {inside!r} is not known to this server")


def _compile_mapping(encoded: Mapping[str, Any], known: Collection[str], depth: int = 0) -> Value:
    parts = {name: _compile_argument(each, known, depth + 1) for name, each in encoded.items()}
    return lambda values: {name: part(values) for name, part in parts.items()}
