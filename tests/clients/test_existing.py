"""Clients of models and sampling sessions that exist, which scripts make with the constructors."""

from __future__ import annotations

import pytest
from support.tinker_stub import StubServer

import tinker_sync as tinker

DATUM = tinker.Datum(tinker.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
PARAMS = tinker.SamplingParams(max_tokens=4)


def test_a_training_client_of_an_existing_model() -> None:
    with StubServer() as stub, tinker.ServiceClient(base_url=stub.url, api_key="tml-key") as service:
        first = service.create_lora_training_client("stub/model", rank=4)
        model_id = first._guaranteed_model_id()
        assert model_id == first.model_id
        client = tinker.TrainingClient(service.holder, model_id=model_id)
        assert client.done()
        assert client.model_id == model_id
        passed = client.forward_backward([DATUM], "cross_entropy")
        stepped = client.optim_step(tinker.AdamParams())
        assert len(passed.result().loss_fn_outputs) == 1
        assert stepped.exception() is None
        again = tinker.TrainingClient(holder=service.holder, model_seq_id=0, model_id="another")
        assert again.model_id == "another"


def test_a_training_client_needs_a_model() -> None:
    with (
        StubServer() as stub,
        tinker.ServiceClient(base_url=stub.url, api_key="tml-key") as service,
        pytest.raises(tinker.InvalidInputError, match="give the model_id of an existing model"),
    ):
        tinker.TrainingClient(service.holder)


def test_a_sampling_client_of_an_existing_session() -> None:
    with StubServer() as stub, tinker.ServiceClient(base_url=stub.url, api_key="tml-key") as service:
        first = service.create_sampling_client(base_model="stub/model")
        session_id = first._sampling_session_id
        second = tinker.SamplingClient(
            service.holder, sampling_session_id=session_id, base_model="stub/model"
        )
        assert second.done()
        assert second._sampling_session_id == session_id
        for client in (first, second):
            assert len(client.sample(PROMPT, 1, PARAMS).result().sequences) == 1
        assert second.get_base_model() == "stub/model"
        first_number, second_number = (asked.json()["seq_id"] for asked in stub.asked("/asample"))
        assert (first_number, second_number >= 10**9) == (
            0,
            True,
        )  # the server takes an equal one for a retry
