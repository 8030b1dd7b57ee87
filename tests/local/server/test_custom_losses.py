"""Uploaded losses that are accepted or refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from support.embedded import running

from tinker_sync.local.server import custom_losses
from tinker_sync.local.server.custom_losses import check
from tinker_sync.local.server.problems import UserFault
from tinker_sync.types import CreateCustomLossRequest
from tinker_sync.wire import json as json_codec


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


def refusal(**changes: Any) -> str:
    with pytest.raises(UserFault) as caught:
        check(json_codec.from_plain(request(**changes), CreateCustomLossRequest))
    return str(caught.value)


def with_node(made: dict[str, Any]) -> list[dict[str, Any]]:
    return [*HEAD, *MIDDLE, made, OUTPUT]


def test_a_usual_loss_is_taken() -> None:
    check(json_codec.from_plain(request(), CreateCustomLossRequest))
    args = (ref("mul"), {"slice": [None, {"ref": "total"}, None]}, {"tuple": [1, {"float": "inf"}]})
    extra = node("call_function", "x", "torch.where", *args, dtype={"dtype": "float32"}, other=[ref("neg")])
    check(json_codec.from_plain(request(nodes=with_node(extra)), CreateCustomLossRequest))


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (node("call_module", "x", "layer"), "call_module is not taken"),
        (node("get_attr", "x", "weight"), "get_attr is not taken"),
        (node("call_function", "x", "os.system", "ls"), "os.system"),
        (node("call_function", "x", "builtins.eval", "1"), "eval"),
        (node("call_method", "x", "item", ref("mul")), "item"),
        (node("call_method", "x", "backward", ref("mul")), "backward"),
        (node("call_method", "x", "__reduce__", ref("mul")), "__reduce__"),
        (node("call_function", "x", "torch.exp", ref("later")), "later"),
        (node("call_function", "mul", "torch.exp", ref("neg")), "already is a node 'mul'"),
        (node("call_function", "x", "torch.exp", {"lambda": "x"}), "unknown form"),
        (node("call_function", "x", "torch.exp", {"ref": "neg", "dtype": "x"}), "unknown form"),
        (node("placeholder", "x", "x"), "placeholders"),
    ],
)
def test_nodes_that_are_refused(made: dict[str, Any], says: str) -> None:
    assert says in refusal(nodes=with_node(made))


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([], "the first is logprobs"),
        ([{"name": "weights", "rank": 1}], "the first is logprobs"),
        ([{"name": "logprobs", "rank": 0}], "1 or 2 dimensions"),
        ([INPUTS[0], {"name": "Bad", "rank": 1}], "lower-case"),
        ([INPUTS[0], INPUTS[0]], "different"),
        ([INPUTS[0], *({"name": f"x{n}", "rank": 1} for n in range(16))], "16"),
    ],
)
def test_inputs_that_are_refused(inputs: list[dict[str, Any]], says: str) -> None:
    assert says in refusal(inputs=inputs)


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (node("output", "output", "output", ref("neg")), "a loss and a dict"),
        (node("output", "output", "output", {"tuple": [ref("neg")]}), "a loss and a dict"),
        (node("output", "output", "output", {"tuple": [1.0, {"dict": {}}]}), "a loss and a dict"),
        (node("output", "output", "output", {"tuple": [ref("neg"), ref("neg")]}), "a dict of metrics"),
        (node("output", "output", "output", {"tuple": [ref("neg"), {"dict": {"nll": ref("neg")}}]}), "nll"),
        (
            node("output", "output", "output", {"tuple": [ref("neg"), {"dict": {"custom/a:sum": 1}}]}),
            "custom/a",
        ),
    ],
)
def test_outputs_that_are_refused(output: dict[str, Any], says: str) -> None:
    assert says in refusal(nodes=[*HEAD, *MIDDLE, output])


def test_a_graph_ends_once() -> None:
    assert "only output" in refusal(nodes=[*HEAD, *MIDDLE])
    assert "only output" in refusal(
        nodes=[*HEAD, OUTPUT | {"name": "first", "args": [[ref("logprobs"), {"dict": {}}]]}, *MIDDLE, OUTPUT]
    )


def test_too_large_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_losses, "MAX_NODES", 5)
    assert "at most 5" in refusal()


def test_over_http(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_losses, "COMPUTER", "tinker_sync.local.engine.nothing_like_it")
    with running(tmp_path) as server:
        session = server.session()
        one, two = (server.ok("/create_custom_loss", request(session_id=session)) for _ in range(2))
        assert one == two
        loss_id = server.result(one["request_id"])["loss_id"]
        assert server.post("/create_custom_loss", request(session_id=session, name="other")).status == 409
        assert server.post("/create_custom_loss", request(session_id="nobody")).status == 404
        assert (
            server.result_of(
                "/create_custom_loss", request(session_id=session, custom_loss_seq_id=1, inputs=[])
            )["category"]
            == "user"
        )
        model, other = server.model(session), server.model(server.session())
        for number, (run, config, says) in enumerate(
            [
                (model, {"loss_id": loss_id}, "does not compute them"),
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


def test_the_losses_of_a_released_session_leave_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(custom_losses, "COMPUTER", "tinker_sync.local.engine.nothing_like_it")
    with running(tmp_path) as server:
        service, sessions = server.app.service, [server.session() for _ in range(2)]
        ids = [
            server.result_of("/create_custom_loss", request(session_id=each))["loss_id"] for each in sessions
        ]
        assert list(service.losses) == ids
        # The event loop runs this before it reads the next request.
        service.loop.call_soon_threadsafe(service.release, sessions[0])
        assert server.get("/healthz").status == 200
        assert list(service.losses) == ids[1:]


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is there")
def test_without_torch_the_error_names_it(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        asked = request(session_id=server.session())
        failed = server.result_of("/create_custom_loss", asked)
    assert "torch" in failed["error"]
    assert "internal error" not in failed["error"]
