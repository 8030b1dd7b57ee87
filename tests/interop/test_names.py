"""This package offers all public names of the reference client, except those that this module lists.

A failure means that the reference client has grown: offer the new item, or list it here with a reason. Fields
of types are compared in `test_types_oracle.py`, in both directions.
"""

from __future__ import annotations

import fnmatch
import importlib
import inspect
from pathlib import Path

import pytest
import tinker
import tinker.types
from interop import surface
from interop.conftest import REFERENCE_VERSION
from tinker.cli.__main__ import main_cli

import tinker_sync
import tinker_sync.lib.public_interfaces
import tinker_sync.types
from tinker_sync.cli.main import root

_PYDANTIC = "how the reference client declares its models"
_INSIDE = "a part that its clients are built of, not for scripts"
LEFT_OUT = {
    "tinker.APIResponse": "an HTTP response of the library that the reference client is built on",
    "tinker.AsyncAPIResponse": "an HTTP response of the library that the reference client is built on",
    "tinker.auth.ApiKeyAuthProvider": _INSIDE,
    "tinker.auth.resolve_auth_provider": _INSIDE,
    "tinker.cli.*": "the commands are compared, not the modules that they are made of",
    "tinker.lib.api_future_impl.QueueStateObserver": "`on_queue_state` of ServiceClient takes any function",
    "tinker.lib.api_future_impl.*": _INSIDE,
    "tinker.lib.async_tinker_provider.*": _INSIDE,
    "tinker.lib.backcompat_concurrent_future.*": _INSIDE,
    "tinker.lib.base_url.*": _INSIDE,
    "tinker.lib.chunked_fwdbwd_helpers.*": _INSIDE,
    "tinker.lib.client_connection_pool_type.*": _INSIDE,
    "tinker.lib.credentials.*": "the file is shared; `tinker_sync.auth` and the command line write it",
    "tinker.lib.internal_client_holder.*": _INSIDE,
    "tinker.lib.public_interfaces.backcompat_client_future.*": "clients are their own futures here",
    "tinker.lib.public_interfaces.rest_client_common.*": _INSIDE,
    "tinker.lib.queue_state_logger.*": _INSIDE,
    "tinker.lib.retry_handler.*": _INSIDE,
    "tinker.lib.retryable_exception.*": _INSIDE,
    "tinker.lib.sdk_method.*": _INSIDE,
    "tinker.lib.session_futures_poller.*": _INSIDE,
    "tinker.lib.sync_only.*": "waiting in an event loop needs no wrapper here",
    "tinker.lib.telemetry.*": _INSIDE,
    "tinker.lib.telemetry_provider.*": _INSIDE,
    "tinker.proto.*": "`tinker_sync.wire.proto` reads and writes these messages without the protobuf package",
    "tinker.resources.*": "one function for each request; `tinker_sync.wire.endpoints` is the table of them",
    **{
        f"tinker.lib.public_interfaces.{module}.{name}": _INSIDE
        for module, names in {
            "admin_client": "InternalClientHolder logger sync_only",
            "api_future": "T",
            "custom_loss": "check_loss_inputs encode_graph run_loss_handle trace_loss",
            "rest_client": "InternalClientHolder logger sync_only",
            "sampling_client": "QueueStateObserver RetryHandler SessionFuturesPoller U logger",
            "service_client": "InternalClientHolder QueueStateLogger encode_graph logger sync_only "
            "trace_loss",
            "training_client": "CustomLossFnV1 MODEL_ID_NOT_SET_ERROR QueueStateLogger check_loss_inputs "
            "combine_fwd_bwd_output_results fetch_training_info logger run_loss_handle sync_only",
        }.items()
        for name in names.split()
    },
    "tinker.types.*.BaseModel": _PYDANTIC,
    "tinker.types.*.ConfigDict": _PYDANTIC,
    "tinker.types.*.PYDANTIC_V2": _PYDANTIC,
    "tinker.types.*.PropertyInfo": _PYDANTIC,
    "tinker.types.*.StrictBase": _PYDANTIC,
    "tinker.types.*.topk_to_lists": "a conversion inside `TopkLogprobs`",
    "tinker.types.topk_logprobs.MASK_LOGPROB": "a number of the wire format",
    "tinker.types.dmel_chunk.tensor_container_dim": "a number of the wire format",
    "tinker.types.save_weights_response.checkpoint_console_url": "`tinker.lib.console_urls` has it",
}

# Names that scripts import from modules that only import them from elsewhere.
PASSED_ON = {
    "tinker.lib.api_future_impl.APIFuture",
    "tinker.lib.public_interfaces.sampling_client.RetryConfig",
    "tinker.lib.public_interfaces.service_client.RetryConfig",
}


def left_out(item: str) -> list[str]:
    return [pattern for pattern in LEFT_OUT if fnmatch.fnmatchcase(item, pattern)]


def test_everything_is_offered_or_left_out_on_purpose() -> None:
    items = surface.api(tinker) | PASSED_ON
    assert len(items) > 1200
    missing = {item for item in items if not surface.offers(tinker_sync, item)}
    assert {item for item in missing if not left_out(item)} == set()


def test_modules_that_are_left_out_name_what_to_use() -> None:
    asked = 0
    for path in Path(tinker.__file__).parent.rglob("*.py"):
        parts = path.relative_to(Path(tinker.__file__).parent).with_suffix("").parts
        if parts[0] == "cli" or parts[-1] in ("__init__", "__main__") or parts[-1].endswith("_test"):
            continue
        try:
            importlib.import_module(".".join(("tinker_sync", *parts)))
        except ImportError as refusal:
            assert "tinker_sync has no" in str(refusal), parts  # noqa: PT017  # some are offered
            asked += 1
    assert asked > 40


@pytest.mark.skipif(REFERENCE_VERSION < (0, 38), reason="some of what is left out is newer")
def test_nothing_is_listed_in_vain() -> None:
    missing = {item for item in surface.api(tinker) if not surface.offers(tinker_sync, item)}
    used = {pattern for item in missing for pattern in left_out(item)}
    gone = {pattern for pattern in LEFT_OUT if pattern.endswith(".sync_only")}  # until 0.36
    assert set(LEFT_OUT) - used - gone == set()


def test_every_command_and_option_is_offered() -> None:
    theirs = set(surface.commands(main_cli, "tinker"))
    assert len(theirs) > 60
    assert theirs - set(surface.commands(root(), "tinker")) == set()


def test_positional_arguments_have_the_same_order() -> None:
    for name in surface.CLIENTS:
        theirs, ours = getattr(tinker, name), getattr(tinker_sync, name)
        for method in (each for each in dir(theirs) if not each.startswith("_")):
            expected = surface.parameters(theirs, method)
            shared = [each for each in surface.parameters(ours, method) if each in expected]
            assert shared == expected, f"{name}.{method}"


def test_modules_offer_the_objects_of_the_front_door() -> None:
    for name in surface.modules(tinker):
        if name.startswith(("tinker.types.", "tinker.lib.public_interfaces")):
            path = name.replace("tinker", "tinker_sync", 1)
            for each in vars(importlib.import_module(name)):
                if surface.offers(tinker_sync, f"{name}.{each}") and each in tinker_sync.__all__:
                    assert getattr(importlib.import_module(path), each) is getattr(tinker_sync, each)


def test_errors_descend_alike() -> None:
    for name in set(tinker.__all__) & set(tinker_sync.__all__):
        theirs, ours = getattr(tinker, name), getattr(tinker_sync, name)
        if inspect.isclass(theirs) and issubclass(theirs, Exception):
            named = {base.__name__ for base in theirs.__mro__}
            assert named <= {base.__name__ for base in ours.__mro__}, name
