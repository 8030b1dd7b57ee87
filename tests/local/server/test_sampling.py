"""Samplers and samples over HTTP."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.embedded import BASE, PROTO, Running, base_model, running

from tinker_sync.local import tiny
from tinker_sync.local.engine.lora import LoraParams, LoraSettings
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


def test_a_sample_of_an_unknown_sampler_is_refused(server: Running) -> None:
    body = {"prompt": {"chunks": []}, "sampling_params": {}, "sampling_session_id": "nobody", "seq_id": 0}
    assert server.post("/asample", body).status == 404


def test_a_cancelled_sample_ends_at_once_and_makes_room(server: Running, sampler: str) -> None:
    """Both requests take all rows that are computed at once; the first one would take minutes."""
    long = {"max_tokens": 3900, "stop": [], "seed": 1}
    promise = server.sample(sampler, 0, params=long, num_samples=256)
    quick = server.sample(sampler, 1, params={"max_tokens": 2}, num_samples=256)
    assert server.ok("/cancel_future", {"request_id": promise["request_id"]}) == {}
    failed = server.result(promise["request_id"])
    assert (failed["category"], "cancelled" in failed["error"]) == ("user", True)
    assert len(tokens(server, quick)) == 256
    assert server.ok("/cancel_future", {"request_id": quick["request_id"]}) == {}  # done: left as it is
    assert len(tokens(server, quick)) == 256


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


PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


class Run:
    """A model that a test trains and saves, and the requests to its samplers."""

    def __init__(self, server: Running) -> None:
        self.server = server
        self.session = server.session()
        self.model = server.model(self.session)
        self._seq = self.saved = 0

    def seq(self) -> int:
        self._seq += 1
        return self._seq

    def learn(self) -> None:
        self.server.pass_(self.model, self.seq())
        self.server.optim(self.model, self.seq(), learning_rate=0.05)

    def save(self, kind: str | None) -> str:
        """Save the present weights for a sampler of this kind, and return the sampler's id."""
        body: dict[str, Any] = {"model_id": self.model, "sampling_session_seq_id": self.saved}
        self.saved += 1
        body |= {"seq_id": self.seq(), **({} if kind is None else {"kind": kind})}
        made: str = self.server.result_of("/save_weights_for_sampler", body)["sampling_session_id"]
        return made

    def scores(self, sampler: str, number: int | None = None) -> list[float]:
        """Return the log-probabilities of the prompt, by which a test recognises the weights of a sampler."""
        found: list[float] = self.server.sampled(sampler, number, PROMPT, prompt_logprobs=True)[
            "prompt_logprobs"
        ]
        return found


def test_an_inflight_save_moves_the_older_inflight_samplers_and_no_snapshot(server: Running) -> None:
    run = Run(server)
    run.learn()
    snapshot, unnamed, first = run.save("snapshot"), run.save(None), run.save("inflight")
    before = run.scores(first)
    assert run.scores(snapshot) == run.scores(unnamed) == before
    run.learn()
    later_snapshot = run.save("snapshot")
    assert run.scores(first) == before  # a snapshot moves no other sampler
    second = run.save("inflight")
    after = run.scores(second)
    assert after != before
    assert run.scores(first) == run.scores(later_snapshot) == after
    assert run.scores(snapshot) == run.scores(unnamed) == before
    run.learn()
    third = run.save("inflight")
    newest = run.scores(third)
    assert newest not in (before, after)
    assert run.scores(first) == run.scores(second) == newest
    assert run.scores(later_snapshot) == after


def test_an_inflight_save_looks_at_all_samplers_a_few_times_only(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may make a sampler at each step, and the event loop serves all calls meanwhile."""
    looks = 0

    class Counting(dict[str, Any]):
        def values(self) -> Any:
            nonlocal looks
            looks += 1
            return super().values()

    run = Run(server)
    monkeypatch.setattr(server.app.service, "samplers", Counting())
    for count in (2, 20):
        for _ in range(count):
            run.save("inflight")
        looks = 0
        run.save("inflight")
        assert 0 < looks <= 3


def test_models_do_not_move_the_samplers_of_each_other(server: Running) -> None:
    one, other = Run(server), Run(server)
    one.learn()
    sampler = one.save("inflight")
    before = one.scores(sampler)
    other.learn()
    other.learn()
    assert other.scores(other.save("inflight")) != before
    assert one.scores(sampler) == before


def test_a_repeated_inflight_save_moves_the_target_once(server: Running) -> None:
    run = Run(server)
    run.learn()
    body = {"model_id": run.model, "sampling_session_seq_id": 0, "seq_id": run.seq(), "kind": "inflight"}
    first = server.ok("/save_weights_for_sampler", body)
    run.learn()
    again = server.ok("/save_weights_for_sampler", body)
    assert again == first
    sampler = server.result(first["request_id"])["sampling_session_id"]
    before = run.scores(sampler)
    run.saved = 1
    assert run.scores(run.save("inflight")) != before


def test_the_adapter_unused_for_longest_leaves_memory_first(tmp_path: Path) -> None:
    size = LoraParams.zeros(base_model().config, LoraSettings(rank=2)).flat.nbytes
    with running(tmp_path, adapter_bytes=5 * size // 2) as server:
        run = Run(server)
        first, second = run.save(None), run.save(None)
        run.scores(first)
        third = run.save(None)  # there is room for two
        assert [len(run.scores(each)) for each in (first, third)] == [len(PROMPT)] * 2
        assert "have left memory" in server.sampled(second, None)["error"]


def test_samples_of_unsaved_weights_that_left_memory_fail_and_say_why(tmp_path: Path) -> None:
    with running(tmp_path, adapter_bytes=1) as server:
        session = server.session()
        model = server.model(session)
        samplers = []
        for number in range(2):
            unsaved = {"model_id": model, "sampling_session_seq_id": number, "seq_id": number + 1}
            samplers.append(server.result_of("/save_weights_for_sampler", unsaved)["sampling_session_id"])
        failed = server.sampled(samplers[0], 1)
        assert (failed["category"], "have left memory" in failed["error"]) == ("user", True), failed
        assert server.sampled(samplers[1], 1)["sequences"]
        saved = {"model_id": model, "path": "kept", "seq_id": 3}
        path = server.result_of("/save_weights_for_sampler", saved)["path"]
        kept = server.sampler(session, 2, model_path=path).json()["sampling_session_id"]
        for number in (1, 2):
            assert server.sampled(kept, number)["sequences"]  # out of its checkpoint
            server.sampled(samplers[1], number + 1)


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
