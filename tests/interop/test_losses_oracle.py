"""Traced losses against the reference client: the same graphs, the same handles, the same refusals."""

from __future__ import annotations

from typing import Any

import pytest
from support.traced_losses import RANKS

from tinker_sync.losses.create import encode_graph, trace
from tinker_sync.wire import json as wire_json

torch = pytest.importorskip("torch")

from tinker.lib.public_interfaces import custom_loss as theirs  # noqa: E402


def their_graph(fn: Any, ranks: Any) -> Any:
    return theirs.encode_graph(theirs.trace_loss(fn, ranks, "session-1")).model_dump(mode="json")


@pytest.mark.parametrize("fn", RANKS, ids=lambda fn: fn.__name__)
def test_graphs_are_equal(fn: Any) -> None:
    handle = trace(fn, RANKS[fn], "session-1")  # type: ignore[arg-type]
    assert wire_json.to_plain(encode_graph(handle.name, handle.graph)) == their_graph(fn, RANKS[fn])


CAPTURED = torch.ones(2)


def branches(logprobs: Any) -> Any:
    return (logprobs.sum() if logprobs.sum() > 0 else logprobs.mean()), {}


def refused() -> dict[str, tuple[Any, Any]]:
    one = {"logprobs": 1}
    p = "logprobs"
    return {
        "first parameter": (lambda weights: (weights.sum(), {}), {"weights": 1}),
        "default": (lambda logprobs, b=1: (logprobs.sum(), {}), {p: 1, "b": 0}),
        "keyword": (lambda logprobs, *, b: (logprobs.sum(), {}), {p: 1, "b": 0}),
        "name": (lambda logprobs, B: (logprobs.sum(), {}), {p: 1, "B": 0}),  # noqa: N803
        "ranks": (lambda logprobs: (logprobs.sum(), {}), {}),
        "scalar logprobs": (lambda logprobs: (logprobs.sum(), {}), {p: 0}),
        "branch": (branches, one),
        "item": (lambda logprobs: (logprobs.sum() * logprobs.sum().item(), {}), one),
        "backward": (lambda logprobs: (logprobs.sum().backward(), {}), one),
        "method": (lambda logprobs: (logprobs.summe(), {}), one),
        "captured": (lambda logprobs: ((logprobs * CAPTURED).sum(), {}), one),
        "no pair": (lambda logprobs: logprobs.sum(), one),
        "loss": (lambda logprobs: (1.0, {}), one),
        "metrics": (lambda logprobs: (logprobs.sum(), []), one),
        "metric's name": (lambda logprobs: (logprobs.sum(), {"a": logprobs.sum()}), one),
        "metric's value": (lambda logprobs: (logprobs.sum(), {"custom/a:sum": 1.0}), one),
    }


@pytest.mark.parametrize("case", refused())
def test_both_refuse(case: str) -> None:
    fn, ranks = refused()[case]
    with pytest.raises(ValueError, match=r"^create_custom_loss: ") as caught:
        trace(fn, ranks, "s")
    with pytest.raises(ValueError, match=r"^create_custom_loss: "):
        theirs.trace_loss(fn, ranks, "s")
    assert isinstance(caught.value, ValueError)
