"""Calls on a model never wait for the sequence number of a refused call.

The server's patience for missing numbers is ten minutes here, so a call that waits fails the test.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.embedded import PROTO, Reply, Running, pass_body, running

from tinker_sync.local.server.lanes import Lane, Step
from tinker_sync.local.server.problems import Refused
from tinker_sync.local.server.promises import Promise

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("ordered")
    with running(directory, seed=1, gap_patience_s=600.0, max_body_bytes=20_000) as made:
        made.model(made.session())
        yield made


@pytest.fixture
def model(server: Running) -> str:
    return server.model(server.session())


def done(server: Running, reply: Reply) -> Any:
    """Return the result of a promise, which must be ready at the first poll."""
    assert reply.status == 200, reply
    answer = server.retrieve(reply.json()["request_id"])
    assert answer.status == 200, answer
    return answer.json()


def optim_body(model: str, seq_id: int, **more: Any) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 0.0}, **more}


class Refusals:
    """Functions that each send a call with a sequence number, which the server refuses, and check the status.

    The result of the last call is a failure instead.
    """

    @staticmethod
    def r400_named_inflight(server: Running, model: str, seq_id: int) -> None:
        body = {"model_id": model, "path": "a", "seq_id": seq_id, "kind": "inflight"}
        assert server.post("/save_weights_for_sampler", body).status == 400

    @staticmethod
    def r401_wrong_key(server: Running, model: str, seq_id: int) -> None:
        body = json.dumps(optim_body(model, seq_id)).encode()
        assert server.ask("POST", "/optim_step", body, {**JSON, "X-API-Key": "tml-wrong"}).status == 401

    @staticmethod
    def r401_wrong_key_protobuf(server: Running, model: str, seq_id: int) -> None:
        headers = {"Content-Type": PROTO, "X-API-Key": ""}
        assert server.ask("POST", "/forward_backward", pass_body(model, seq_id), headers).status == 401

    @staticmethod
    def r413_too_large(server: Running, model: str, seq_id: int) -> None:
        body = pass_body(model, seq_id, list(range(3, 900)) * 10)
        assert server.post("/forward_backward", body, content_type=PROTO).status == 413

    @staticmethod
    def r413_too_large_json(server: Running, model: str, seq_id: int) -> None:
        assert server.post("/optim_step", optim_body(model, seq_id, colour="x" * 30_000)).status == 413

    @staticmethod
    def r413_too_large_unpacked(server: Running, model: str, seq_id: int) -> None:
        packed = gzip.compress(pass_body(model, seq_id, list(range(3, 900)) * 10))
        headers = {"Content-Type": PROTO, "Content-Encoding": "gzip"}
        assert server.ask("POST", "/forward_backward", packed, headers).status == 413

    @staticmethod
    def r415_unknown_packing(server: Running, model: str, seq_id: int) -> None:
        # The server cannot read the number of this call.
        body = json.dumps(optim_body(model, seq_id)).encode()
        assert server.ask("POST", "/optim_step", body[::-1], {**JSON, "Content-Encoding": "br"}).status == 415

    @staticmethod
    def r422_wrong_field(server: Running, model: str, seq_id: int) -> None:
        body = {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": "fast"}}
        assert server.post("/optim_step", body).status == 422

    @staticmethod
    def r422_unknown_kind(server: Running, model: str, seq_id: int) -> None:
        body = {"model_id": model, "seq_id": seq_id, "sampling_session_seq_id": 0, "kind": "other"}
        assert server.post("/save_weights_for_sampler", body).status == 422

    @staticmethod
    def r422_damaged_protobuf(server: Running, model: str, seq_id: int) -> None:
        body = pass_body(model, seq_id)[:-7]
        assert server.post("/forward_backward", body, content_type=PROTO).status == 422

    @staticmethod
    def r422_damaged_json(server: Running, model: str, seq_id: int) -> None:
        body = json.dumps(optim_body(model, seq_id)).encode()[:-4]
        assert server.ask("POST", "/optim_step", body, JSON).status == 422

    @staticmethod
    def r422_no_number(server: Running, model: str, seq_id: int) -> None:  # sends no valid number
        body = {"model_id": model, "seq_id": "many", "adam_params": {}}
        assert server.post("/optim_step", body).status == 422

    @staticmethod
    def r422_nothing_readable(server: Running, model: str, seq_id: int) -> None:
        assert server.ask("POST", "/optim_step", b"<html>", JSON).status == 422

    @staticmethod
    def unknown_loss(server: Running, model: str, seq_id: int) -> None:
        """Send a call that the server accepts, and whose result is a failure."""
        reply = server.pass_(model, seq_id, loss="nonsense")
        assert reply.status == 200


REFUSALS = [getattr(Refusals, name) for name in vars(Refusals) if not name.startswith("_")]
KEEPS_ITS_NUMBER = [each for each in REFUSALS if each is not Refusals.unknown_loss]


@pytest.mark.parametrize("refuse", REFUSALS, ids=lambda refuse: refuse.__name__)
class TestRefused:
    def test_the_next_number_is_done_at_once(self, server: Running, model: str, refuse: Any) -> None:
        done(server, server.pass_(model, 1))
        refuse(server, model, 2)
        done(server, server.pass_(model, 3))
        assert "grad_norm" in done(server, server.optim(model, 4, learning_rate=0.0))["metrics"]

    def test_the_first_number_of_all(self, server: Running, model: str, refuse: Any) -> None:
        refuse(server, model, 1)
        done(server, server.pass_(model, 2))

    def test_the_second_of_two_chunks_is_refused_before_the_first_comes(
        self, server: Running, model: str, refuse: Any
    ) -> None:
        refuse(server, model, 2)
        done(server, server.pass_(model, 1))
        done(server, server.optim(model, 3, learning_rate=0.0))

    def test_the_first_of_two_chunks_is_refused_after_the_second_came(
        self, server: Running, model: str, refuse: Any
    ) -> None:
        second = server.pass_(model, 2)
        refuse(server, model, 1)
        done(server, second)
        done(server, server.optim(model, 3, learning_rate=0.0))

    def test_several_in_a_row(self, server: Running, model: str, refuse: Any) -> None:
        for number in (1, 2, 3):
            refuse(server, model, number)
        done(server, server.pass_(model, 4))


@pytest.mark.parametrize("refuse", KEEPS_ITS_NUMBER, ids=lambda refuse: refuse.__name__)
class TestUsedAgain:
    def test_the_next_call_may_have_the_refused_number(
        self, server: Running, model: str, refuse: Any
    ) -> None:
        done(server, server.pass_(model, 1))
        refuse(server, model, 2)
        done(server, server.pass_(model, 2))
        done(server, server.optim(model, 3, learning_rate=0.0))

    def test_also_when_a_later_number_was_done_already(
        self, server: Running, model: str, refuse: Any
    ) -> None:
        refuse(server, model, 1)
        done(server, server.pass_(model, 2))
        again = server.pass_(model, 1)
        done(server, again)
        assert server.pass_(model, 1).json() == again.json()  # the number now belongs to that call
        assert server.optim(model, 1).status == 409
        done(server, server.optim(model, 3, learning_rate=0.0))


def test_a_model_that_is_not_there(server: Running, model: str) -> None:
    assert server.pass_("no-model", 1).status == 404
    done(server, server.pass_(model, 1))


def test_a_number_that_was_used_stays_used(server: Running, model: str) -> None:
    done(server, server.pass_(model, 1))
    assert server.optim(model, 1).status == 409
    done(server, server.optim(model, 2, learning_rate=0.0))
    assert server.pass_(model, 2).status == 409
    done(server, server.pass_(model, 3))


def test_a_refusal_without_a_key_that_names_no_model_changes_nothing(server: Running, model: str) -> None:
    second = server.pass_(model, 2)
    assert server.ask("POST", "/optim_step", b"<html>", {**JSON, "X-API-Key": "tml-wrong"}).status == 401
    assert server.app.service.promises.get(second.json()["request_id"]).waits_for
    done(server, server.pass_(model, 1))
    done(server, second)


def test_a_refused_call_without_a_number_leaves_none_behind(server: Running, model: str) -> None:
    assert server.post("/optim_step", {"model_id": model, "adam_params": {"beta1": "x"}}).status == 422
    second = server.pass_(model, 2)
    assert server.app.service.promises.get(second.json()["request_id"]).waits_for
    done(server, server.pass_(model, 1))
    done(server, second)


# ------------------------------------------------------------------------------------------ lanes alone


def lane_of(order: list[int]) -> Lane:
    async def run(step: Step) -> None:
        order.append(int(step.promise.request_id))

    return Lane(run, patience_s=600.0)


def step(number: int) -> Step:
    async def work() -> None:
        """Do nothing; only the order of the steps matters."""

    return Step(Promise(str(number), "OptimStep"), work)


async def worked_off(lane: Lane) -> None:
    while lane._worker is not None:
        await asyncio.sleep(0)


def test_one_lost_number_does_not_let_two_missing_ones_go() -> None:
    async def scenario() -> None:
        order: list[int] = []
        lane = lane_of(order)
        lane.add(3, b"3", step(3))
        lane.refuse(None)  # a refused call whose number, 1 or 2, could not be read
        await worked_off(lane)
        assert order == []
        lane.add(1, b"1", step(1))
        await worked_off(lane)
        assert order == [1, 3]
        assert lane.known(2, b"2") is None
        with pytest.raises(Refused):
            lane.known(1, b"another")
        await lane.close()

    asyncio.run(scenario())


def test_an_endless_gap_costs_no_time() -> None:
    async def scenario() -> None:
        order: list[int] = []
        lane = lane_of(order)
        lane.add(10**15, b"far", step(1))
        lane.refuse(None)
        lane.refuse(10**14)
        await worked_off(lane)
        assert order == []
        await lane.close()

    asyncio.run(scenario())


def test_only_so_many_refused_numbers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.local.server.lanes.REMEMBERED", 5)

    async def scenario() -> None:
        lane = lane_of([])
        for number in range(2, 100):
            lane.refuse(number)
        assert len(lane._refused) == 5
        await lane.close()

    asyncio.run(scenario())
