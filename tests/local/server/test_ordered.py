"""Calls on a model do not wait for the sequence number of a refused call that can be read.

The server's patience for missing numbers is ten minutes here, so a call that waits fails the test.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.embedded import PROTO, Reply, Running, pass_body, running
from support.loops import in_a_loop

from tinker_sync.local.server.lanes import Lane, Step
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


def optim_body(model: str, seq_id: int | str, **more: Any) -> dict[str, Any]:
    return {"model_id": model, "seq_id": seq_id, "adam_params": {"learning_rate": 0.0}, **more}


def optim(server: Running, body: bytes, **headers: str) -> Reply:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return server.ask("POST", "/optim_step", body, {**JSON, **named})


def optim_json(model: str, seq_id: int) -> bytes:
    return json.dumps(optim_body(model, seq_id)).encode()


def save(server: Running, model: str, seq_id: int, **more: Any) -> Reply:
    return server.post("/save_weights_for_sampler", {"model_id": model, "seq_id": seq_id, **more})


def passed(server: Running, body: bytes, **headers: str) -> Reply:
    return server.post("/forward_backward", body, content_type=PROTO, **headers)


# The status, and the function that sends a call with a sequence number.
SENDS: dict[str, tuple[int, Callable[[Running, str, int], Reply]]] = {
    "named and inflight": (400, lambda server, *call: save(server, *call, path="a", kind="inflight")),
    "wrong field": (
        422,
        lambda server, *call: server.post("/optim_step", optim_body(*call, adam_params={"beta1": "x"})),
    ),
    "unknown kind": (422, lambda server, *call: save(server, *call, sampling_session_seq_id=0, kind="other")),
    # The server accepts this call, and its result is a failure.
    "unknown loss": (200, lambda server, *call: server.pass_(*call, loss="nonsense")),
}


def refusal(kind: str) -> Callable[[Running, str, int], None]:
    status, send = SENDS[kind]

    def refuse(server: Running, model: str, seq_id: int) -> None:
        assert send(server, model, seq_id).status == status

    return refuse


REFUSALS = {kind: refusal(kind) for kind in SENDS}
KEEPS_ITS_NUMBER = {kind: refuse for kind, refuse in REFUSALS.items() if kind != "unknown loss"}


@pytest.mark.parametrize("refuse", REFUSALS.values(), ids=REFUSALS)
class TestRefused:
    def test_the_next_number_is_done_at_once(self, server: Running, model: str, refuse: Any) -> None:
        done(server, server.pass_(model, 1))
        refuse(server, model, 2)
        done(server, server.pass_(model, 3))
        assert "grad_norm" in done(server, server.optim(model, 4, learning_rate=0.0))["metrics"]

    def test_the_first_number_of_all(self, server: Running, model: str, refuse: Any) -> None:
        refuse(server, model, 1)
        done(server, server.pass_(model, 2))

    def test_second_chunk_is_refused_before_the_first(self, server: Running, model: str, refuse: Any) -> None:
        refuse(server, model, 2)
        done(server, server.pass_(model, 1))
        done(server, server.optim(model, 3, learning_rate=0.0))

    def test_first_chunk_is_refused_after_the_second(self, server: Running, model: str, refuse: Any) -> None:
        second = server.pass_(model, 2)
        refuse(server, model, 1)
        done(server, second)
        done(server, server.optim(model, 3, learning_rate=0.0))

    def test_several_in_a_row(self, server: Running, model: str, refuse: Any) -> None:
        for number in (1, 2, 3):
            refuse(server, model, number)
        done(server, server.pass_(model, 4))


@pytest.mark.parametrize("refuse", KEEPS_ITS_NUMBER.values(), ids=KEEPS_ITS_NUMBER)
class TestUsedAgain:
    def test_the_next_call_gets_the_refused_number(self, server: Running, model: str, refuse: Any) -> None:
        done(server, server.pass_(model, 1))
        refuse(server, model, 2)
        done(server, server.pass_(model, 2))
        done(server, server.optim(model, 3, learning_rate=0.0))

    def test_also_when_a_later_number_was_done(self, server: Running, model: str, refuse: Any) -> None:
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


@pytest.mark.parametrize("key", ["", "tml-wrong"])
def test_a_refusal_without_a_key_changes_nothing(server: Running, model: str, key: str) -> None:
    second = server.pass_(model, 2)
    for body in (b"<html>", optim_json(model, 1)):
        assert server.ask("POST", "/optim_step", body, {**JSON, "X-API-Key": key}).status == 401
    assert server.app.service.promises.get(second.json()["request_id"]).waits_for
    done(server, server.pass_(model, 1))
    done(server, second)


def test_a_refused_call_without_a_number_leaves_none_behind(server: Running, model: str) -> None:
    assert server.post("/optim_step", {"model_id": model, "adam_params": {"beta1": "x"}}).status == 422
    second = server.pass_(model, 2)
    assert server.app.service.promises.get(second.json()["request_id"]).waits_for
    done(server, server.pass_(model, 1))
    done(server, second)


LONG = list(range(3, 900)) * 10
UNREADABLE: dict[str, tuple[int, Callable[[Running, str], Reply]]] = {
    "too large": (413, lambda server, model: passed(server, pass_body(model, 2, LONG))),
    "too large, unpacked": (
        413,
        lambda server, model: passed(
            server, gzip.compress(pass_body(model, 2, LONG)), content_encoding="gzip"
        ),
    ),
    "unknown packing": (
        415,
        lambda server, model: optim(server, optim_json(model, 2), Content_Encoding="br"),
    ),
    "damaged protobuf": (422, lambda server, model: passed(server, pass_body(model, 2)[:-7])),
    "damaged JSON": (422, lambda server, model: optim(server, optim_json(model, 2)[:-4])),
    "no valid number": (422, lambda server, model: server.post("/optim_step", optim_body(model, "many"))),
    "nothing readable": (422, lambda server, _: optim(server, b"<html>")),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_a_number_that_cannot_be_read_is_free_for_the_next_call(
    server: Running, model: str, kind: str
) -> None:
    done(server, server.pass_(model, 1))
    status, send = UNREADABLE[kind]
    assert send(server, model).status == status
    done(server, server.pass_(model, 2))
    done(server, server.optim(model, 3, learning_rate=0.0))


def test_a_number_that_cannot_be_read_is_skipped_like_one_that_never_arrives(tmp_path: Path) -> None:
    with running(tmp_path, gap_patience_s=0.01) as server:
        model = server.model(server.session())
        assert optim(server, b"<html>").status == 422
        done(server, server.pass_(model, 2))


# ------------------------------------------------------------------------------------------ lanes alone
def lane_of(order: list[int], patience_s: float = 600.0) -> Lane:
    async def run(step: Step) -> None:
        order.append(int(step.promise.request_id))

    return Lane(run, patience_s=patience_s)


def step(number: int) -> Step:
    async def work() -> None:
        """Do nothing; only the order of the steps matters."""

    return Step(Promise(str(number), "OptimStep"), work)


async def all_done(order: list[int], count: int) -> None:
    async def enough() -> None:
        while len(order) < count:
            await asyncio.sleep(0.001)

    await asyncio.wait_for(enough(), 120)


@in_a_loop
async def test_refused_calls_do_not_prolong_the_wait_of_others() -> None:
    order: list[int] = []
    lane = lane_of(order, patience_s=0.02)
    lane.add(3, b"3", step(3))

    async def refuse_again_and_again() -> None:
        while not order:
            for number in (0, 3, 7):
                lane.refuse(number)
            await asyncio.sleep(0.001)

    await asyncio.wait_for(refuse_again_and_again(), 120)
    assert order == [3]
    await lane.close()


@in_a_loop
async def test_an_endless_gap_costs_no_time() -> None:
    order: list[int] = []
    lane = lane_of(order)
    far = step(1)
    lane.add(10**15, b"far", far)
    lane.refuse(10**14)
    assert far.promise.waits_for == "waiting for seq_id 1 of this model, which has not arrived"
    lane.add(1, b"1", step(2))
    await all_done(order, 1)
    assert order == [2]
    assert far.promise.waits_for == "waiting for seq_id 2 of this model, which has not arrived"
    await lane.close()


def test_only_so_many_refused_numbers_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.local.server.lanes.REMEMBERED", 5)

    async def scenario() -> None:
        order: list[int] = []
        lane = lane_of(order)
        for number in range(2, 9):
            lane.refuse(number)
        last = step(9)
        lane.add(9, b"9", last)
        lane.add(1, b"1", step(1))
        assert last.promise.waits_for == "waiting for seq_id 2 of this model, which has not arrived"
        for number in (2, 3):
            lane.add(number, b"%d" % number, step(number))
        await all_done(order, 4)
        assert order == [1, 2, 3, 9]
        await lane.close()

    asyncio.run(scenario())
