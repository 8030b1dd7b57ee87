"""Every public name of the reference client is offered under the same name, or listed as still to come."""

from __future__ import annotations

import importlib
import inspect
import types as python_types

import pytest
import tinker
import tinker.types

import tinker_sync
import tinker_sync.types

# What scripts import from modules of the reference client, as a look at public ones shows.
MODULES = {
    "lib.public_interfaces": "APIFuture LossHandle RestClient SamplingClient ServiceClient TrainingClient",
    "lib.public_interfaces.service_client": "ServiceClient RetryConfig",
    "lib.public_interfaces.training_client": "TrainingClient",
    "lib.public_interfaces.sampling_client": "SamplingClient",
    "lib.public_interfaces.rest_client": "RestClient",
    "lib.public_interfaces.admin_client": "AdminClient",
    "lib.public_interfaces.api_future": "APIFuture AwaitableConcurrentFuture",
    "lib.public_interfaces.custom_loss": "LossHandle PerDatumLossFn",
    "lib.retry_handler": "RetryConfig",
    "lib.experimental": "ExperimentalWarning",
    "types.checkpoint": "Checkpoint",
    "types.datum": "Datum",
    "types.dmel_chunk": "DmelChunk",
    "types.encoded_text_chunk": "EncodedTextChunk",
    "types.forward_backward_output": "ForwardBackwardOutput",
    "types.image_chunk": "ImageChunk",
    "types.loss_fn_type": "LossFnType",
    "types.model_input": "ModelInput",
    "types.model_input_chunk": "EncodedTextChunk ImageChunk ModelInputChunk",
    "types.sample_response": "SampleResponse",
    "types.sampled_sequence": "SampledSequence",
    "types.sampling_params": "SamplingParams",
    "types.stop_reason": "StopReason",
    "types.tensor_data": "TensorData",
}


def test_the_package_offers_what_the_reference_offers() -> None:
    assert set(tinker.__all__) - set(tinker_sync.__all__) == set()


@pytest.mark.parametrize("name", MODULES)
def test_modules_have_what_scripts_import_from_them(name: str) -> None:
    for each in MODULES[name].split():
        assert hasattr(importlib.import_module(f"tinker.{name}"), each)
        ours = getattr(importlib.import_module(f"tinker_sync.{name}"), each)
        known = getattr(tinker_sync, each, None) or getattr(tinker_sync.types, each, None)
        assert ours is (known or tinker_sync.APIFuture)


def test_types_offers_what_the_reference_offers() -> None:
    reference = {
        name
        for name, value in vars(tinker.types).items()
        if not name.startswith("_")
        and not isinstance(value, python_types.ModuleType)
        and name != "annotations"
    }
    assert len(reference) > 100
    assert reference - set(tinker_sync.types.__all__) == set()


def test_errors_descend_alike() -> None:
    for name in set(tinker.__all__) & set(tinker_sync.__all__):
        theirs, ours = getattr(tinker, name), getattr(tinker_sync, name)
        if inspect.isclass(theirs) and issubclass(theirs, Exception):
            named = {base.__name__ for base in theirs.__mro__}
            assert named <= {base.__name__ for base in ours.__mro__}, name
