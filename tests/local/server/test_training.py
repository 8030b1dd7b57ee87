"""Numbered training requests over HTTP: order, repeats, refusals, and the end of models."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedded import BASE, PROTO, Running, running

from tinker_sync.local.engine.training import AdapterTrainer
from tinker_sync.local.server import training


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("training"), seed=1, hold_s=0.5) as made:
        made.model(made.session())  # its threads start here
        yield made


def ids(*replies: object) -> list[str]:
    return [reply.json()["request_id"] for reply in replies]  # type: ignore[attr-defined]


def test_the_order_of_the_numbers_counts_not_that_of_arrival(server: Running) -> None:
    """Two passes and a step that arrive in reverse order are carried out in the order of their numbers."""
    one, two = server.model(server.session()), server.model(server.session())
    step = {"learning_rate": 0.05}
    server.pass_(one, 1)
    server.pass_(one, 2, [9, 10, 11])
    server.optim(one, 3, **step)
    wanted = server.passed(one, 4).metrics
    probe = server.pass_(two, 4).json()["request_id"]
    server.optim(two, 3, **step)
    late = server.pass_(two, 2, [9, 10, 11]).json()["request_id"]
    reply = server.post("/retrieve_future", {"request_id": late}, x="y")
    assert reply.status == 408
    told = reply.json()
    assert told["queue_state"] == "paused_capacity"
    assert "seq_id 1" in told["queue_state_reason"]
    server.pass_(two, 1)
    assert server.output(probe).metrics == wanted


def test_a_repeated_request_has_its_old_promise_and_is_done_once(server: Running) -> None:
    model = server.model(server.session())
    replies = [server.pass_(model, 1) for _ in range(3)]
    assert len(set(ids(*replies))) == 1
    norm = server.result(ids(server.optim(model, 2, learning_rate=0.0))[0])["metrics"]["grad_norm"]
    other = server.model(server.session())
    server.pass_(other, 1)
    assert server.result(ids(server.optim(other, 2, learning_rate=0.0))[0])["metrics"]["grad_norm"] == norm
    again = server.optim(model, 2, learning_rate=0.0)
    assert server.result(ids(again)[0])["metrics"]["grad_norm"] == norm  # long after it was done


def test_a_number_for_two_things_is_refused(server: Running) -> None:
    model = server.model(server.session())
    server.pass_(model, 1)
    for reply in (server.pass_(model, 1, [1, 2, 3]), server.optim(model, 1, learning_rate=0.1)):
        assert reply.status == 409
        assert "number 1 was used" in reply.detail
        assert reply.headers["x-should-retry"] == "false"


def test_what_cannot_be_computed_fails_its_promise_and_takes_its_number(server: Running) -> None:
    model = server.model(server.session())
    failed = server.result(ids(server.pass_(model, 1, loss="none"))[0])
    assert failed["category"] == "user"
    assert "'none' is unknown" in failed["error"]
    failed = server.result(ids(server.pass_(model, 2, [1, 10**6]))[0])
    assert failed["category"] == "user"
    assert "data[0]" in failed["error"]
    other = {"optimizer_params": {"type": "muon", "lr": 1}, "model_id": model, "seq_id": 3}
    assert "adamw" in server.result_of("/optim_step", other)["error"]
    nan = server.result(ids(server.optim(model, 4, learning_rate=float("nan")))[0])
    assert (nan["category"], "learning_rate: must be finite" in nan["error"]) == ("user", True)
    norm = server.result(ids(server.optim(model, 5, learning_rate=0.1))[0])["metrics"]["grad_norm"]
    assert norm == 0.0  # nothing of the failed ones was kept


def test_results_come_in_either_form(server: Running) -> None:
    model = server.model(server.session())
    request = ids(server.pass_(model, 1))[0]
    proto = server.output(request)
    plain = server.result(request)
    assert plain["metrics"] == proto.metrics
    shown = np.array(plain["loss_fn_outputs"][0]["logprobs"]["data"], dtype=np.float32)
    assert shown.tolist() == proto.loss_fn_outputs[0]["logprobs"].to_numpy().tolist()


def test_large_results_are_announced_to_those_who_allow_it(tmp_path: Path) -> None:
    with running(tmp_path, metadata_over_bytes=50) as server:
        request = ids(server.pass_(server.model(server.session()), 1))[0]
        asked = {"request_id": request, "allow_metadata_only": True}
        told = server.post("/retrieve_future", asked, accept=PROTO).json()
        whole = server.post("/retrieve_future", {"request_id": request}, accept=PROTO)
    assert told == {"status": "complete_metadata", "response_payload_size": len(whole.body)}


def test_unknown_promises_are_refused(server: Running) -> None:
    [this] = ids(server.pass_(server.model(server.session()), 1))
    future = f"{this.rpartition('-')[0]}-{10**6}"
    for name in ("req-nonsense", "nonsense", "", "req-7", future, f"{this}²", this + "9" * 5000):
        assert server.retrieve(name).status == 404
    assert server.retrieve("req-00000000-5").status == 410  # of another server, or of before a restart
    assert server.post("/cancel_future", {"request_id": "req-nonsense"}).status == 404


def test_fetched_results_make_room_oldest_first(tmp_path: Path) -> None:
    with running(tmp_path, kept_results_bytes=1) as server:
        model = server.model(server.session())
        never, first, last = ids(*(server.pass_(model, number) for number in (1, 2, 3)))
        for _ in range(2):
            assert (
                server.retrieve(first).status == 200
            )  # one that is larger than all room stays until the next
        assert server.retrieve(last).status == 200
        assert [server.retrieve(each).status for each in (first, last, never)] == [410, 200, 200]


def test_two_models_are_two_lanes(server: Running) -> None:
    """A request that waits for a missing number does not delay requests of another model."""
    session = server.session()
    one, two = server.model(session, 0), server.model(session, 1)
    server.pass_(one, 5)
    assert server.passed(two, 1).metrics["loss:sum"] > 0


# ------------------------------------------------------------------------------------------ models
def test_a_model_is_made_once(server: Running) -> None:
    session = server.session()
    promises = [server.create_model(session) for _ in range(2)]
    assert promises[0] == promises[1]
    assert server.result(promises[0]["request_id"])["model_id"] == f"{session}:train:0"
    other = {"session_id": session, "model_seq_id": 0, "base_model": BASE, "lora_config": {"rank": 9}}
    assert server.post("/create_model", other).status == 409


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"base_model": "no/model"}, "no/model"),
        ({"optimizer_config": {"type": "dimuon", "version": 1}}, "dimuon"),
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": {"rank": 100_000}}, "rank"),
        (
            {"lora_config": {"rank": 2, "train_mlp": False, "train_attn": False, "train_unembed": False}},
            "at least one",
        ),
        ({"lora_config": {"rank": 0}}, "rank: 0 asks to train all weights"),
        ({"lora_config": None}, "lora_config: none asks to train all weights"),
    ],
)
def test_models_that_cannot_be_made(server: Running, changes: dict[str, object], says: str) -> None:
    body = {"session_id": server.session(), "model_seq_id": 0, "base_model": BASE, **changes}
    reply = server.post("/create_model", body)
    assert (reply.status, says in reply.detail) == (400, True), reply


def test_a_model_needs_an_existing_session(server: Running) -> None:
    body = {"session_id": "nobody", "model_seq_id": 0, "base_model": BASE}
    assert server.post("/create_model", body).status == 404


def test_a_model_can_be_dropped(server: Running) -> None:
    model = server.model(server.session())
    last = ids(server.pass_(model, 1))[0]
    assert server.result_of("/unload_model", {"model_id": model})["model_id"] == model
    assert server.output(last).metrics["loss:sum"] > 0
    reply = server.pass_(model, 2)
    assert (reply.status, "not in memory" in reply.detail) == (404, True)
    info = server.ok("/get_info", {"model_id": model})
    assert (info["model_name"], info["lora_rank"], info["is_lora"]) == (BASE, 2, True)


def test_what_waits_for_a_number_of_a_dropped_model_fails_at_once(tmp_path: Path) -> None:
    with running(tmp_path, hold_s=0.05, gap_patience_s=600.0) as server:
        model = server.model(server.session())
        early = ids(server.pass_(model, 2))[0]
        assert server.retrieve(early).status == 408
        assert server.result_of("/unload_model", {"model_id": model})["model_id"] == model
        reply = server.retrieve(early)
        assert (reply.status, reply.json().get("category")) == (200, "user"), reply
        assert "let go" in reply.json()["error"]


def test_many_at_once_from_many_threads(server: Running) -> None:
    """Eight threads train one model each, with requests in random order. All get the same losses."""
    session = server.session()
    models = [server.model(session, number) for number in range(8)]
    losses: dict[str, list[float]] = {}

    def work(model: str, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(6) + 1
        requests = {int(n): ids(server.pass_(model, int(n), [n + 1, n + 2, n + 3]))[0] for n in order}
        losses[model] = [server.output(requests[n]).metrics["loss:sum"] for n in range(1, 7)]

    threads = [threading.Thread(target=work, args=(model, seed)) for seed, model in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len({tuple(each) for each in losses.values()}) == 1
    assert len(losses) == 8


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


def test_numbers_of_models_that_nothing_can_hold_are_refused(server: Running) -> None:
    session = server.session()
    failed = server.result(server.create_model(session, 2**63)["request_id"])
    assert (failed["category"], "64 bits" in failed["error"]) == ("user", True)


def test_a_large_json_body_is_taken(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LARGE_BYTES", 1000)  # so that another thread decodes the body
    model = server.model(server.session())
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1] * 8}]},
        "loss_fn_inputs": {"target_tokens": {"data": [2] * 8, "dtype": "int64", "shape": [8]}},
    }
    given = {"data": [datum] * 60, "loss_fn": "cross_entropy"}
    promise = server.ok(
        "/forward_backward", {"model_id": model, "seq_id": 1, "forward_backward_input": given}
    )
    assert len(server.output(promise["request_id"]).loss_fn_outputs) == 60
