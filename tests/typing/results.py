"""The type of every result, keywords that do not exist, and the names of losses. mypy reads this file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tinker_sync
from tinker_sync import (
    BatchItem,
    Datum,
    ForwardBackwardOutput,
    LossHandle,
    ModelInput,
    OptimStepResponse,
    SampleResponse,
    SamplingClient,
    SamplingParams,
    ServiceClient,
    TrainingClient,
    losses,
    types,
)

if TYPE_CHECKING:
    from typing_extensions import assert_type


def results_of_training(training: TrainingClient, data: list[Datum], handle: LossHandle) -> None:
    for name in ("cross_entropy", "a loss of the server's own"):
        assert_type(training.forward_backward(data, name).result(), ForwardBackwardOutput)
    assert_type(training.forward_backward(data, "ppo", {"clip": 0.2}).result(), ForwardBackwardOutput)
    assert_type(training.forward_backward(data, handle).result(timeout=60), ForwardBackwardOutput)
    assert_type(training.forward(data, "cross_entropy").result(), ForwardBackwardOutput)
    assert_type(training.forward_custom(data, losses.DPO()).result(), ForwardBackwardOutput)
    assert_type(training.forward_backward_custom(data, losses.DPO()).result(), ForwardBackwardOutput)
    assert_type(training.optim_step(tinker_sync.AdamParams()).result(), OptimStepResponse)
    assert_type(training.optim_step(tinker_sync.AdamParams()).result().metrics["grad_norm"], float)
    assert_type(training.save_state("a").result(), types.SaveWeightsResponse)
    assert_type(training.save_weights_for_sampler("a").result().path, str)
    assert_type(training.save_weights_and_get_sampling_client().result(), SamplingClient)
    assert_type(training.result(), TrainingClient)


def results_of_sampling(sampling: SamplingClient, prompt: ModelInput) -> None:
    params = SamplingParams(max_tokens=1)
    sampled = sampling.sample(prompt, 1, params)
    assert_type(sampled.result(), SampleResponse)
    assert_type(sampling.compute_logprobs(prompt).result(), list[float | None])
    for item in sampling.map([prompt, [1, 2], "text"], params, ordered=False):
        assert_type(item, BatchItem)
        assert_type(item.result(), SampleResponse)
    assert_type(tinker_sync.gather([sampled]), list[SampleResponse])
    assert_type(tinker_sync.gather([sampled], return_exceptions=True), list[SampleResponse | Exception])
    for future in tinker_sync.as_completed([sampled]):
        assert_type(future.result(), SampleResponse)


def a_sequence_has_an_id(response: SampleResponse, ids: list[str]) -> None:
    ids.append(response.sequences[0].sequence_id)


def results_of_the_service(service: ServiceClient, rest: tinker_sync.RestClient) -> None:
    assert_type(service.create_lora_training_client("m").result(), TrainingClient)
    assert_type(service.create_sampling_client(base_model="m").result(), SamplingClient)
    assert_type(service.get_tokenizer("m"), tinker_sync.Tokenizer)
    assert_type(
        rest.delete_checkpoints(["tinker://r/weights/a"]).result(), list[tinker_sync.CheckpointOutcome]
    )


def mistakes_are_seen(service: ServiceClient, training: TrainingClient, data: list[Datum]) -> None:
    ServiceClient(base_ulr="local")  # type: ignore[arg-type]
    ServiceClient(retries=3)  # type: ignore[arg-type]
    training.forward_backward(data, len)  # type: ignore[arg-type]
    training.forward(data, 3)  # type: ignore[arg-type]
    service.create_lora_training_client("m", lora_rank=8)  # type: ignore[call-arg]
    SamplingParams(max_token=3)  # type: ignore[call-arg]


def metrics_of_a_step_infer_the_type_of_an_empty_dictionary(training: TrainingClient) -> None:
    metrics = {}
    stepped = training.optim_step(tinker_sync.AdamParams()).result()
    if stepped.metrics:
        metrics.update(stepped.metrics)
    assert_type(metrics, dict[str, float])
    types.OptimStepResponse(metrics=None)
