"""The packages with which agents are written finish a conversation with a tool on a gateway.

They are no requirements of the tests, because they bring dozens of others: `.ci/run interop` installs
them.
"""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from support.agents import Sampled, Scripted
from support.chat_templates import ADD, TAGGED

from tinker_sync.gateway import Gateway

QUESTION, RESULT = "What is 3+4?", "7"
FUNCTION: Any = ADD["function"]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def by_openai(gateway: Gateway, label: str) -> str:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=gateway.openai_base_url(label), api_key="any") as client:
        assert [model.id for model in client.models.list()] == ["tinker-sync/tiny"]
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        options: dict[str, Any] = {"model": "any", "tools": [ADD], "logprobs": True, "top_logprobs": 2}
        choice = client.chat.completions.create(messages=messages, **options).choices[0]
        assert choice.finish_reason == "tool_calls"
        assert len(choice.logprobs.content[0].top_logprobs) == 2
        [call] = choice.message.tool_calls
        result = str(add(**json.loads(call.function.arguments)))
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        with client.chat.completions.stream(messages=messages, model="any", tools=[ADD]) as stream:
            for _ in stream:
                pass
            return str(stream.get_final_completion().choices[0].message.content)


def by_anthropic(gateway: Gateway, label: str) -> str:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=gateway.anthropic_base_url(label), api_key="any") as client:
        tool = {"name": "add", "description": "Add two numbers.", "input_schema": FUNCTION["parameters"]}
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        options: dict[str, Any] = {"model": "any", "max_tokens": 90, "tools": [tool]}
        said = client.messages.create(messages=messages, **options)
        [call] = said.content
        assert (said.stop_reason, call.type) == ("tool_use", "tool_use")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": str(add(**call.input))}
        messages += [{"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        counted = client.messages.count_tokens(model="any", messages=messages, tools=[tool])
        with client.messages.stream(messages=messages, **options) as stream:
            final = stream.get_final_message()
        assert final.usage.input_tokens == counted.input_tokens
        return str(final.content[0].text)


def run_pydantic_ai(gateway: Gateway, label: str, **options: Any) -> Any:
    """Return the result of an agent of pydantic-ai with these options."""
    ai, openai = pytest.importorskip("pydantic_ai"), pytest.importorskip("openai")
    models = importlib.import_module("pydantic_ai.models.openai")
    providers = importlib.import_module("pydantic_ai.providers.openai")

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=gateway.openai_base_url(label), api_key="any") as client:
            model = models.OpenAIChatModel("any", provider=providers.OpenAIProvider(openai_client=client))
            return (await ai.Agent(model, **options).run(QUESTION)).output

    return asyncio.run(run())


def by_pydantic_ai(gateway: Gateway, label: str) -> str:
    return str(run_pydantic_ai(gateway, label, tools=[add]))


PACKAGES: dict[str, Callable[[Gateway, str], str]] = {
    "openai": by_openai,
    "anthropic": by_anthropic,
    "pydantic_ai": by_pydantic_ai,
}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_uses_a_tool(package: str, request: pytest.FixtureRequest, ledger: list[Sampled]) -> None:
    pytest.importorskip(package)
    gateway: Gateway = request.getfixturevalue("tool_user")
    ledger.clear()
    assert PACKAGES[package](gateway, package).strip() == RESULT
    [trajectory] = gateway.trajectories(package)
    assert len(trajectory.turns) == 2
    assert (
        trajectory.datum(1.0).loss_fn_inputs["target_tokens"].tolist() == trajectory.turns[1].row[1:].tolist()
    )
    assert [(turn.prompt.tolist(), turn.tokens.tolist()) for turn in trajectory.turns] == [
        (list(prompt), list(tokens)) for prompt, tokens, _ in ledger
    ]


def test_pydantic_ai_gets_a_model_as_the_result() -> None:
    """It forces a call of its tool for the result, and asks again if the model says something else."""
    ai, pydantic = pytest.importorskip("pydantic_ai"), pytest.importorskip("pydantic")
    kind = pydantic.create_model("Sum", total=(int, ...))
    call = '<tool_call>{"name": "final_result", "arguments": {"total": 7}}</tool_call>'
    with Gateway(Scripted("It is 7.", call, '{"total": 7}'), chat_template=TAGGED) as gateway:
        for label, wanted, turns in (("tool", kind, 2), ("schema", ai.NativeOutput(kind), 1)):
            assert run_pydantic_ai(gateway, label, output_type=wanted).total == 7
            [trajectory] = gateway.trajectories(label)
            assert len(trajectory.turns) == turns
            trajectory.datum(1.0)


def test_errors_are_those_of_the_package(gateway: Gateway) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=gateway.openai_base_url(), api_key="any") as client:
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": "a"}],
                logit_bias={"5": 1},
            )
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="any", input="a")
        done = client.completions.create(
            model="any", prompt="Q: 23+45=", max_tokens=2, logprobs=1, temperature=0
        )
        assert done.choices[0].text == "68"
        assert len(done.choices[0].logprobs.token_logprobs) == 2
