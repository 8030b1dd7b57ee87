"""The rules for traced losses; each error shows the line that breaks its rule."""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinker_sync.errors import InvalidInputError, MissingExtraError
from tinker_sync.losses.trace import encode_graph, trace
from tinker_sync.types import CustomLossInput

torch = pytest.importorskip("torch")

HERE = Path(__file__)
ONE = {"logprobs": 1}
CAPTURED = torch.ones(3)
LOGPROBS_ALONE = inspect.signature(lambda logprobs: None)


def refusal(fn: Any, ranks: Any = None, line: str | None = None) -> str:
    """Return the error for a loss, which must end with the given line."""
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


def test_sixteen_parameters_and_long_names_are_allowed() -> None:
    names = ["logprobs", *(f"a{n}" for n in range(14)), "_" + "b" * 63]
    handle = trace(with_parameters(", ".join(names)), dict.fromkeys(names, 0) | ONE, "session-1")
    assert [each.name for each in handle.inputs] == names


def test_allowed_functions() -> None:
    def busy(logprobs: Any) -> Any:
        scaled = torch.nn.functional.relu(logprobs) * math.sqrt(logprobs.shape[0])
        return torch.special.entr(scaled.exp()).sum(), {"custom/a_b/c.d-1:mean": scaled[0]}

    trace(busy, ONE, "session-1")


def test_list_in_place_of_a_pair() -> None:
    trace(lambda logprobs: [logprobs.sum(), {}], ONE, "session-1")


# ------------------------------------------------------------------------------------------ parameters


class TestParameters:
    @pytest.mark.parametrize("text", ["weights, logprobs", "p", "", "Logprobs"])
    def test_first_parameter_is_logprobs(self, text: str) -> None:
        assert "must take logprobs as its first parameter" in refusal(with_parameters(text))

    def test_at_most_sixteen(self) -> None:
        names = ["logprobs", *(f"a{n}" for n in range(16))]
        ranks = dict.fromkeys(names, 1)
        assert "loss takes 17 parameters; at most 16" in refusal(with_parameters(", ".join(names)), ranks)

    @pytest.mark.parametrize("name", ["Weights", "größe", "a" * 65, "w_E"])
    def test_names(self, name: str) -> None:
        ranks = {"logprobs": 1, name: 1}
        said = refusal(with_parameters(f"logprobs, {name}"), ranks)
        assert f"the parameter {name} of loss must be named with at most 64 lower-case letters" in said

    @pytest.mark.parametrize(
        ("text", "name"),
        [("logprobs, *args", "args"), ("logprobs, **kwargs", "kwargs"), ("logprobs, *, weights", "weights")],
    )
    def test_plain_positional_ones(self, text: str, name: str) -> None:
        said = refusal(with_parameters(text), {"logprobs": 1, name: 1})
        assert f"the parameter {name} of loss must be a plain positional one" in said

    def test_no_defaults(self) -> None:
        said = refusal(with_parameters("logprobs, beta=0.1"), {"logprobs": 1, "beta": 0})
        assert "the parameter beta of loss has a default" in said

    def test_error_shows_the_definition(self) -> None:
        def late(weights: Any, logprobs: Any) -> Any:
            return (logprobs * weights).sum(), {}

        refusal(late, line="def late(weights: Any, logprobs: Any) -> Any:")

    def test_signature_must_be_readable(self) -> None:
        assert "has no readable signature" in refusal(dict)
        assert "has no readable signature" in refusal(3)


class TestRanks:
    @pytest.mark.parametrize(
        "ranks", [{}, {"logprobs": 1}, {"logprobs": 1, "weights": 1, "more": 1}, {"logprobs": 1, "weight": 1}]
    )
    def test_one_for_each_parameter(self, ranks: dict[str, int]) -> None:
        said = refusal(with_parameters("logprobs, weights"), ranks)
        assert "input_ranks must give a rank for each parameter of loss: logprobs, weights; got" in said

    @pytest.mark.parametrize("rank", [3, -1, None, "1", True, 1.5])
    def test_values(self, rank: Any) -> None:
        said = refusal(with_parameters("logprobs, weights"), {"logprobs": 1, "weights": rank})
        assert f"input_ranks['weights'] must be 0 (a scalar), 1 or 2, got {rank!r}" in said

    def test_logprobs_must_not_be_a_scalar(self) -> None:
        assert "input_ranks['logprobs'] must be 1" in refusal(with_parameters("logprobs"), {"logprobs": 0})


# ------------------------------------------------------------------------------------------ calls


@torch.fx.wrap
def helper(x: Any) -> Any:
    return x


class TestCalls:
    def test_functions_of_other_modules(self) -> None:
        def loss(logprobs: Any) -> Any:
            bare = logprobs.sum()
            helped = helper(bare)
            return helped, {}

        said = refusal(loss, line="helped = helper(bare)")
        assert f"loss calls helper of {helper.__module__}; only functions of torch and math" in said

    def test_builtins_other_than_getattr(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def loss(logprobs: Any) -> Any:
            return torch.as_tensor(abs(logprobs)).sum(), {}

        tracer = torch.fx.Tracer()
        graph = tracer.trace(lambda logprobs: (logprobs.sum(), {}))
        node = next(each for each in graph.nodes if each.op == "call_method")
        node.op, node.target = "call_function", builtins.len

        def traced(self: Any, fn: Any) -> Any:
            self.root = torch.nn.Module()
            return graph

        monkeypatch.setattr(torch.fx.Tracer, "trace", traced)
        assert "calls len of builtins" in refusal(loss)
        node.target, node.args = builtins.getattr, (node.args[0], "T")
        trace(loss, ONE, "session-1")

    def test_numpy(self) -> None:
        def loss(logprobs: Any) -> Any:
            grown = np.exp(logprobs)
            return grown.sum(), {}

        assert "loss cannot be traced" in refusal(loss, line="grown = np.exp(logprobs)")

    def test_branching_on_values(self) -> None:
        def loss(logprobs: Any) -> Any:
            total = logprobs.sum()
            if total > 0:
                total = -total
            return total, {}

        said = refusal(loss, line="if total > 0:")
        assert "A custom loss neither branches on the values of tensors" in said

    def test_error_inside_the_function(self) -> None:
        def loss(logprobs: Any) -> Any:
            broken = {}["beta"]
            return logprobs.sum() * broken, {}

        assert "cannot be traced: 'beta'" in refusal(loss, line='broken = {}["beta"]')

    def test_cause_is_kept(self) -> None:
        with pytest.raises(InvalidInputError) as caught:
            trace(lambda logprobs: ({}["a"], {}), ONE, "session-1")
        assert isinstance(caught.value.__cause__, KeyError)

    def test_error_shows_the_line_of_a_called_function(self) -> None:
        def inner(x: Any) -> Any:
            return x.tolist()

        def loss(logprobs: Any) -> Any:
            return inner(logprobs), {}

        refusal(loss, line="return x.tolist()")

    def test_unknown_methods(self) -> None:
        def loss(logprobs: Any) -> Any:
            summed = logprobs.summe()
            return summed, {}

        said = refusal(loss, line="summed = logprobs.summe()")
        assert "loss calls the method summe, which torch.Tensor does not have" in said

    def test_backward(self) -> None:
        def loss(logprobs: Any) -> Any:
            total = logprobs.sum()
            total.backward()
            return total, {}

        assert "loss calls backward(); return the loss" in refusal(loss, line="total.backward()")

    @pytest.mark.parametrize("method", ["item", "numpy", "tolist"])
    def test_methods_that_leave_torch(self, method: str) -> None:
        def loss(logprobs: Any) -> Any:
            value = getattr(logprobs.sum(), method)()
            return logprobs.sum() * value, {}

        said = refusal(loss, line="value = getattr(logprobs.sum(), method)()")
        assert f"loss calls {method}(), which leaves torch" in said

    def test_modules(self) -> None:
        class Scaled(torch.nn.Module):  # type: ignore[misc,name-defined]
            __signature__ = LOGPROBS_ALONE

            def __init__(self) -> None:
                super().__init__()
                self.inner = torch.nn.ReLU()

            def forward(self, logprobs: Any) -> Any:
                held = self.inner(logprobs)
                return held.sum(), {}

        said = refusal(Scaled(), line="held = self.inner(logprobs)")
        assert "Scaled uses the module 'inner'; call functions" in said

    def test_captured_tensors(self) -> None:
        def loss(logprobs: Any) -> Any:
            scaled = logprobs * CAPTURED
            return scaled.sum(), {}

        said = refusal(loss, line="scaled = logprobs * CAPTURED")
        assert "uses a tensor that is not one of its parameters" in said

    def test_parameters_of_modules(self) -> None:
        class Scaled(torch.nn.Module):  # type: ignore[misc,name-defined]
            __signature__ = LOGPROBS_ALONE

            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(1))

            def forward(self, logprobs: Any) -> Any:
                return (logprobs * self.scale).sum(), {}

        assert "uses a tensor that is not one of its parameters ('scale')" in refusal(Scaled())


# ------------------------------------------------------------------------------------------ output


class TestOutput:
    @pytest.mark.parametrize(
        "returned", ["logprobs.sum()", "(logprobs.sum(),)", "(logprobs.sum(), {}, {})", "None", "{}"]
    )
    def test_a_pair(self, returned: str) -> None:
        loss = eval(f"lambda logprobs: {returned}")
        assert "must return two things, (loss, metrics)" in refusal(loss)

    def test_a_computed_loss(self) -> None:
        assert "must return a loss that is computed from its parameters, got 1.0" in refusal(
            lambda logprobs: (1.0, {})
        )

    def test_a_dict_of_metrics(self) -> None:
        assert "must return its metrics as a dict" in refusal(lambda logprobs: (logprobs.sum(), []))
        assert "must return its metrics as a dict" in refusal(lambda logprobs: (logprobs.sum(), logprobs))

    @pytest.mark.parametrize(
        "name",
        [
            *("nll:sum", "custom/nll", "custom/nll:max", "custom/:sum", "custom/NLL:sum", "custom/a b:sum"),
            *(f"custom/{'a' * 65}:sum", "loss:sum", "custom/a:b:sum", "my/custom/a:sum", "custom/a:sum\n"),
        ],
    )
    def test_names_of_metrics(self, name: str) -> None:
        said = refusal(lambda logprobs: (logprobs.sum(), {name: logprobs.sum()}))
        assert f"returns the metric {name!r}; metrics are named custom/NAME:sum or custom/NAME:mean" in said

    def test_metric_names_must_be_text(self) -> None:
        said = refusal(lambda logprobs: (logprobs.sum(), {3: logprobs.sum()}))
        assert "metric 3" in said or "cannot be traced" in said

    def test_computed_metrics(self) -> None:
        said = refusal(lambda logprobs: (logprobs.sum(), {"custom/a:sum": 1.0}))
        assert "returns 1.0 as the metric 'custom/a:sum'; it must be a tensor that is computed" in said

    def test_error_falls_back_to_the_definition(self) -> None:
        def loss(logprobs: Any) -> Any:
            return logprobs.sum(), {"a": logprobs.sum()}

        refusal(loss, line="def loss(logprobs: Any) -> Any:")


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

    def test_unsupported_value_is_refused(self) -> None:
        handle = trace(lambda logprobs: (logprobs.sum(), {}), ONE, "session-1")
        node = next(each for each in handle.graph.graph.nodes if each.op == "call_method")
        node.args = (*node.args, 1j)
        with pytest.raises(
            InvalidInputError, match="create_custom_loss: mine passes a complex to sum, which cannot"
        ):
            encode_graph("mine", handle.graph)


def test_missing_torch_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "torch.fx", None)
    with pytest.raises(MissingExtraError, match=r"create_custom_loss: not installed.*\[torch\]"):
        trace(lambda logprobs: (logprobs.sum(), {}), ONE, "session-1")


def test_partial_functions() -> None:
    def scaled(logprobs: Any, scale: float) -> Any:
        return logprobs.sum() * scale, {}

    with pytest.raises(InvalidInputError, match="scale"):
        trace(functools.partial(scaled, scale=2.0), ONE, "session-1")
