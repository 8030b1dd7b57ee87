"""`create_custom_loss` and its handles: the whole client against a stub server."""

from __future__ import annotations

from typing import Any

import pytest
from support.custom_losses import PATIENCE_S, arrived, data, world
from support.tinker_stub import Answer, Stub, _fields

from tinker_sync import types
from tinker_sync.errors import (
    InvalidInputError,
    RequestFailedError,
    UnprocessableEntityError,
)
from tinker_sync.losses import LossHandle

pytest.importorskip("torch")

SERVER_SIDE = {"custom_loss_server_side": True}


def nll(logprobs: Any, weights: Any) -> Any:
    loss = -(logprobs * weights).sum()
    return loss, {"custom/nll:sum": loss, "custom/nll:mean": loss}


RANKS: Any = {"logprobs": 1, "weights": 1}


def make(trainer: Any, fn: Any = nll, ranks: Any = None, **options: Any) -> LossHandle:
    made: LossHandle = trainer.service.create_custom_loss(fn, ranks or RANKS, **options).result(PATIENCE_S)
    return made


def weighted(count: int) -> list[types.Datum]:
    return [
        types.Datum(
            each.model_input,
            {**each.loss_fn_inputs, "weights": [1.0, 0.5], "rewards": types.TensorData([1.0], "float32")},
        )
        for each in data(count)
    ]


def sent_loss(stub: Stub) -> tuple[Any, Any]:
    """Return the name of the loss in the last pass, and the setting `loss_id` if it has one."""
    fields = list(_fields(stub.asked("/forward_backward")[-1].body))
    name = next(octets.decode() for number, octets in fields if number == 4)
    settings = {}
    for number, octets in fields:
        if number != 4 and isinstance(octets, bytes) and b"loss_id" in octets:
            settings["loss_id"] = octets
    return name, settings


class TestHere:
    """Tests of losses that this process computes, because the server does not."""

    def test_handle_runs_between_two_passes(self) -> None:
        with world() as (stub, trainer):
            handle = make(trainer)
            assert handle.loss_id is None
            assert handle.session_id == "session-0"
            assert stub.asked("/create_custom_loss") == []
            output = trainer.forward_backward_custom(weighted(2), handle).result(PATIENCE_S)
            assert arrived(stub) == ["1 forward", "2 backward"]
            losses = [0.01 + 0.02 / 2, 0.02 + 0.03 / 2]
            assert output.metrics["loss:sum"] == pytest.approx(sum(losses))
            assert output.metrics["custom/nll:sum"] == pytest.approx(sum(losses))
            assert output.metrics["custom/nll:mean"] == pytest.approx(sum(losses) / 2)
            assert output.metrics["surrogate_loss:sum"] == pytest.approx(sum(losses))

    def test_forward_backward_accepts_a_handle(self) -> None:
        with world() as (stub, trainer):
            handle = make(trainer)
            output = trainer.forward_backward(weighted(1), handle).result(PATIENCE_S)
            assert "custom/nll:sum" in output.metrics
            assert arrived(stub) == ["1 forward", "2 backward"]
            for call in (
                lambda: trainer.forward(weighted(1), handle),
                lambda: trainer.forward_backward(weighted(1), handle, {"beta": 1.0}),
            ):
                with pytest.raises(TypeError, match="is for forward_backward, without loss_fn_config"):
                    call()

    def test_second_creation_is_refused(self) -> None:
        with world() as (_, trainer):
            make(trainer)
            with pytest.raises(InvalidInputError, match="already has nll with these inputs; keep its handle"):
                make(trainer)
            make(trainer, ranks={"logprobs": 2, "weights": 2})
            make(trainer, lambda logprobs: (logprobs.sum(), {}), {"logprobs": 1})


class TestOnTheServer:
    def test_stored_loss_is_used_by_id(self) -> None:
        with world(SERVER_SIDE) as (stub, trainer):
            handle = make(trainer)
            assert handle.loss_id == "loss-0"
            (asked,) = stub.asked("/create_custom_loss")
            body = asked.json()
            assert set(body) == {"session_id", "custom_loss_seq_id", "name", "inputs", "graph", "type"}
            assert (body["session_id"], body["custom_loss_seq_id"], body["name"]) == ("session-0", 0, "nll")
            assert body["inputs"] == [{"name": "logprobs", "rank": 1}, {"name": "weights", "rank": 1}]
            assert [node["op"] for node in body["graph"]["nodes"]] == [
                *("placeholder", "placeholder", "call_function", "call_method", "call_function", "output")
            ]
            (asked,) = [
                each
                for each in stub.asked("/retrieve_future")
                if each.headers["x-tinker-request-type"] == "CreateCustomLoss"
            ]
            output = trainer.forward_backward_custom(weighted(2), handle).result(PATIENCE_S)
            assert arrived(stub) == ["1 backward"]
            name, settings = sent_loss(stub)
            assert (name, b"loss-0" in settings["loss_id"]) == ("custom", True)
            sent = [
                datum for number, datum in _fields(stub.asked("/forward_backward")[-1].body) if number == 3
            ]
            assert all(b"rewards" in datum for datum in sent)
            assert "surrogate_loss:sum" not in output.metrics

    @pytest.mark.parametrize(
        ("path", "answer", "error"),
        [
            ("/create_custom_loss", Answer(422, {"detail": "no"}), UnprocessableEntityError),
            ("/retrieve_future", Answer(body={"error": "no", "category": "user"}), RequestFailedError),
        ],
        ids=["refused", "failed"],
    )
    def test_failed_loss_can_be_created_again(self, path: str, answer: Answer, error: Any) -> None:
        with world(SERVER_SIDE) as (stub, trainer):
            stub.script(path, answer)
            with pytest.raises(error):
                make(trainer)
            assert make(trainer).loss_id is not None

    def test_retry_keeps_the_number(self) -> None:
        with world(SERVER_SIDE) as (stub, trainer):
            stub.script("/create_custom_loss", Answer(503, {}), Answer(abort="after"))
            assert make(trainer).loss_id == "loss-1"
            bodies = {asked.body for asked in stub.asked("/create_custom_loss")}
            assert len(bodies) == 1


class TestHandles:
    def test_handle_of_another_session_is_refused(self) -> None:
        with world() as (_, first):
            handle = make(first)
            with world() as (_, second):
                foreign = LossHandle(handle.name, handle.inputs, "session-9", handle.graph)
                for call in (second.forward_backward_custom, second.forward_backward):
                    with pytest.raises(
                        InvalidInputError, match="nll was made in session session-9, not in session-0"
                    ):
                        call(weighted(1), foreign)

    @pytest.mark.parametrize("flags", [{}, SERVER_SIDE], ids=["here", "server"])
    def test_unsuitable_data_are_refused(self, flags: dict[str, Any]) -> None:
        wide = types.Datum(
            types.ModelInput.from_ints([1, 2]),
            {
                "target_tokens": types.TensorData([1, 2], "int64"),
                "weights": types.TensorData([1.0, 1.0], "float32", [2, 1]),
            },
        )
        with world(flags) as (stub, trainer):
            handle = make(trainer)
            with pytest.raises(InvalidInputError) as caught:
                trainer.forward_backward_custom([*weighted(1), *data(1), wide], handle)
            assert caught.value.problems == (
                "data[1].loss_fn_inputs['weights']: is missing; the loss nll takes it",
                "data[2].loss_fn_inputs['weights']: has rank 2, the loss nll was made for weights of rank 1",
            )
            bare = types.Datum(types.ModelInput.from_ints([1]), {"weights": [1.0]})
            with pytest.raises(
                InvalidInputError, match=r"\['target_tokens'\]: is missing; the loss nll takes it"
            ):
                trainer.forward_backward_custom([bare], handle)
            candidates = types.Datum(
                types.ModelInput.from_ints([1]), {"target_tokens": [[1, 2]], "weights": [1.0]}
            )
            with pytest.raises(
                InvalidInputError, match="has rank 2, the loss nll was made for logprobs of rank 1"
            ):
                trainer.forward_backward_custom([candidates], handle)
            assert arrived(stub) == []
