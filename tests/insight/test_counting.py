"""Token counts of clients, and budgets, against a stub server; price tables from files, and costs."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tinker_stub import Answer, Asked, Stub, StubServer

import tinker_sync
from tinker_sync import ServiceClient, errors
from tinker_sync.errors import ConfigurationError
from tinker_sync.insight import PriceTable, TokenCounts, Usage
from tinker_sync.types import Datum, EncodedTextChunk, ImageChunk, ModelInput, SamplingParams

TABLE = PriceTable.of({"stub/model": {"trained": 1e6, "prompt": 1e6, "sampled": 2e6}})
"""A dollar for each token, and two for a sampled token."""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    monkeypatch.setenv("TINKER_PACE", "0.01")
    with StubServer(config={"fwdbwd_max_chunk_len": 2}) as stub:
        yield stub


@pytest.fixture
def service(stub: Stub) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=stub.url, api_key="tml-usage") as service:  # type: ignore[attr-defined]
        yield service


@pytest.fixture
def sampling(service: ServiceClient) -> Any:
    return service.create_sampling_client(base_model="stub/model").result()


@pytest.fixture
def training(service: ServiceClient) -> Any:
    return service.create_lora_training_client("stub/model").result()


def datum(length: int) -> Datum:
    return Datum(ModelInput.from_ints(np.arange(length)), {"target_tokens": list(range(length))})


def sample(client: Any, length: int, longest: int | None = 4, count: int = 1) -> Any:
    return client.sample(ModelInput.from_ints(range(length)), count, SamplingParams(max_tokens=longest))


def test_results_are_counted_before_they_resolve(service: ServiceClient, training: Any) -> None:
    assert service.usage().tokens == TokenCounts()
    # Five data in chunks of two make three requests.
    training.forward_backward([datum(n) for n in (1, 2, 3, 4, 5)], "cross_entropy").result()
    assert service.usage().tokens == TokenCounts(trained=15)
    training.forward([datum(7)], "cross_entropy").result()
    training.optim_step(tinker_sync.AdamParams(learning_rate=1e-4)).result()
    sampling = training.save_weights_and_get_sampling_client().result()
    sample(sampling, 10, 4, count=3).result()
    sampling.compute_logprobs(ModelInput.from_ints([1, 2, 3])).result()
    usage = service.usage(prices=TABLE)
    assert usage.tokens == TokenCounts(trained=22, prompt=13, sampled=13)
    assert [(row.base_model, row.cost_usd) for row in usage.rows] == [("stub/model", 22 + 13 + 26)]
    assert usage.session_id == service.holder.server.known_session_id


def test_images_count_expected_tokens(service: ServiceClient, sampling: Any) -> None:
    text = EncodedTextChunk(tokens=[1, 2])
    for expected in (100, None):
        image = ImageChunk(data=b"x", format="png", expected_tokens=expected)
        sampling.sample(ModelInput(chunks=[text, image]), 1, SamplingParams(max_tokens=1)).result()
    assert service.usage().tokens == TokenCounts(prompt=104, sampled=2)


def test_cached_prompt_tokens_count_separately(stub: Stub, service: ServiceClient, sampling: Any) -> None:
    stub.behaviour.proto_results = False

    def with_cache(asked: Asked) -> Answer:
        tokens = {"type": "sample", "sequences": [{"stop_reason": "stop", "tokens": [7], "logprobs": [-1.0]}]}
        return Answer(body={**tokens, "prompt_cache_hit_tokens": 6})

    stub.script("/retrieve_future", with_cache)
    sample(sampling, 10).result()
    assert service.usage().tokens == TokenCounts(prompt=4, cached=6, sampled=1)


def test_failures_and_retries_are_not_counted_twice(
    stub: Stub, service: ServiceClient, sampling: Any
) -> None:
    stub.script("/asample", Answer(503), Answer(abort="after"))
    stub.script("/retrieve_future", Answer(abort="after"), Answer(503), Answer(408))
    sample(sampling, 10).result()
    assert service.usage().tokens == TokenCounts(prompt=10, sampled=4)
    stub.script("/retrieve_future", Answer(body={"error": "there is no room", "category": "user"}))
    with pytest.raises(errors.RequestFailedError):
        sample(sampling, 10).result()
    assert service.usage().tokens == TokenCounts(prompt=10, sampled=4)


def test_model_name_is_requested_once(stub: Stub, service: ServiceClient) -> None:
    stub.behaviour.config = {"create_model_via_load_weights": True, "fwdbwd_max_chunk_len": 1024}
    training = service.create_training_client_from_state("tinker://run-1/weights/a").result()
    training.forward_backward([datum(3)], "cross_entropy").result()
    sampling = service.create_sampling_client("tinker://run-1/sampler_weights/a").result()
    sample(sampling, 2, 1).result()
    for _ in range(2):
        assert [row.base_model for row in service.usage().rows] == ["stub/model"]
    assert len(stub.asked("/get_info")) == 1
    assert len([path for path in stub.paths() if path.startswith("/samplers/")]) == 1


def test_unreachable_server_leaves_the_model_unknown(stub: Stub) -> None:
    with ServiceClient(base_url=stub.url, api_key="tml-usage") as service:  # type: ignore[attr-defined]
        sample(service.create_sampling_client("tinker://run-1/sampler_weights/a").result(), 2, 1).result()
    usage = service.usage(prices=TABLE)
    assert [(row.base_model, row.cost_usd, row.unpriced) for row in usage.rows] == [
        (None, None, ("prompt", "sampled"))
    ]
    assert "unknown model: 2 prompt, 1 sampled, price of prompt and sampled unknown" in str(usage)


# ------------------------------------------------------------------------------------------ budgets
def test_budget_refuses_before_sending(stub: Stub, service: ServiceClient, training: Any) -> None:
    with service.budget(tokens=25) as budget:
        training.forward_backward([datum(10), datum(10)], "cross_entropy").result()
        before = len(stub.log)
        with pytest.raises(
            errors.BudgetExceededError, match="up to 10 tokens, but of 25 tokens 20 are spent"
        ) as caught:
            training.forward_backward([datum(10)], "cross_entropy")
        assert (caught.value.limit, caught.value.spent, caught.value.unit) == (25, 20, "tokens")
        assert len(stub.log) == before
        assert budget.spent_tokens == 20
        training.forward_backward([datum(5)], "cross_entropy").result()
    # Outside the block there is no limit, and the refused call took no number.
    training.forward_backward([datum(10)], "cross_entropy").result()
    assert service.usage().tokens.trained == 35


def test_budget_in_dollars(service: ServiceClient, sampling: Any) -> None:
    with service.budget(usd=20, prices=TABLE) as budget:
        sample(sampling, 2, 9).result()
        assert budget.spent_usd == 20
        with pytest.raises(
            errors.BudgetExceededError, match=r"up to \$3.0000, but of \$20 \$20.0000 are spent"
        ):
            sample(sampling, 1, 1)


def test_a_refusal_names_a_small_budget_as_it_was_given(service: ServiceClient, sampling: Any) -> None:
    with (
        service.budget(usd=0.004, prices=TABLE),
        pytest.raises(errors.BudgetExceededError, match=r"of \$0\.004 "),
    ):
        sample(sampling, 1, 1)


def test_pending_calls_count_in_full(stub: Stub, service: ServiceClient, sampling: Any) -> None:
    release = threading.Event()
    stub.script("/retrieve_future", *[Answer(gate=release, usual=True)] * 2)
    with service.budget(tokens=100) as budget:
        under_way = [sample(sampling, 10, 40), sample(sampling, 10, 40)]
        with pytest.raises(errors.BudgetExceededError, match="0 are spent and up to 100 are under way"):
            sample(sampling, 1, 1)
        release.set()
        for future in under_way:
            future.result()
        assert budget.spent_tokens == 100


def test_failed_calls_release_their_reservation(stub: Stub, service: ServiceClient, sampling: Any) -> None:
    with service.budget(tokens=20) as budget:
        for _ in range(3):
            stub.script("/retrieve_future", Answer(body={"error": "no room", "category": "user"}))
            future = sample(sampling, 10, 10)
            with pytest.raises(errors.RequestFailedError):
                future.result()
        with pytest.raises(errors.InvalidInputError):
            sample(sampling, 10, 10, count=0)
        assert budget.spent_tokens == 0
        sample(sampling, 10, 4).result()
        assert budget.spent_tokens == 14


def test_short_samples_release_the_rest(stub: Stub, service: ServiceClient, sampling: Any) -> None:
    stub.behaviour.proto_results = False
    short = {"type": "sample", "sequences": [{"stop_reason": "stop", "tokens": [7], "logprobs": [-1.0]}]}
    with service.budget(tokens=61) as budget:
        for done in range(1, 5):
            stub.script("/retrieve_future", Answer(body=short))
            sample(sampling, 2, 50).result()
            assert budget.spent_tokens == 3 * done


def test_nested_budgets_both_apply(service: ServiceClient, sampling: Any) -> None:
    with service.budget(tokens=100) as outer, service.budget(tokens=10) as inner:
        with pytest.raises(errors.BudgetExceededError, match="of 10 tokens"):
            sample(sampling, 10, 5)
        sample(sampling, 5, 5).result()
        assert (outer.spent_tokens, inner.spent_tokens) == (10, 10)


def test_a_budget_applies_until_its_last_block_ends(service: ServiceClient, sampling: Any) -> None:
    budget = service.budget(tokens=19)
    with budget:
        with budget:
            sample(sampling, 5, 5).result()
        assert budget.spent_tokens == 10  # counted once
        with pytest.raises(errors.BudgetExceededError):
            sample(sampling, 5, 5)
    sample(sampling, 5, 5).result()
    assert budget.spent_tokens == 10


def test_budget_in_dollars_needs_prices(
    service: ServiceClient, sampling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prices.json"
    path.write_text(json.dumps({"models": {"stub/*": {"prompt": 1.0}}}))
    monkeypatch.setenv("TINKER_PRICES", str(path))
    with (
        service.budget(usd=20),
        pytest.raises(
            errors.ConfigurationError, match="the price of sampled tokens of stub/model is not known"
        ),
    ):
        sample(sampling, 1, 1)
    with service.budget(usd=20), pytest.raises(errors.ConfigurationError, match="price of sampled tokens"):
        sample(sampling, 1, None)
    with pytest.raises(errors.InvalidInputError, match="give usd, tokens or both"):
        service.budget()
    with pytest.raises(errors.InvalidInputError, match="0 or more"):
        service.budget(usd=-1)
    prices: Any = {"stub/*": {"prompt": 1.0}}
    with pytest.raises(errors.InvalidInputError, match=r"prices: .*got dict; PriceTable\.of"):
        service.budget(usd=1, prices=prices)
    with pytest.raises(errors.InvalidInputError, match=r"prices: .*got dict; PriceTable\.of"):
        service.usage(prices=prices)


def test_chunks_release_their_reservation(stub: Stub, service: ServiceClient, training: Any) -> None:
    with service.budget(tokens=30) as budget:
        for done in (1, 2):
            training.forward_backward([datum(3)] * 5, "cross_entropy").result()
            assert budget.spent_tokens == 15 * done


# ------------------------------------------------------------------------------------------ prices
def test_defaults_without_a_file() -> None:
    table = PriceTable.load()
    assert table.path == Path.home() / ".tinker" / "prices.json"
    every = TokenCounts(trained=1, prompt=1, cached=1, sampled=1)
    assert table.price("Qwen/Qwen3-8B").missing(every) == ("trained", "prompt", "cached", "sampled")
    assert table.price("tinker-sync/tiny").of(every) == 0
    assert table.price(None).of(TokenCounts()) == 0


def test_default_file_and_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Path.home() / ".tinker" / "prices.json"
    usual.parent.mkdir()
    usual.write_text('{"models": {"org/*": {"trained": 3}, "tinker-sync/tiny": {"trained": 1}}}')
    assert PriceTable.load().price("org/base").trained == 3.0
    assert PriceTable.load().price("tinker-sync/tiny").trained == 1.0
    other = tmp_path / "other.json"
    other.write_text('{"models": {"*": {"sampled": null, "prompt": 0.5}}}')
    monkeypatch.setenv("TINKER_PRICES", str(other))
    assert PriceTable.load().price("org/base").prompt == 0.5
    assert PriceTable.load().price("org/base").sampled is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", 'has no object "models"'),
        ('{"models": []}', 'has no object "models"'),
        ('{"models": {"a": 1}}', r"models\['a'\] is not an object"),
        ('{"models": {"a": {"train": 1}}}', "has 'train'; expected trained, prompt, cached, sampled"),
        ('{"models": {"a": {"trained": "1"}}}', "is not a price: '1'"),
        ('{"models": {"a": {"trained": -1}}}', "is not a price: -1"),
        ('{"models": {"a": {"trained": true}}}', "is not a price: True"),
        ('{"models": {"a": {"trained": NaN}}}', "is not a price: nan"),
    ],
)
def test_invalid_tables_are_explained(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=words) as caught:
        PriceTable.load(path)
    assert str(path) in str(caught.value)


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="does not exist"):
        PriceTable.load(tmp_path / "none.json")
    with pytest.raises(ConfigurationError, match="cannot be read"):
        PriceTable.load(tmp_path)


def test_cost_with_an_unknown_price() -> None:
    table = PriceTable.of({"a": {"trained": 2.0}})
    usage = Usage.of({"a": TokenCounts(trained=500_000), "b": TokenCounts(sampled=1)}, table)
    assert (usage.cost_usd, usage.known_cost_usd) == (None, 1.0)
    assert Usage.of({"a": TokenCounts(trained=500_000)}, table).cost_usd == 1.0
    assert Usage.of({}, table).cost_usd == 0
