"""Uploaded losses over HTTP. What a graph may do is tested in `engine/test_custom_graph`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support.embedded import running

from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.server import training


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def node(op: str, name: str, target: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"op": op, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


INPUTS = [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
HEAD = [node("placeholder", each["name"], each["name"]) for each in INPUTS]
MIDDLE = [
    node("call_function", "mul", "operator.mul", ref("logprobs"), ref("weights")),
    node("call_method", "total", "sum", ref("mul")),
    node("call_function", "neg", "operator.neg", ref("total")),
]
OUTPUT = node("output", "output", "output", {"tuple": [ref("neg"), {"dict": {"custom/nll:sum": ref("neg")}}]})


def request(**changes: Any) -> dict[str, Any]:
    nodes = changes.pop("nodes", [*HEAD, *MIDDLE, OUTPUT])
    return {
        "session_id": "s",
        "custom_loss_seq_id": 0,
        "name": "nll",
        "inputs": INPUTS,
        "graph": {"format": 1, "nodes": nodes},
        **changes,
    }


def compile_none(*_: object) -> Any:
    """Stand in for the compilation of a loss, which needs torch."""
    return AdapterTrainer.forward


def test_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "compile_custom_loss", compile_none)
    with running(tmp_path) as server:
        session = server.session()
        one, two = (server.ok("/create_custom_loss", request(session_id=session)) for _ in range(2))
        assert one == two
        loss_id = server.result(one["request_id"])["loss_id"]
        assert server.post("/create_custom_loss", request(session_id=session, name="other")).status == 409
        assert server.post("/create_custom_loss", request(session_id="nobody")).status == 404
        model, other = server.model(session), server.model(server.session())
        for number, (run, config, says) in enumerate(
            [
                (model, {}, "loss_id"),
                (model, {"loss_id": "nothing"}, "no loss 'nothing'"),
                (model, {"loss_id": loss_id, "more": 1.0}, "loss_id, and nothing else"),
                (other, {"loss_id": loss_id}, "no loss"),
            ],
            start=1,
        ):
            datum = {
                "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]},
                "loss_fn_inputs": {"target_tokens": {"data": [2, 3], "dtype": "int64"}},
            }
            given = {"data": [datum], "loss_fn": "custom", "loss_fn_config": config}
            body = {"model_id": run, "forward_backward_input": given}
            failed = server.result_of("/forward_backward", body)
            assert (failed["category"], says in failed["error"]) == ("user", True), (number, failed)


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is there")
def test_without_torch_the_error_names_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        asked = request(session_id=server.session())
        failed = server.result_of("/create_custom_loss", asked)
    assert "torch" in failed["error"]
    assert "internal error" not in failed["error"]
