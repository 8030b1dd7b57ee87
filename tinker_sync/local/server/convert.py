"""Conversion of values of the protocol to values of the engine, and back. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from tinker_sync.local.engine.losses import Csr, Example
from tinker_sync.local.engine.sampling import SampleSpec
from tinker_sync.local.server.problems import UserFault
from tinker_sync.types.model_input import EncodedTextChunk
from tinker_sync.types.sampling import (
    NO_LOGPROB,
    PromptAltTokens,
    SampledSequence,
    SampleResponse,
    TopkLogprobs,
)
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardOutput

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinker_sync.local.engine.host import BaseModel
    from tinker_sync.local.engine.lora import LoraParams
    from tinker_sync.local.engine.losses import Input
    from tinker_sync.local.engine.safetensors import Array
    from tinker_sync.local.engine.sampling import Sampled, SampleResult, TopK
    from tinker_sync.local.engine.training import LossOutput
    from tinker_sync.types.datum import Datum
    from tinker_sync.types.model_input import ModelInput
    from tinker_sync.types.sampling import SampleRequest

_OUTPUT_TYPE: Final = "ArrayRecord"
MOST_SAMPLES: Final = 65_536
"""The most samples of one request, which bounds the ids in the answer to it."""


def tokens_of(prompt: ModelInput, where: str) -> Array:
    """Return the token ids of an input; `where` names the input in messages.

    Raises:
        UserFault: the input has a chunk that is not text.
    """
    parts = []
    for index, chunk in enumerate(prompt.chunks):
        if not isinstance(chunk, EncodedTextChunk):
            raise UserFault(
                f"{where}.chunks[{index}]: is of type {chunk.type}; the models of this server read text only"
            )
        parts.append(chunk.as_int32())
    return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)


def examples(data: Sequence[Datum]) -> list[Example]:
    """Return training data in the form of the engine. Raises `UserFault` for a chunk that is not text."""
    return [
        Example(
            tokens_of(datum.model_input, f"data[{index}].model_input"),
            {name: _input(tensor) for name, tensor in datum.loss_fn_inputs.items()},
        )
        for index, datum in enumerate(data)
    ]


def _input(tensor: TensorData) -> Input:
    if tensor._crow is None or tensor._col is None or tensor.shape is None:
        return tensor._numpy
    return Csr(tensor._numpy, tensor._crow, tensor._col, (tensor.shape[0], tensor.shape[1]))


def loss_output(output: LossOutput) -> ForwardBackwardOutput:
    """Return the output of a pass in the form of the protocol."""
    records = [{"logprobs": TensorData._of(logprobs)} for logprobs in output.logprobs]
    return ForwardBackwardOutput(_OUTPUT_TYPE, records, dict(output.metrics))


# ---------------------------------------------------------------------------------------------- sampling


def sample_spec(
    request: SampleRequest, base: BaseModel, params: LoraParams | None, seed: int, max_cells: int
) -> SampleSpec:
    """Return a sample request in the form of the engine.

    Args:
        request: the request.
        base: the base model to sample from.
        params: the adapter; None for the base model itself.
        seed: the seed for a request without one.
        max_cells: the largest size of each array of scores in the response, and the most samples.

    Raises:
        UserFault: the prompt has a chunk that is not text, or the response would be too large.
    """
    prompt, asked = tokens_of(request.prompt, "prompt"), request.sampling_params
    targets = request.target_prompt_logprobs
    spec = SampleSpec(
        prompt=prompt,
        seed=seed if asked.seed is None else asked.seed,
        max_tokens=base.config.max_positions - len(prompt) if asked.max_tokens is None else asked.max_tokens,
        params=params,
        num_samples=request.num_samples,
        temperature=asked.temperature,
        top_k=asked.top_k,
        top_p=asked.top_p,
        stop_tokens=_stop_tokens(asked.stop, base),
        stop_texts=_stop_texts(asked.stop),
        prompt_logprobs=bool(request.prompt_logprobs),
        prompt_logprobs_last_n=request.prompt_logprobs_last_n,
        topk_prompt_logprobs=request.topk_prompt_logprobs,
        topk_logprobs=request.topk_sample_logprobs,
        target_prompt_logprobs=None if targets is None else targets.to_numpy(),
        prompt_alt_tokens=request.prompt_alt_tokens_k,
    )
    _check_cells(spec, max_cells)
    return spec


def _check_cells(spec: SampleSpec, most: int) -> None:
    """Raise `UserFault` for more than `most` cells in an array of the response, or for too many samples."""
    length = len(spec.prompt)
    targets = spec.target_prompt_logprobs
    for name, cells in {
        "topk_prompt_logprobs": length * spec.topk_prompt_logprobs,
        "topk_sample_logprobs": spec.num_samples * spec.max_tokens * spec.topk_logprobs,
        "prompt_alt_tokens_k": length * spec.prompt_alt_tokens,
        "target_prompt_logprobs": 0 if targets is None else length * len(np.unique(targets)),
    }.items():
        if cells > most:
            raise UserFault(f"{name}: {cells} cells are asked for, at most {most} are computed")
    most_samples = min(most, MOST_SAMPLES)
    if spec.num_samples > most_samples:
        raise UserFault(f"num_samples: {spec.num_samples} are asked for, at most {most_samples} are drawn")


def _stop_tokens(stop: Any, base: BaseModel) -> frozenset[int]:
    if stop is None:
        return base.end_tokens
    return frozenset() if isinstance(stop, str) else frozenset(each for each in stop if isinstance(each, int))


def _stop_texts(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(each for each in stop if isinstance(each, str))


def sample_response(result: SampleResult, sequence_ids: Iterable[str | None]) -> SampleResponse:
    """Return a sample result in the form of the protocol; `sequence_ids` has an id for each sample."""
    prompt, alternatives = result.prompt, None
    if prompt.alt_tokens is not None and prompt.alt_logprobs is not None:
        alternatives = PromptAltTokens(
            TensorData.from_numpy(prompt.alt_tokens), TensorData.from_numpy(prompt.alt_logprobs)
        )
    targets = prompt.target_logprobs
    return SampleResponse(
        [_sequence(*each) for each in zip(result.samples, sequence_ids, strict=True)],
        prompt.logprobs,
        _topk(prompt.topk),
        None if targets is None else TensorData.from_numpy(targets),
        result.prompt_cache_hit_tokens,
        alternatives,
    )


def _sequence(sample: Sampled, sequence_id: str | None) -> SampledSequence:
    reason: Any = sample.stop_reason
    return SampledSequence(reason, sequence_id, sample.tokens, sample.logprobs, _topk(sample.topk))


def _topk(topk: TopK | None) -> TopkLogprobs | None:
    """Return the likeliest tokens in the form of the protocol; cells without a score get `NO_LOGPROB`."""
    if topk is None:
        return None
    missing = np.isnan(topk.logprobs)
    return TopkLogprobs(
        np.where(missing, 0, topk.token_ids).astype(np.int32),
        np.where(missing, NO_LOGPROB, topk.logprobs).astype(np.float32),
    )
