"""Objects that the reference client makes work in the calls of this package, and its pickles load."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import pytest
import tinker
from tinker.lib.retry_handler import RetryConfig

import tinker_sync
from tinker_sync.testing import LocalServer

PROMPT = tinker.ModelInput.from_ints([1, 2, 3])
WEIGHTS = np.array([0.0, 1.0, 1.0], dtype=np.float32)
DATUM = tinker.Datum(PROMPT, {"target_tokens": [2, 3, 4], "weights": WEIGHTS})  # type: ignore[dict-item]
OURS = tinker_sync.Datum(
    tinker_sync.ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": WEIGHTS}
)


def test_a_script_trains_and_samples_with_objects_of_the_reference() -> None:
    with (
        LocalServer() as server,
        tinker_sync.ServiceClient(base_url=server.url, api_key=server.key) as service,
    ):
        training: Any = service.create_lora_training_client("tinker-sync/tiny", rank=4, seed=1)
        passed = training.forward_backward([DATUM], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=1e-4)).result()
        same: Any = service.create_lora_training_client("tinker-sync/tiny", rank=4, seed=1)
        expected = same.forward_backward([OURS], "cross_entropy").result().metrics["loss:sum"]
        assert passed.result().metrics["loss:sum"] == pytest.approx(expected)
        sampling: Any = service.create_sampling_client(
            base_model="tinker-sync/tiny",
            retry_config=RetryConfig(max_connections=3),  # type: ignore[arg-type]
        )
        params = tinker.SamplingParams(max_tokens=2, stop=["x"])
        assert len(sampling.sample(PROMPT, 1, params).result().sequences) == 1
        assert len(sampling.compute_logprobs(PROMPT).result()) == 3
        [item] = sampling.map([PROMPT], params)
        assert len(item.result().sequences) == 1


class _AsTinker(pickle.Unpickler):
    """Loads pickles as a program does in which `tinker` is this package."""

    def find_class(self, module: str, name: str) -> Any:
        package, _, rest = module.partition(".")
        return super().find_class(module if package != "tinker" else f"tinker_sync.{rest}".rstrip("."), name)


SEQUENCE = tinker.types.SampledSequence("stop", "seq-1", np.array([5, 6]), None)
assert SEQUENCE.tokens == [5, 6]  # which the object keeps, also in its pickle


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        (DATUM, OURS),
        (PROMPT, OURS.model_input),
        (
            tinker.SamplingParams(max_tokens=3, stop=["x"]),
            tinker_sync.SamplingParams(max_tokens=3, stop=["x"]),
        ),
        (tinker.AdamParams(learning_rate=0.5), tinker_sync.AdamParams(learning_rate=0.5)),
        (
            tinker.TensorData([7.0], "float32", [2, 9], [0, 0, 1], [4]),
            tinker_sync.TensorData([7.0], "float32", [2, 9], [0, 0, 1], [4]),
        ),
        (SEQUENCE, tinker_sync.SampledSequence("stop", "seq-1", np.array([5, 6]))),
        (
            tinker.types.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5}),
            tinker_sync.ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5}),
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pickles_of_the_reference_load_as_objects_of_this_package(theirs: Any, expected: Any) -> None:
    loaded = _AsTinker(io.BytesIO(pickle.dumps(theirs))).load()
    assert type(loaded) is type(expected)
    assert loaded == expected
