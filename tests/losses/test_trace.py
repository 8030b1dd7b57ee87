"""The rules for traced losses; each error shows the line that breaks its rule."""

from __future__ import annotations

import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinker_sync.errors import InvalidInputError, MissingExtraError
from tinker_sync.losses.create import encode_graph, trace
from tinker_sync.types import CustomLossInput

torch = pytest.importorskip("torch")

HERE = Path(__file__)
ONE = {"logprobs": 1}
CAPTURED = torch.ones(3)
LOGPROBS_ALONE = inspect.signature(lambda logprobs: None)


def refusal(fn: Any, ranks: Any = None, line: str | None = None) -> str:
    """Return the text of the error for a loss. The text must end with `line`, a line of this file."""
    with pytest.raises(InvalidInputError) as caught:
        encode_graph("loss", trace(fn, ONE if ranks is None else ranks, "session-1").graph)
    text = str(caught.value)
    assert text.startswith("create_custom_loss: ")
    if line is not None:
        shown = re.search(r"\n  (.*), line (\d+): (.*)$", text)
        assert shown is not None, text
        assert Path(shown[1]) == HERE
        assert shown[3] == line
        assert HERE.read_text(encoding="utf-8").splitlines()[int(shown[2]) - 1].strip() == line
    return text


def with_parameters(text: str) -> Any:
    made: dict[str, Any] = {}
    exec(f"def loss({text}): return logprobs.sum(), {{}}", made)
    return made["loss"]


# ------------------------------------------------------------------------------------------ valid losses
def test_loss_and_handle() -> None:
    def nll(logprobs: Any, /, weights: Any) -> Any:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/nll:sum": loss}

    handle = trace(nll, {"weights": 1, "logprobs": 2}, "session-1")
    assert (handle.name, handle.session_id, handle.loss_id) == ("nll", "session-1", None)
    assert handle.inputs == (
        CustomLossInput(name="logprobs", rank=2),
        CustomLossInput(name="weights", rank=1),
    )
    assert handle.input_names == ("weights",)
    p, w = torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 1.0])
    loss, metrics = handle.graph(p, w)
    assert (float(loss), float(metrics["custom/nll:sum"])) == (2.5, 2.5)
    again = trace(nll, {"weights": 1, "logprobs": 2}, "session-2")
    assert again.key == handle.key
    assert trace(nll, {"weights": 2, "logprobs": 2}, "session-1").key != handle.key
    assert trace(lambda logprobs: (logprobs.sum(), {}), ONE, "session-1").key != handle.key
    assert "graph" not in repr(handle)


# ------------------------------------------------------------------------------------------ parameters
PAIR = "logprobs, weights"
NAMED = "the parameter {} of loss must be named with at most 64 lower-case letters"
POSITIONAL = "the parameter {} of loss must be a plain positional one"
EACH = "input_ranks must give a rank for each parameter of loss: logprobs, weights; got"
RANK = "input_ranks['weights'] must be 0 (a scalar), 1 or 2, got {!r}"
SEVENTEEN = ", ".join(["logprobs", *(f"a{n}" for n in range(16))])


@pytest.mark.parametrize(
    ("text", "ranks", "problem"),
    [
        *((text, None, "must take logprobs as its first") for text in ("weights, logprobs", "p", "")),
        ("Logprobs", None, "must take logprobs as its first"),
        (SEVENTEEN, dict.fromkeys(SEVENTEEN.split(", "), 1), "loss takes 17 parameters; at most 16"),
        *(
            (f"logprobs, {name}", {"logprobs": 1, name: 1}, NAMED.format(name))
            for name in ("Weights", "größe", "a" * 65, "w_E")
        ),
        ("logprobs, *args", {"logprobs": 1, "args": 1}, POSITIONAL.format("args")),
        ("logprobs, **kwargs", {"logprobs": 1, "kwargs": 1}, POSITIONAL.format("kwargs")),
        ("logprobs, *, weights", {"logprobs": 1, "weights": 1}, POSITIONAL.format("weights")),
        ("logprobs, beta=0.1", {"logprobs": 1, "beta": 0}, "the parameter beta of loss has a default"),
        *(
            (PAIR, ranks, EACH)
            for ranks in ({}, {"logprobs": 1}, {"logprobs": 1, "weights": 1, "more": 1}, {"weight": 1})
        ),
        *(
            (PAIR, {"logprobs": 1, "weights": rank}, RANK.format(rank))
            for rank in (3, -1, None, "1", True, 1.5)
        ),
        ("logprobs", {"logprobs": 0}, "input_ranks['logprobs'] must be 1"),
    ],
)
def test_invalid_parameters_and_ranks(text: str, ranks: Any, problem: str) -> None:
    assert problem in refusal(with_parameters(text), ranks)


def test_error_shows_the_definition() -> None:
    def late(weights: Any, logprobs: Any) -> Any:
        return (logprobs * weights).sum(), {}

    refusal(late, line="def late(weights: Any, logprobs: Any) -> Any:")


# ------------------------------------------------------------------------------------------ calls
@torch.fx.wrap
def helper(x: Any) -> Any:
    return x


def of_another_module(logprobs: Any) -> Any:
    bare = logprobs.sum()
    helped = helper(bare)
    return helped, {}


def in_numpy(logprobs: Any) -> Any:
    grown = np.exp(logprobs)
    return grown.sum(), {}


def branching(logprobs: Any) -> Any:
    total = logprobs.sum()
    if total > 0:
        total = -total
    return total, {}


def with_an_error(logprobs: Any) -> Any:
    broken = {}["beta"]
    return logprobs.sum() * broken, {}


def calling(logprobs: Any) -> Any:
    def inner(x: Any) -> Any:
        return x.tolist()

    return inner(logprobs), {}


def with_a_typo(logprobs: Any) -> Any:
    summed = logprobs.summe()
    return summed, {}


def with_backward(logprobs: Any) -> Any:
    total = logprobs.sum()
    total.backward()
    return total, {}


def capturing(logprobs: Any) -> Any:
    scaled = logprobs * CAPTURED
    return scaled.sum(), {}


class WithModule(torch.nn.Module):  # type: ignore[misc,name-defined]
    __signature__ = LOGPROBS_ALONE

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.ReLU()

    def forward(self, logprobs: Any) -> Any:
        held = self.inner(logprobs)
        return held.sum(), {}


class WithParameter(torch.nn.Module):  # type: ignore[misc,name-defined]
    __signature__ = LOGPROBS_ALONE

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, logprobs: Any) -> Any:
        return (logprobs * self.scale).sum(), {}


@pytest.mark.parametrize(
    ("loss", "line", "problem"),
    [
        (
            of_another_module,
            "helped = helper(bare)",
            f"calls helper of {helper.__module__}; only functions of torch and math",
        ),
        (in_numpy, "grown = np.exp(logprobs)", "in_numpy cannot be traced"),
        (branching, "if total > 0:", "A custom loss neither branches on the values of tensors"),
        (with_an_error, 'broken = {}["beta"]', "cannot be traced: 'beta'"),
        (calling, "return x.tolist()", "calls tolist(), which leaves torch"),
        (
            with_a_typo,
            "summed = logprobs.summe()",
            "calls the method summe, which torch.Tensor does not have",
        ),
        (with_backward, "total.backward()", "calls backward(); return the loss"),
        (capturing, "scaled = logprobs * CAPTURED", "uses a tensor that is not one of its parameters"),
        (WithModule(), "held = self.inner(logprobs)", "WithModule uses the module 'inner'; call functions"),
        (WithParameter(), None, "uses a tensor that is not one of its parameters ('scale')"),
    ],
)
def test_forbidden_operations(loss: Any, line: str | None, problem: str) -> None:
    assert problem in refusal(loss, line=line)


# ------------------------------------------------------------------------------------------ output
METRIC_NAMES = (
    *("nll:sum", "custom/nll", "custom/nll:max", "custom/:sum", "custom/NLL:sum", "custom/a b:sum"),
    *(f"custom/{'a' * 65}:sum", "loss:sum", "custom/a:b:sum", "my/custom/a:sum", "custom/a:sum\n"),
)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        *(
            (returned, "must return two things, (loss, metrics)")
            for returned in ("p.sum()", "(p.sum(),)", "(p.sum(), {}, {})", "None", "{}")
        ),
        ("(1.0, {})", "must return a loss that is computed from its parameters, got 1.0"),
        ("(p.sum(), [])", "must return its metrics as a dict"),
        ("(p.sum(), p)", "must return its metrics as a dict"),
        ("(p.sum(), {'custom/a:sum': 1.0})", "returns 1.0 as the metric 'custom/a:sum'; it must be a tensor"),
        *(
            (f"(p.sum(), {{{name!r}: p.sum()}})", f"returns the metric {name!r}; metrics are named custom/")
            for name in METRIC_NAMES
        ),
    ],
)
def test_invalid_results(returned: str, problem: str) -> None:
    assert problem in refusal(eval(f"lambda logprobs: (lambda p: {returned})(logprobs)"))


# ------------------------------------------------------------------------------------------ the graph
class TestEncoding:
    def test_every_encoding(self) -> None:
        def loss(logprobs: Any) -> Any:
            a = logprobs.to(torch.float64, memory_format=torch.contiguous_format)
            b = torch.zeros_like(a, device=torch.device("cpu"), layout=torch.strided)
            c = a[..., 1:None:2]
            d = torch.clamp(c, min=None, max=float("inf")) * -math.inf + math.nan
            e = torch.cat([d, b[0:1]], dim=0).sum(dim=(0,), keepdim=False)
            return e, {"custom/e:sum": e}

        graph = encode_graph("loss", trace(loss, ONE, "session-1").graph)
        found = {node.name: (node.op, node.target, node.args, node.kwargs) for node in graph.nodes}
        assert graph.format == 1
        assert found["logprobs"] == ("placeholder", "logprobs", [], {})
        assert found["to"] == (
            "call_method",
            "to",
            [{"ref": "logprobs"}, {"dtype": "float64"}],
            {"memory_format": {"memory_format": "contiguous_format"}},
        )
        assert found["zeros_like"] == (
            "call_function",
            "torch.zeros_like",
            [{"ref": "to"}],
            {"device": {"device": "cpu"}, "layout": {"layout": "strided"}},
        )
        slices = {"tuple": [{"ellipsis": True}, {"slice": [1, None, 2]}]}
        assert found["getitem"] == ("call_function", "operator.getitem", [{"ref": "to"}, slices], {})
        assert found["clamp"][3] == {"min": None, "max": {"float": "inf"}}
        assert found["mul"][1:3] == ("operator.mul", [{"ref": "clamp"}, {"float": "-inf"}])
        assert found["add"][2] == [{"ref": "mul"}, {"float": "nan"}]
        assert found["cat"][2:] == ([[{"ref": "add"}, {"ref": "getitem_1"}]], {"dim": 0})
        assert found["sum_1"][3] == {"dim": {"tuple": [0]}, "keepdim": False}
        pair = {"tuple": [{"ref": "sum_1"}, {"dict": {"custom/e:sum": {"ref": "sum_1"}}}]}
        assert found["output"] == ("output", "output", [pair], {})
        assert [node.name for node in graph.nodes][-1] == "output"


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.fx", None)
    with pytest.raises(MissingExtraError, match=r"create_custom_loss needs .*pip install torch"):
        trace(lambda logprobs: (logprobs.sum(), {}), ONE, "session-1")
