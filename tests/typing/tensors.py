"""Types that hold arrays. mypy reads this file; nothing runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tinker_sync.types import (
    Datum,
    EncodedTextChunk,
    ForwardBackwardInput,
    ImageChunk,
    ModelInput,
    SampledProvenanceSpan,
    SampledSequence,
    SampleRequest,
    SampleResponse,
    SamplingParams,
    TensorData,
    TopkLogprobs,
)

if TYPE_CHECKING:
    from typing_extensions import assert_type


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


def mistakes_are_seen(datum: Datum, prompt: ModelInput) -> None:
    Datum(prompt, loss_fn_input={})  # type: ignore[call-arg]
    Datum(prompt, ["weights"])  # type: ignore[arg-type]
    TensorData([1], "int32")  # type: ignore[arg-type]
    ModelInput.from_ints("text")  # type: ignore[arg-type]
    SamplingParams(max_token=3)  # type: ignore[call-arg]
    SamplingParams(16)  # type: ignore[call-arg]
    SampledSequence("eos")  # type: ignore[arg-type]
    datum.model_input = prompt  # type: ignore[misc]
