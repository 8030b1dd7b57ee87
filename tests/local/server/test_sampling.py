"""Samplers and samples over HTTP."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.clock import FakeClock
from support.embedded import BASE, PROTO, Running, running
from support.raising import raising

from tinker_sync.local import tiny
from tinker_sync.local.store import StoreError
from tinker_sync.wire.proto.samples import decode_sample_response


@pytest.fixture
def sampler(server: Running) -> str:
    made: str = server.sampler(server.session()).json()["sampling_session_id"]
    return made


def tokens(server: Running, promise: dict[str, str]) -> list[list[int]]:
    return [each["tokens"] for each in server.result(promise["request_id"])["sequences"]]


def test_a_sampler_is_made_once(server: Running) -> None:
    session = server.session()
    assert server.sampler(session).json() == server.sampler(session).json()
    assert server.sampler(session, base_model="no/model").status == 409  # the number is used
    found = server.get(f"/samplers/{session}:sample:0").json()
    assert (found["base_model"], found.get("model_path")) == (BASE, None)
    assert server.get("/samplers/nobody").status == 404


def test_a_sampler_that_found_the_disk_full_is_made_by_the_repeated_request(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = server.session()
    with monkeypatch.context() as patch:
        patch.setattr(server.store, "add_sampler", raising(StoreError("full", "the disk is full")))
        assert server.sampler(session).status == 507
    assert f"{session}:sample:0" not in server.app.service.samplers
    made = server.sampler(session).json()["sampling_session_id"]
    assert server.get(f"/samplers/{made}").json()["base_model"] == BASE


def test_a_repeated_request_gets_its_sampler_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        session = server.session()
        body = {"model_id": server.model(session), "path": "a", "seq_id": 1}
        path = server.result_of("/save_weights_for_sampler", body)["path"]
        unsaved = {"model_id": body["model_id"], "sampling_session_seq_id": 2, "seq_id": 2}
        server.result_of("/save_weights_for_sampler", unsaved)
        made = [server.sampler(session, 0).json(), server.sampler(session, 1, model_path=path).json()]
    with running(tmp_path) as server:
        server.sampled(made[1]["sampling_session_id"], 0)  # now the server has made it again from its record
        assert [server.sampler(session, 0).json(), server.sampler(session, 1, model_path=path).json()] == made
        assert server.sampler(session, 2).status == 409  # the number of unsaved weights
    with running(tmp_path) as server:
        assert server.sampler(session, 1).status == 409  # that of another sampler
        server.sampled(made[1]["sampling_session_id"], 0)
        assert server.sampler(session, 1).status == 409


def test_requests_for_one_sampler_at_once_share_the_failure(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, begun, go_on = server.session(), threading.Event(), threading.Event()

    def fail_late(*_: Any, **__: Any) -> None:
        begun.set()
        assert go_on.wait(120)
        raise StoreError("full", "the disk is full")

    monkeypatch.setattr(server.store, "add_sampler", fail_late)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.sampler, session)
        assert begun.wait(120)
        second = pool.submit(server.sampler, session)
        go_on.set()
        assert [each.result(120).status for each in (first, second)] == [507, 507]


@pytest.mark.parametrize(
    ("source", "status", "says"),
    [
        ({"base_model": "no/model"}, 400, "no/model"),
        ({"model_path": "nonsense"}, 400, "tinker://"),
        ({"model_path": "tinker://a/b/c"}, 400, "tinker://"),
        ({"model_path": "tinker://nobody/sampler_weights/x"}, 404, "nobody"),
        ({"model_path": "tinker://nobody/weights/x"}, 400, "sampler_weights"),
        ({"model_path": None}, 400, "base_model"),
    ],
)
def test_unknown_sources_are_refused(server: Running, source: dict[str, str], status: int, says: str) -> None:
    reply = server.sampler(server.session(), **source)
    assert (reply.status, says in reply.detail) == (status, True), reply


def test_a_repeated_sample_has_its_old_promise(server: Running, sampler: str) -> None:
    one, two = server.sample(sampler, 0), server.sample(sampler, 0)
    assert one == two
    assert server.sample(sampler, 1)["request_id"] != one["request_id"]
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "prompt": {"chunks": []},
        "sampling_params": {"max_tokens": 1},
    }
    assert server.post("/asample", body).status == 409


def test_sequences_have_ids_that_differ(server: Running, sampler: str) -> None:
    promise = server.sample(sampler, 0, num_samples=3)
    assert len(set(promise["sample_sequence_ids"])) == 3
    found = server.result(promise["request_id"])["sequences"]
    assert [each["sequence_id"] for each in found] == promise["sample_sequence_ids"]


def test_results_come_in_either_form(server: Running, sampler: str) -> None:
    options = {"prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    request = server.sample(sampler, 0, [1, 2, 3, 4], params={"seed": 1}, **options)["request_id"]
    reply = server.retrieve(request, accept=PROTO)
    proto, plain = decode_sample_response(reply.body), server.result(request)
    assert plain["sequences"][0]["tokens"] == proto.sequences[0].tokens
    assert plain["prompt_logprobs"][0] is None
    assert np.allclose(plain["prompt_logprobs"][1:], proto.prompt_logprobs[1:])
    assert proto.topk_prompt_logprobs[0] is None
    assert [len(row or ()) for row in proto.topk_prompt_logprobs[1:]] == [2, 2, 2]


def test_a_prompt_seen_before_is_not_computed_again(server: Running, sampler: str) -> None:
    prompt = list(range(60, 160))
    first = server.sampled(sampler, 0, prompt)
    second = server.sampled(sampler, 1, prompt)
    assert first.get("prompt_cache_hit_tokens", 0) < 10
    assert second["prompt_cache_hit_tokens"] >= 99


def test_the_end_of_a_text_stops_by_default(server: Running, sampler: str) -> None:
    ends = server.app.service.host.models[BASE].end_tokens
    params = {"max_tokens": 200, "seed": 3, "temperature": 1.3}
    free = tokens(server, server.sample(sampler, 0, params={**params, "stop": []}, num_samples=8))
    held = tokens(server, server.sample(sampler, 1, params=params, num_samples=8))
    assert any(ends & set(each) for each in free)
    assert all(len(each) == 200 for each in free)
    for with_end, without in zip(held, free, strict=True):
        cut = next((place + 1 for place, token in enumerate(without) if token in ends), 200)
        assert with_end == without[:cut]


def test_stop_texts_are_looked_for_across_tokens(server: Running, sampler: str) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny.directory() / "tokenizer.json"))
    prompt = tokenizer.encode("The ").ids
    params = {"max_tokens": 60, "temperature": 0.0, "stop": []}
    free = tokens(server, server.sample(sampler, 0, prompt, params=params))[0]
    text = tokenizer.decode(free)
    assert len(text) > 30
    stop = text[14:20]
    result = server.sampled(sampler, 1, prompt, params={**params, "stop": stop})["sequences"][0]
    assert result["stop_reason"] == "stop"
    assert stop in tokenizer.decode(result["tokens"])
    assert stop not in tokenizer.decode(result["tokens"][:-1])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"params": {"max_tokens": 0}}, "max_tokens"),
        ({"params": {"max_tokens": 10**6}}, "max_tokens"),
        ({"params": {"top_k": 0}}, "top_k"),
        ({"num_samples": 0}, "num_samples"),
        ({"num_samples": 5_000_000}, "num_samples"),
        ({"num_samples": 65_537}, "num_samples"),
        ({"topk_prompt_logprobs": 10**7}, "topk_prompt_logprobs"),
        ({"prompt_alt_tokens_k": 10**7}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "prompt_logprobs_last_n"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs"),
        ({"tokens": [10**6]}, "prompt"),
        (
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [1, 1]}},
            "target_prompt_logprobs",
        ),
    ],
)
def test_impossible_samples(server: Running, sampler: str, options: dict[str, object], says: str) -> None:
    failed = server.sampled(sampler, 0, **options)  # type: ignore[arg-type]
    assert failed["category"] == "user"
    assert says in failed["error"]


def test_a_sample_that_no_memory_is_enough_for_has_an_outcome(server: Running, sampler: str) -> None:
    targets = {"data": [1], "dtype": "int64", "shape": [2, 10**14]}
    sparse = {"sparse_crow_indices": [0, 1, 1], "sparse_col_indices": [0]}
    failed = server.sampled(sampler, 0, [1, 2, 3], target_prompt_logprobs=targets | sparse)
    assert failed == {"error": "there is not enough memory for this request", "category": "server"}


def test_without_a_limit_a_sample_may_fill_the_context(server: Running, sampler: str) -> None:
    body = {
        "sampling_session_id": sampler,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(range(1, 300)) * 13}]},
        "sampling_params": {"stop": [], "seed": 1},
    }
    promise = server.ok("/asample", body)
    most = server.app.service.host.models[BASE].config.max_positions
    assert [len(each) for each in tokens(server, promise)] == [most - 299 * 13]


def test_a_sample_of_an_unknown_sampler_is_refused(server: Running) -> None:
    body = {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": "nobody", "seq_id": 0}
    assert server.post("/asample", body).status == 404


def test_older_clients_name_the_model_in_each_request(server: Running) -> None:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
    body = {"base_model": BASE, "prompt": prompt, "sampling_params": {"max_tokens": 3, "seed": 1}}
    one, two = (tokens(server, server.ok("/asample", body)) for _ in range(2))
    assert one == two
    free = {**body, "sampling_params": {"max_tokens": 12}}
    assert tokens(server, server.ok("/asample", free)) != tokens(server, server.ok("/asample", free))


def test_a_cancelled_sample_ends_at_once(server: Running, sampler: str) -> None:
    prompt = list(range(1, 100))
    params = {"max_tokens": 3900, "stop": [], "seed": 1}
    promise = server.sample(sampler, 0, prompt, params=params, num_samples=16)
    quick = server.sample(sampler, 1, params={"max_tokens": 2})
    assert server.ok("/cancel_future", {"request_id": promise["request_id"]}) == {}
    failed = server.result(promise["request_id"])
    assert (failed["category"], "cancelled" in failed["error"]) == ("user", True)
    assert len(tokens(server, quick)[0]) <= 2
    assert server.ok("/cancel_future", {"request_id": quick["request_id"]}) == {}  # done: left as it is
    worker = server.app.service.host._sampler
    for _ in range(500):  # the server has stopped its computation, which would take many seconds
        if not (worker._handles or worker._samplers[BASE].busy):
            break
        threading.Event().wait(0.002)
    assert not worker._handles
    assert not worker._samplers[BASE].busy
    assert tokens(server, quick)


def test_a_sample_that_the_end_of_the_server_cuts_off_has_no_outcome(tmp_path: Path) -> None:
    """The client takes it again, as after a crash. A pass fails, because its model is lost."""
    with running(tmp_path) as server:
        service, session = server.app.service, server.session()
        sampler = server.sampler(session).json()["sampling_session_id"]
        long = {"max_tokens": 600, "stop": []}
        cut = server.sample(sampler, 0, params=long, num_samples=64)["request_id"]
        begun = threading.Event()

        def blocked(_: object) -> None:
            begun.set()
            while not service.closing:
                threading.Event().wait(0.002)

        model = server.model(session)
        service.host.train(model, blocked)
        assert begun.wait(120)
        lost = server.pass_(model, 1).json()["request_id"]
        promises = [service.promises.get(each) for each in (cut, lost)]
    assert promises[0].outcome is None
    assert promises[1].outcome.error == "the server is shutting down"


def test_all_of_a_sampler_are_asked_for_at_once(tmp_path: Path) -> None:
    with running(tmp_path, sample_use_retrieve_futures=True, hold_s=10) as server:
        sampler = server.sampler(server.session()).json()["sampling_session_id"]
        counter = server.ok("/join_sampling_session", {"sampling_session_id": sampler})["client_counter"]
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
        found: list[dict[str, object]] = []

        def ask() -> None:
            found.append(server.ok("/retrieve_futures", {"target": target}))

        asking = threading.Thread(target=ask)
        asking.start()
        of_clone = server.sample(sampler, counter * 10**9)  # a sample of the clone, not of the first process
        first = server.sample(sampler, 0)["request_id"]
        asking.join(120)
        assert [each["request_id"] for each in found[0]["completions"]] == [first]  # type: ignore[attr-defined]
        failed = server.sample(sampler, 1, params={"max_tokens": 0})["request_id"]
        asked = {"target": target, "prev_cursor": found[0]["cursor"], "retrieved_request_ids": [first]}
        second = server.ok("/retrieve_futures", asked)
        assert [(each["state"], each["request_id"]) for each in second["completions"]] == [("failed", failed)]
        quiet = {**asked, "prev_cursor": second["cursor"], "timeout": 0.01}
        assert server.ok("/retrieve_futures", quiet) == {"completions": [], "cursor": second["cursor"]}
        theirs = {**target, "cloned_sampler_id": counter}
        of_them = server.ok("/retrieve_futures", {"target": theirs})["completions"]
        assert [each["request_id"] for each in of_them] == [of_clone["request_id"]]


@pytest.mark.parametrize("set_back_s", [0, 3600])
def test_a_client_hears_of_its_samples_after_a_restart(tmp_path: Path, set_back_s: int) -> None:
    """The client keeps its cursor, and the clock may have been set back meanwhile."""
    asked = {"prev_cursor": 0, "timeout": 0}
    for number, clock in enumerate((FakeClock(), FakeClock(time_s=FakeClock().time() + 1 - set_back_s))):
        with running(tmp_path, clock=clock, sample_use_retrieve_futures=True) as server:
            if not number:
                sampler = server.sampler(server.session()).json()["sampling_session_id"]
                asked["target"] = {"type": "sampling_session", "sampling_session_id": sampler}
            for seq_id in range(3 * number, 3 * number + 3):
                request_id = server.sample(sampler, seq_id)["request_id"]
                server.result(request_id)
                told = server.ok("/retrieve_futures", asked)
                asked |= {"prev_cursor": told["cursor"], "retrieved_request_ids": [request_id]}
                assert [each["request_id"] for each in told["completions"]] == [request_id]


def test_processes_that_join_before_and_after_a_restart_have_different_numbers(tmp_path: Path) -> None:
    given = []
    for number in range(2):
        with running(tmp_path) as server:
            if not number:
                sampler = server.sampler(server.session()).json()["sampling_session_id"]
            for _ in range(2):
                joined = server.ok("/join_sampling_session", {"sampling_session_id": sampler})
                given.append(joined["client_counter"])
    assert len(set(given)) == 4


@pytest.mark.parametrize(("hold_s", "timeout"), [(600, 0), (0.01, 600)])  # or the test times out
def test_the_shorter_time_of_server_and_question_counts(
    tmp_path: Path, hold_s: float, timeout: float
) -> None:
    with running(tmp_path, sample_use_retrieve_futures=True, hold_s=hold_s) as server:
        sampler = server.sampler(server.session()).json()["sampling_session_id"]
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
        asked = {"target": target, "prev_cursor": 0, "timeout": timeout, "retrieved_request_ids": []}
        assert server.ok("/retrieve_futures", asked) == {"completions": [], "cursor": 0}
        request_id = server.sample(sampler, 0)["request_id"]
        server.result(request_id)
        told = server.ok("/retrieve_futures", asked)
        assert [each["request_id"] for each in told["completions"]] == [request_id]
        asked |= {"prev_cursor": told["cursor"], "retrieved_request_ids": [request_id]}
        assert server.ok("/retrieve_futures", asked) == {"completions": [], "cursor": told["cursor"]}


def test_requests_of_all_clients_are_computed_together(server: Running) -> None:
    """A short sample of one client ends before a long sample that another client began earlier."""
    one, two = (server.sampler(server.session()).json()["sampling_session_id"] for _ in range(2))
    slow = server.sample(one, 0, params={"max_tokens": 600, "stop": [], "seed": 1})
    quick = server.sample(two, 0, params={"max_tokens": 2, "stop": []})
    assert len(tokens(server, quick)[0]) == 2
    service = server.app.service
    slow_promise = service.promises.get(slow["request_id"])
    assert slow_promise.outcome is None
    assert len(tokens(server, slow)[0]) == 600
