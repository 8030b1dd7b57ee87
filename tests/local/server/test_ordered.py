"""The order of numbered calls, and the numbers of calls that are refused or never arrive.

The server's patience for missing numbers is ten minutes in most tests, so a call that waits fails them.
"""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.embedded import API, KEY, PROTO, Reply, Running, pass_body, running

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
def test_the_calls_behind_a_refused_one_are_done_at_once(server: Running, model: str, refuse: Any) -> None:
    refuse(server, model, 1)
    done(server, server.pass_(model, 2))
    refuse(server, model, 4)  # the second chunk before the first
    done(server, server.pass_(model, 3))
    sixth = server.pass_(model, 6)
    refuse(server, model, 5)  # the first chunk after the second
    done(server, sixth)
    for number in (7, 8, 9):
        refuse(server, model, number)
    assert "grad_norm" in done(server, server.optim(model, 10, learning_rate=0.0))["metrics"]


@pytest.mark.parametrize("refuse", KEEPS_ITS_NUMBER.values(), ids=KEEPS_ITS_NUMBER)
def test_another_call_may_use_a_refused_number(server: Running, model: str, refuse: Any) -> None:
    refuse(server, model, 1)
    again = server.pass_(model, 1)
    done(server, again)
    refuse(server, model, 2)
    done(server, server.pass_(model, 3))
    late = server.pass_(model, 2)  # also after a later number was done
    done(server, late)
    assert server.pass_(model, 2).json() == late.json()  # the number now belongs to that call
    assert server.optim(model, 2).status == 409
    done(server, server.optim(model, 4, learning_rate=0.0))


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


def test_a_number_that_never_arrives_is_skipped_and_then_too_late(tmp_path: Path) -> None:
    with running(tmp_path, gap_patience_s=0.01) as server:
        model = server.model(server.session())
        assert optim(server, b"<html>").status == 422  # its number cannot be read
        done(server, server.pass_(model, 2))
        early = server.pass_(model, 5)
        done(server, server.pass_(model, 10**6))  # patience begins anew with each gap, however wide
        done(server, early)
        late = server.pass_(model, 3)
        assert (late.status, "too late" in late.detail) == (409, True)


def test_a_call_without_a_number_is_the_next(server: Running, model: str) -> None:
    probe = {"model_id": model, "adam_params": {"learning_rate": 0.0}}
    waiting = server.pass_(model, 2)
    assert server.result_of("/optim_step", probe)["metrics"]["grad_norm"] == 0.0
    done(server, server.pass_(model, 1))
    done(server, waiting)
    assert server.result_of("/optim_step", probe)["metrics"]["grad_norm"] > 0.0


def test_a_refused_call_does_not_prolong_the_wait_of_others(tmp_path: Path) -> None:
    with running(tmp_path, gap_patience_s=2.0, hold_s=0.0) as server:
        model = server.model(server.session())
        waiting = server.pass_(model, 3).json()["request_id"]
        while server.retrieve(waiting).status == 408:  # without end if each refusal begins the wait anew
            REFUSALS["wrong field"](server, model, 7)


def test_only_so_many_refused_numbers_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tinker_sync.local.server.lanes.REMEMBERED", 5)
    with running(tmp_path, gap_patience_s=600.0, hold_s=0.0) as server:
        model = server.model(server.session())
        for number in range(2, 9):
            REFUSALS["wrong field"](server, model, number)
        last = server.pass_(model, 9).json()["request_id"]
        server.passed(model, 1)
        assert "seq_id 2" in server.retrieve(last).json()["queue_state_reason"]
        for number in (2, 3):
            server.passed(model, number)
        server.output(last)


def test_a_held_poll_is_answered_when_its_result_is_there(tmp_path: Path) -> None:
    with running(tmp_path, gap_patience_s=600.0, hold_s=600.0) as server:
        model = server.model(server.session())
        body = json.dumps({"request_id": server.pass_(model, 2).json()["request_id"]})
        head = f"POST {API}/retrieve_future HTTP/1.1\r\nHost: h\r\nX-API-Key: {KEY}\r\n"
        with socket.create_connection(("127.0.0.1", server.port), PATIENCE_S) as line:
            line.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            server.get("/get_server_capabilities")  # the poll has arrived: the server reads in order
            server.pass_(model, 1)
            assert line.recv(100).split()[1] == b"200"
