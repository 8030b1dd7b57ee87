"""The loss `stable_reinforce`: its log-probabilities are those that the server recorded when it sampled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tinker_sync import (
    AdamParams,
    Datum,
    ModelInput,
    PromptProvenanceSpan,
    RequestFailedError,
    SampledProvenanceSpan,
    SamplingParams,
    ServiceClient,
    TrainingClient,
)
from tinker_sync import data as make
from tinker_sync.testing import LocalServer

PROMPT = [5, 6, 7]
STABLE = "stable_reinforce"


@pytest.fixture
def service() -> Iterator[ServiceClient]:
    with LocalServer(model="tinker-sync/random") as server, server.service() as client:
        yield client


@pytest.fixture
def training(service: ServiceClient) -> TrainingClient:
    return service.create_lora_training_client("tinker-sync/random", rank=2, seed=1)


def sampled(training: TrainingClient, *, record: bool = True, count: int = 2) -> Any:
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=record)
    return sampler.sample(ModelInput.from_ints(PROMPT), count, SamplingParams(max_tokens=6, seed=3)).result()


def with_inputs(datum: Datum, **changed: Any) -> Datum:
    """Return a copy of a datum with other inputs; None leaves one out. It keeps its provenance."""
    inputs = {name: value for name, value in {**datum.loss_fn_inputs, **changed}.items() if value is not None}
    bare = Datum(datum.model_input, inputs)
    return bare.with_provenance(
        model_input=datum.model_input_spans or (), loss_fn_inputs=datum.loss_fn_input_spans or ()
    )


def test_it_is_cispo_over_the_recorded_logprobs_and_ignores_those_of_the_client(
    training: TrainingClient,
) -> None:
    data = make.from_samples(PROMPT, sampled(training), [1.0, -0.5])
    wrong = [with_inputs(datum, logprobs=np.full(8, -7.0)) for datum in data]
    # What the advantages say of tokens of the prompt counts nothing.
    on_prompt = np.array([9.0, 9.0] + [0.0] * 6)
    without = [
        with_inputs(
            datum, logprobs=None, advantages=datum.loss_fn_inputs["advantages"].to_numpy() + on_prompt
        )
        for datum in data
    ]
    wanted = training.forward_backward(data, "cispo").result()
    norm = training.optim_step(AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert norm > 0
    for given in (data, wrong, without):
        found = training.forward_backward(given, STABLE).result()
        assert found.metrics["loss:sum"] == pytest.approx(wanted.metrics["loss:sum"], rel=1e-5)
        again = training.optim_step(AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
        assert again == pytest.approx(norm, rel=1e-5)


def test_a_turn_begins_in_the_middle_of_a_sequence(training: TrainingClient) -> None:
    """Two requests make one datum: the prompt of the second holds the first one's sample."""
    first = sampled(training, count=1).sequences[0]
    head = [*PROMPT, *first.tokens]
    sampler = training.save_weights_and_get_sampling_client(record_stability_info=True)
    prompt, params = ModelInput.from_ints([*head, 9]), SamplingParams(max_tokens=4, seed=4)
    second = sampler.sample(prompt, 1, params).result().sequences[0]
    whole = [*head, 9, *second.tokens]
    datum = Datum(
        ModelInput.from_ints(whole[:-1]),
        {
            "target_tokens": whole[1:],
            "advantages": [0.0] * 2 + [1.0] * len(first.tokens) + [0.0] + [1.0] * len(second.tokens),
        },
    )
    spans = [
        PromptProvenanceSpan(sequence_id=first.sequence_id, offset=1, length=2),
        SampledProvenanceSpan(sequence_id=first.sequence_id, length=len(first.tokens)),
        PromptProvenanceSpan(sequence_id=second.sequence_id, offset=len(head), length=1),
        SampledProvenanceSpan(sequence_id=second.sequence_id, length=len(second.tokens)),
    ]
    of_input = [PromptProvenanceSpan(sequence_id="x", length=len(whole) - 1)]
    datum = datum.with_provenance(model_input=of_input, loss_fn_inputs=spans)
    p = np.array([*first.logprobs, *second.logprobs])  # nothing was trained, so the ratios are 1
    loss = training.forward([datum], STABLE).result().metrics["loss:sum"]
    assert loss == pytest.approx(-p.sum(), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("unrecorded", "nothing is recorded of the sampled sequence .* record_stability_info=True"),
        ("other tokens", r"target_tokens'\]\[2:8\]: differs from the tokens 0 to 6 of the sampled sequence"),
        ("beyond the end", "differs from the tokens 1 to 7"),
    ],
)
def test_what_does_not_fit_the_record_is_the_users_error(
    training: TrainingClient, change: str, complaint: str
) -> None:
    response = sampled(training, record=change != "unrecorded", count=1)
    [datum] = make.from_samples(PROMPT, response, [1.0])
    if change == "other tokens":
        targets = datum.loss_fn_inputs["target_tokens"].to_numpy().copy()
        targets[-1] = (targets[-1] + 1) % 200
        datum = with_inputs(datum, target_tokens=targets)
    elif change == "beyond the end":
        name = response.sequences[0].sequence_id
        spans = [
            PromptProvenanceSpan(sequence_id=name, length=2),
            SampledProvenanceSpan(sequence_id=name, offset=1, length=6),
        ]
        datum = datum.with_provenance(model_input=datum.model_input_spans, loss_fn_inputs=spans)
    with pytest.raises(RequestFailedError, match=complaint) as failed:
        training.forward_backward([datum], STABLE).result()
    assert failed.value.category.value == "user"
