"""A client with a small `pace` makes the same pauses, each shortened by this factor."""

from __future__ import annotations

import time
from typing import Any

import pytest
from support.clock import QuickClock
from support.hasty import quick_service, trainer_of, world
from support.tinker_stub import Answer, StubServer

import tinker_sync
from tinker_sync.config import Settings
from tinker_sync.errors import BillingError, ConfigurationError, DeadlineError, InternalServerError
from tinker_sync.runtime.rate_limiter import RateLimiter

KEY = "tml-pace-tests"
# The pauses add up to minutes, so a test with real pauses would time out. The five minutes for which a client
# bears an outage shrink to three seconds, which a busy machine does not use up by itself.
HURRY = 0.01
SOON_S = 120.0


def service(stub: Any, **options: Any) -> tinker_sync.ServiceClient:
    return quick_service(HURRY, base_url=stub.url, api_key=KEY, **options)


def test_the_pauses_of_calls_are_short() -> None:
    with StubServer() as stub, service(stub) as client:
        busy = Answer(503, headers={"Retry-After": "20"})
        stub.script("/get_server_capabilities", busy, busy)
        began = time.monotonic()
        assert client.get_server_capabilities().supported_models
        assert time.monotonic() - began < SOON_S
        assert stub.counts["/get_server_capabilities"] == 3


def test_the_pauses_of_samples_and_results_are_short() -> None:
    with StubServer() as stub, service(stub) as client:
        slow = {"Retry-After": "20"}
        stub.script("/asample", Answer(429, headers=slow), Answer(503, headers=slow))
        stub.script("/retrieve_future", Answer(429, headers=slow), Answer(402), Answer(410))
        sampling = client.create_sampling_client(base_model="stub/model").result()
        began = time.monotonic()
        params = tinker_sync.SamplingParams(max_tokens=2)
        sampling.sample(tinker_sync.ModelInput.from_ints([1]), 1, params).result(SOON_S)
        assert time.monotonic() - began < SOON_S
        assert stub.counts["/asample"] == 4


def test_a_server_that_never_comes_back_is_given_up_after_five_minutes() -> None:
    down = Answer(503)
    with world() as (stub, client):  # on a clock of its own, because a busy machine takes its time too
        stub.script("/get_server_capabilities", *[down] * 200)
        with pytest.raises(InternalServerError) as caught:
            client.get_server_capabilities()
        # Pauses of 0.5, 1, 2, 4, 8, 16 and then 30 s, less a quarter at most, make five minutes.
        assert 13 <= caught.value.attempts <= 20
        training = trainer_of(client)
        stub.script("/retrieve_future", *[down] * 200)
        before = len(stub.asked("/retrieve_future"))
        with pytest.raises(InternalServerError):
            training.optim_step(tinker_sync.AdamParams()).result(SOON_S)
        assert 13 <= len(stub.asked("/retrieve_future")) - before <= 20


def test_billing_is_paused_for_a_shorter_time() -> None:
    config = {"billing_exception_max_pause_duration_sec": 100}
    with StubServer(config=config) as stub, service(stub) as client:
        training = client.create_lora_training_client("stub/model").result()
        stub.script("/optim_step", *[Answer(402)] * 1000)
        with pytest.raises(BillingError):
            training.optim_step(tinker_sync.AdamParams()).result(SOON_S)


def test_a_deadline_is_not_scaled() -> None:
    with StubServer() as stub, service(stub) as client:
        stub.script("/asample", Answer(503, headers={"Retry-After": "100"}))
        sampling = client.create_sampling_client(base_model="stub/model").result()
        params = tinker_sync.SamplingParams(max_tokens=2)
        with pytest.raises(DeadlineError):
            sampling.sample(tinker_sync.ModelInput.from_ints([1]), 1, params, deadline=50).result(SOON_S)


def test_the_environment_sets_it() -> None:
    def resolve(**variables: str) -> Settings:
        return Settings.resolve(base_url="http://localhost", api_key=KEY, environ=variables)

    assert resolve().pace == 1.0
    assert resolve(TINKER_PACE="").pace == 1.0
    assert resolve(TINKER_PACE="0.01").pace == 0.01
    for wrong in ("fast", "0", "-1", "nan", "inf"):
        with pytest.raises(ConfigurationError, match=r"pace|PACE"):
            resolve(TINKER_PACE=wrong)


def test_an_invalid_pace_is_refused() -> None:
    for wrong in (0, -1.0, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ConfigurationError, match="positive"):
            Settings(base_url="http://localhost", pace=wrong)  # type: ignore[arg-type]


def test_the_pause_of_a_limiter_is_scaled() -> None:
    clock = QuickClock()
    limiter = RateLimiter(clock=clock)
    limiter.close_for(50)
    assert limiter.pause_left_s() == pytest.approx(0.5)
