"""A gateway keeps the exact tokens of what agents say by HTTP, and makes the data of it."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.agents import Agent, Sampled, Scripted
from support.chat_templates import ADD, TAGGED, THINKING

from tinker_sync import (
    ConfigurationError,
    InvalidInputError,
    SamplingClient,
    SamplingParams,
    ServiceClient,
)
from tinker_sync.gateway import Gateway, Trajectory, read_exchanges, to_trajectories

CHATS = int(os.environ.get("GATEWAY_CHATS", "40"))
"""Conversations of the crowd; at most 100 at once."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def sampled(trajectory: Trajectory) -> list[tuple[list[int], list[int]]]:
    return [(turn.prompt.tolist(), turn.tokens.tolist()) for turn in trajectory.turns]


def test_a_conversation_is_one_datum_of_what_was_sampled(gateway: Gateway, ledger: list[Sampled]) -> None:
    ledger.clear()
    with Agent(gateway) as agent:
        chat = [user("What is 23+45?")]
        assert agent.say(chat, temperature=0)["content"] == "23+45=68"
        chat.append(user("What is 71-38?"))
        agent.say(chat)
    [trajectory] = gateway.trajectories()
    assert [(list(prompt), list(tokens)) for prompt, tokens, _ in ledger] == sampled(trajectory)
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    first, second = trajectory.turns
    assert second.prompt.tolist()[: len(first.row)] == first.row.tolist()
    datum = trajectory.datum([1.0, -1.0])
    assert datum.loss_fn_inputs["target_tokens"].tolist() == second.row.tolist()[1:]
    weights = datum.loss_fn_inputs["advantages"].tolist()
    assert (weights.count(1.0), weights.count(-1.0)) == (len(first.tokens), len(second.tokens))
    kept = [logprob for logprob in datum.loss_fn_inputs["logprobs"].tolist() if logprob]
    assert kept == [logprob for *_, logprobs in ledger for logprob in logprobs if logprob]


def converse(gateway: Gateway, number: int) -> None:
    """Talk for up to three turns, as one of many agents; some of them say the same."""
    rng = random.Random(number // 2)
    chat = [user(f"What is {rng.randrange(9)}+{rng.randrange(9)}?")]
    with Agent(gateway, f"pair {number}" if number % 3 == 0 else "") as agent:
        for _ in range(rng.randrange(1, 4)):
            agent.say(chat, seed=rng.randrange(5), temperature=rng.choice([0, 1, 2]))
            chat.append(user(rng.choice(["Sure?", "And now?"])))


def test_a_crowd_gets_what_the_engine_has_sampled(gateway: Gateway, ledger: list[Sampled]) -> None:
    ledger.clear()
    with ThreadPoolExecutor(min(100, CHATS)) as agents:
        list(agents.map(lambda number: converse(gateway, number), range(CHATS)))
    trajectories = gateway.trajectories()
    assert len(trajectories) == CHATS
    kept = [
        (tuple(turn.prompt.tolist()), tuple(turn.tokens.tolist()), tuple(turn.sequence.logprobs or ()))
        for trajectory in trajectories
        for turn in trajectory.turns
    ]
    assert sorted(kept) == sorted(ledger)
    for trajectory in trajectories:
        datum = trajectory.datum(1.0)
        row = [datum.model_input.to_ints()[0], *datum.loss_fn_inputs["target_tokens"].tolist()]
        assert row == trajectory.turns[-1].row.tolist()
        weights = [0.0, *datum.loss_fn_inputs["advantages"].tolist()]
        tokens = [token for token, weight in zip(row, weights, strict=True) if weight]
        assert tokens == [token for turn in trajectory.turns for token in turn.tokens.tolist()]


def test_results_of_tools_have_no_weight(sampling: SamplingClient) -> None:
    with sampling.endpoint(chat_template=TAGGED) as gateway, Agent(gateway) as agent:
        chat: list[Any] = [user("What is 2+3?")]
        agent.say(chat, tools=[ADD], max_tokens=6)
        call = {"id": "call-1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
        chat[-1] = {"role": "assistant", "content": None, "tool_calls": [call]}  # not what was sampled
        chat.append({"role": "tool", "tool_call_id": "call-1", "content": "5"})
        agent.say(chat, tools=[ADD], max_tokens=6)
        chat += [user("Sure?")]
        agent.say(chat, tools=[ADD], max_tokens=6)
        other, trajectory = gateway.trajectories()
        assert len(other.turns) == 1
        text = sampling.get_tokenizer().decode(trajectory.turns[0].prompt.tolist())
        assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in text
        assert "<tool_response>5</tool_response>" in text
        assert len(trajectory.datum(1.0).loss_fn_inputs["advantages"].to_numpy().nonzero()[0]) == sum(
            len(turn.tokens) for turn in trajectory.turns
        )


def test_reasoning_that_an_agent_drops_stays_in_the_tokens() -> None:
    call = '<tool_call>{"name":"add","arguments":{"b":3,"a":2}}</tool_call>'
    scripted = Scripted(f"<think>\nI add.\n</think>\n\n{call}", "<think>\nDone.\n</think>\n\n5", "Yes.")
    with Gateway(scripted, chat_template=THINKING) as gateway, Agent(gateway) as agent:
        chat = [user("2 + 3?")]
        said = agent.say(chat, tools=[ADD])
        assert said.pop("reasoning_content") == "I add."
        said["tool_calls"][0]["function"]["arguments"] = '{"a": 2, "b": 3}'  # as other JSON of the same call
        chat.append({"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"})
        answer = agent.say(chat, tools=[ADD])
        assert (answer.pop("reasoning_content"), answer["content"]) == ("Done.", "5")
        chat.append(user("Sure?"))  # from here on, the template leaves the reasoning out
        agent.say(chat, tools=[ADD])
        [trajectory] = gateway.trajectories()
    first, second, third = trajectory.turns
    assert second.extends
    assert second.prompt.tolist()[: len(first.row)] == first.row.tolist()
    assert not third.extends
    assert len(trajectory.data(1.0)) == 2


def test_answers_that_are_continued_twice_are_trained_once(gateway: Gateway) -> None:
    with Agent(gateway) as agent:
        chat = [user("What is 1+1?")]
        agent.say(chat)
        for question in ("Sure?", "Why?"):
            agent.say([*chat, user(question)])
    main, branch = gateway.trajectories()
    assert (len(main.turns), len(branch.turns)) == (2, 1)
    assert branch.turns[0].prompt.tolist()[: len(main.turns[0].row)] == main.turns[0].row.tolist()
    assert [message["content"] for message in branch.messages[::2]] == ["What is 1+1?", "Why?"]


def test_choices_are_trajectories(gateway: Gateway) -> None:
    with Agent(gateway) as agent:
        answer = agent.chat([user("What is 1+1?")], n=3, temperature=2)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    exchanges = gateway.exchanges()
    assert [exchange.id for exchange in exchanges] == [f"{answer['id']}-{index}" for index in range(3)]
    assert len(gateway.trajectories()) == 3
    for exchange, choice in zip(exchanges, answer["choices"], strict=True):
        assert exchange.turn.message["content"] == choice["message"]["content"]


def test_labels_keep_equal_chats_apart(gateway: Gateway) -> None:
    for label in ("a/v1/b", "/", "c d"):
        with Agent(gateway, label) as agent:
            chat = [user("What is 1+1?")]
            agent.say(chat, temperature=0)
            agent.say([*chat, user("Sure?")], temperature=0)
    assert [trajectory.label for trajectory in gateway.trajectories()] == ["a/v1/b", "/", "c d"]
    [only] = gateway.trajectories("c d")
    assert len(only.turns) == 2
    with pytest.raises(InvalidInputError, match="would vanish"):
        gateway.openai_base_url("..")
    with pytest.raises(InvalidInputError, match=r"label: expected text, got 0; give str\(0\)"):
        gateway.openai_base_url(0)  # type: ignore[arg-type]  # not the address without a label


def test_weights_can_be_swapped(service: ServiceClient, gateway: Gateway) -> None:
    training = service.create_lora_training_client("tinker-sync/tiny", rank=4)
    with Agent(gateway) as agent:
        chat = [user("What is 1+1?")]
        agent.say(chat)
        for version in (None, "step 2"):
            gateway.use(training.save_weights_and_get_sampling_client(), version)
            agent.say([*chat, user("Sure?")])
        with pytest.raises(InvalidInputError, match="expected a sampling client, got str"):
            gateway.use("tinker://run/sampler_weights/a")  # type: ignore[arg-type]
        agent.say([*chat, user("Really?")])  # the weights are still those before
    assert [exchange.version for exchange in gateway.exchanges()] == [0, 1, "step 2", "step 2"]
    gateway.clear()
    assert gateway.trajectories() == []


def test_exchanges_are_kept_in_a_file(sampling: SamplingClient, tmp_path: Path) -> None:
    path = tmp_path / "exchanges.jsonl"
    params = SamplingParams(max_tokens=4)
    shown = []
    for _ in range(2):  # a second gateway appends, and shows its own
        with sampling.endpoint(record=path, sampling_params=params) as gateway, Agent(gateway) as agent:
            chat = [user("What is 1+1?")]
            agent.say(chat)
            agent.say([*chat, user("Sure?")])
            shown += [sampled(each) for each in gateway.trajectories()]
    with path.open("a") as file:
        file.write('{"id": "cut sh')
    trajectories = to_trajectories(read_exchanges(path))
    assert [sampled(each) for each in trajectories] == shown
    assert [len(each.turns) for each in trajectories] == [2, 2]
    assert [message["content"] for message in trajectories[0].messages[::2]] == ["What is 1+1?", "Sure?"]
    datum = trajectories[0].datum(1.0)
    assert (
        datum.loss_fn_inputs["target_tokens"].tolist()[-4:] == trajectories[0].turns[1].tokens.tolist()[-4:]
    )


def test_what_was_cleared_is_not_trained_again_from_the_file(
    sampling: SamplingClient, tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "first" / "exchanges.jsonl"  # in directories that do not exist yet
    params = SamplingParams(max_tokens=4)
    for _ in range(2):
        with sampling.endpoint(record=path, sampling_params=params) as gateway, Agent(gateway) as agent:
            assert gateway.trajectories() == []
            for question in ("What is 1+1?", "What is 2+2?"):
                agent.say([user(question)])
                [trajectory] = gateway.trajectories()
                assert trajectory.messages[0]["content"] == question
                gateway.clear()
                assert gateway.exchanges() == []
    assert len(read_exchanges(path)) == 4


@pytest.mark.parametrize(("host", "key"), [("0.0.0.0", None), ("0.0.0.0", "short"), ("::", None)])
def test_a_key_is_needed_where_others_can_reach(sampling: SamplingClient, host: str, key: str | None) -> None:
    with pytest.raises(ConfigurationError, match="16 characters"):
        sampling.endpoint(host=host, key=key)


def test_a_key_is_checked(sampling: SamplingClient) -> None:
    key = "a key of sixteen or more"
    with sampling.endpoint(host="0.0.0.0", key=key) as gateway:
        assert key not in repr(vars(gateway))
        with Agent(gateway, key=key) as agent:
            assert agent.call("GET", "/v1/models")[0] == 200
        with Agent(gateway) as agent:
            assert agent.call("GET", "/v1/models", **{"x-api-key": key})[0] == 200
            status, refused = agent.call("GET", "/v1/models", **{"x-api-key": "wrong"})
            assert (status, refused["error"]["type"]) == (401, "authentication_error")
            assert agent.call("GET", "/v1/models")[0] == 401
            status, refused = agent.call("POST", "/v1/messages", {})
            assert (status, refused["type"]) == (401, "error")


def test_web_pages_are_refused_without_a_key(gateway: Gateway) -> None:
    with Agent(gateway) as agent:
        assert agent.call("POST", "/v1/chat/completions", {}, Origin="https://example.org")[0] == 403


def test_a_port_in_use_is_named(gateway: Gateway, sampling: SamplingClient) -> None:
    port = int(gateway.url.rpartition(":")[2])
    with pytest.raises(ConfigurationError, match=f":{port} cannot be listened on"):
        sampling.endpoint(port=port)


def test_after_close_the_exchanges_can_be_read(sampling: SamplingClient) -> None:
    with sampling.endpoint() as gateway, Agent(gateway) as agent:
        agent.say([user("What is 1+1?")], max_tokens=3)
        gateway.close()
        with pytest.raises(OSError):
            agent.say([user("What is 1+1?")])
    gateway.close()
    assert len(gateway.trajectories()) == 1
