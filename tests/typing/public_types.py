"""The types of public names, results, losses and tensors. mypy reads this file; nothing runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import tinker_sync
import tinker_sync.types
from tinker_sync import (
    AdamParams,
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
    errors,
    losses,
    types,
)
from tinker_sync.losses import DPO, CrossEntropy, KLToReference, WeightedSum, numpy_loss
from tinker_sync.types import (
    EncodedTextChunk,
    ForwardBackwardInput,
    ImageChunk,
    SampledProvenanceSpan,
    SampledSequence,
    SampleRequest,
    TensorData,
    TopkLogprobs,
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


# ----- The names that packages load on first use


def names_have_their_types(datum: Datum, failure: tinker_sync.RateLimitError) -> None:
    assert_type(tinker_sync.AdamParams(), AdamParams)
    assert_type(tinker_sync.types.AdamParams(), AdamParams)
    assert_type(datum.loss_fn_inputs["weights"], TensorData)
    assert_type(tinker_sync.__version__, str)
    refusal: errors.APIStatusError = failure
    assert_type(refusal.request_id, str | None)


def a_mistyped_name_is_seen() -> None:
    assert tinker_sync.Datm  # type: ignore[attr-defined]
    assert tinker_sync.types.TensorDate  # type: ignore[attr-defined]


def a_mistyped_argument_is_seen() -> None:
    AdamParams(learning_rat=1e-4)  # type: ignore[call-arg]
    AdamParams(learning_rate="fast")  # type: ignore[arg-type]


# ----- Custom losses

Floats = npt.NDArray[np.float64]


@numpy_loss
def mine(
    data: list[tinker_sync.Datum], logprobs: list[Floats]
) -> tuple[float, dict[str, float], list[Floats]]:
    return 0.0, {}, logprobs


def in_torch(data: Any, logprobs: Any) -> tuple[Any, Mapping[str, float]]:
    return logprobs[0].sum(), {}


def losses_are_taken(
    training: tinker_sync.TrainingClient,
    service: tinker_sync.ServiceClient,
    data: list[tinker_sync.Datum],
) -> None:
    both = WeightedSum({"nll": (1.0, CrossEntropy()), "kl": (0.1, KLToReference("k2"))})
    for loss in (mine, DPO(beta=0.2), both):
        future = training.forward_backward_custom(data, loss)
        assert_type(future.result(), tinker_sync.ForwardBackwardOutput)
    training.forward_backward_custom(data, in_torch)
    handle = service.create_custom_loss(in_torch, {"logprobs": 1}).result()
    assert_type(handle, tinker_sync.LossHandle)
    assert_type(handle.loss_id, str | None)
    training.forward_backward(data, handle)
    training.forward_backward(data, "cross_entropy")


def mistakes_in_losses_are_seen(training: tinker_sync.TrainingClient, data: list[tinker_sync.Datum]) -> None:
    training.forward_backward_custom(data, "cross_entropy")  # type: ignore[arg-type]
    KLToReference("k4")  # type: ignore[arg-type]
    DPO(beta="0.1")  # type: ignore[arg-type]


# ----- Types that hold arrays


def every_container_is_welcome(ids: npt.NDArray[np.int32], weights: npt.NDArray[np.float32]) -> None:
    for tokens in ([1, 2], (1, 2), range(2), ids):
        assert_type(ModelInput.from_ints(tokens), ModelInput)
        EncodedTextChunk(tokens=tokens)
    prompt = ModelInput.from_ints(ids).append_int(3).append(ImageChunk(data=b"", format="png"))
    Datum(prompt, {"target_tokens": [1, 2], "weights": weights, "advantages": (0.5, 1), "rows": [[1], [2]]})
    same_kind = {"weights": weights, "logprobs": weights}
    Datum(model_input=prompt, loss_fn_inputs=same_kind)
    Datum(prompt, {"weights": TensorData.from_numpy(weights)})
    TensorData([[1, 2]], "int64", (1, 2))
    TensorData(data=weights, dtype="float32", shape=[2])
    chunks = [EncodedTextChunk(tokens=ids)]
    ModelInput(chunks=chunks)


def what_comes_out_has_its_type(datum: Datum, tensor: TensorData, sequence: SampledSequence) -> None:
    assert_type(datum.loss_fn_inputs["weights"], TensorData)
    assert_type(datum.model_copy(update={"model_input_spans": None}), Datum)
    assert_type(datum.problems(), list[str])
    assert_type(tensor.to_numpy(), npt.NDArray[Any])
    assert_type(tensor.data, list[int] | list[float])
    assert_type(tensor.shape, list[int] | None)
    assert_type(sequence.tokens, list[int])
    assert_type(sequence.logprobs, list[float] | None)
    assert_type(SampleResponse([sequence]).prompt_logprobs, list[float | None] | None)
    assert_type(EncodedTextChunk(tokens=[1]).as_int32(), npt.NDArray[np.int32])


def work_is_put_together(datum: Datum, prompt: ModelInput) -> None:
    runs = [SampledProvenanceSpan(sequence_id="s", length=2)]
    assert_type(datum.with_provenance(runs, loss_fn_inputs=tuple(runs)), Datum)
    ForwardBackwardInput((datum,), "ppo", {"clip": 0.2, "mode": "token"})
    SampleRequest(prompt=prompt, sampling_params=SamplingParams(stop=["END"], max_tokens=4))
    SamplingParams(stop=[1, 2])
    TopkLogprobs(np.zeros((1, 2), dtype=np.int32), np.zeros((1, 2)))
    SampledSequence("stop", None, [20, 21], [-0.1, -2.0])
    SampledSequence("stop", None, np.zeros(2, dtype=np.int64), np.zeros(2))


def mistakes_in_tensors_are_seen(datum: Datum, prompt: ModelInput) -> None:
    Datum(prompt, loss_fn_input={})  # type: ignore[call-arg]
    Datum(prompt, ["weights"])  # type: ignore[arg-type]
    TensorData([1], "int32")  # type: ignore[arg-type]
    ModelInput.from_ints("text")  # type: ignore[arg-type]
    SamplingParams(max_token=3)  # type: ignore[call-arg]
    SamplingParams(16)  # type: ignore[call-arg]
    SampledSequence("eos")  # type: ignore[arg-type]
    datum.model_input = prompt  # type: ignore[misc]
