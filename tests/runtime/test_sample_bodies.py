"""The bodies of samples that are spliced from cached parts are the same as fully encoded ones."""

from __future__ import annotations

import numpy as np
import pytest

from tinker_sync.runtime.samples import SampleBodies
from tinker_sync.types import (
    EncodedTextChunk,
    ImageChunk,
    ModelInput,
    SampleRequest,
    SamplingParams,
    TensorData,
)
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.adapt import json_body
from tinker_sync.wire.dialect import Dialect

VENDOR = Dialect.of_vendor()
TWO = ModelInput.from_ints([1, 2])


def request(prompt: ModelInput = TWO, **given: object) -> SampleRequest:
    params = given.pop("params", SamplingParams(max_tokens=8, temperature=0.5))
    return SampleRequest(prompt=prompt, sampling_params=params, sampling_session_id="s:1", **given)  # type: ignore[arg-type]


def whole(sample: SampleRequest, number: int, dialect: Dialect = VENDOR) -> bytes:
    return wire_json.with_number(json_body(sample, dialect), number)


@pytest.mark.parametrize(
    "prompt",
    [
        ModelInput.from_ints([]),
        ModelInput.from_ints([5]),
        ModelInput(chunks=[EncodedTextChunk(tokens=(1, 2, 3))]),
        ModelInput(chunks=[EncodedTextChunk(tokens=range(4))]),
        ModelInput(chunks=[EncodedTextChunk(tokens=np.arange(3))]),
        ModelInput(chunks=[EncodedTextChunk(tokens=[1]), EncodedTextChunk(tokens=[2])]),
        ModelInput(
            chunks=[EncodedTextChunk(tokens=[1]), ImageChunk(data=b"x", format="png", expected_tokens=2)]
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("dialect", [VENDOR, Dialect.forced("json")], ids=["vendor", "json"])
def test_every_prompt_gives_the_body_that_is_written_whole(prompt: ModelInput, dialect: Dialect) -> None:
    bodies = SampleBodies(dialect)
    for number in (0, 7):
        sample = request(prompt)
        assert bodies.encode(sample, number) == whole(sample, number, dialect)


def test_a_field_that_changes_is_noticed() -> None:
    bodies = SampleBodies(VENDOR)
    samples = [
        request(),
        request(num_samples=2),
        request(prompt_logprobs=True, prompt_logprobs_last_n=1),
        request(params=SamplingParams(max_tokens=8, seed=3, stop=["a"])),
        request(params=SamplingParams(max_tokens=8, seed=3, stop=("a",))),
        request(params=SamplingParams(max_tokens=8, seed=3, stop=[4])),
        request(target_prompt_logprobs=TensorData.from_numpy(np.array([[1]]))),
    ]
    for number, sample in enumerate(samples * 2):
        assert bodies.encode(sample, number) == whole(sample, number)


def test_a_list_of_stops_that_its_user_changes_is_noticed() -> None:
    params = SamplingParams(max_tokens=8, stop=["a"])
    bodies = SampleBodies(VENDOR)
    bodies.encode(request(params=params), 0)
    assert isinstance(params.stop, list)
    params.stop.append("b")
    assert bodies.encode(request(params=params), 1) == whole(request(params=params), 1)


def test_a_stop_text_that_looks_like_the_mark_does_no_harm() -> None:
    sample = request(params=SamplingParams(max_tokens=8, stop="[1999999999]"))
    bodies = SampleBodies(VENDOR)
    assert bodies.encode(sample, 0) == bodies.encode(sample, 0) == whole(sample, 0)
