"""Names that this package does not have: modules of the reference client, and what earlier versions had.

Each has a sentence that names what to use in its place. `_base.lazy` asks for it when it finds no such module
or attribute, and a client when it gets an unknown argument or is asked for an attribute that it had.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NoReturn

_REQUESTS: Final = (
    "ServiceClient, TrainingClient, SamplingClient and RestClient have a method for each request"
)
_HOLDER: Final = (
    "a client's `holder` has its connections; pass it to RestClient, AdminClient, TrainingClient or "
    "SamplingClient.create, and make requests with their methods"
)
_KEYS: Final = "tinker_sync.auth reads and writes keys, and ServiceClient(api_key=...) takes one"
_WAITING: Final = "an APIFuture has the result; status() tells where its call is"
_TELEMETRY: Final = "the clients send nothing but your calls, and get_telemetry() returns None"
_QUEUE: Final = "ServiceClient(on_queue_state=...) takes a function that gets every change"
_RETRIES: Final = (
    "RetryConfig sets the tries of a sampling client, and is_retryable_status_code judges a status"
)

_CRASHES: Final = (
    "service.checkpoints(directory) saves a training in steps, and its resume() returns a client of the last "
    "save and the next step"
)

_LATENCY: Final = "FaultPlan().latency(endpoint, seconds) takes a number of seconds"
_SAMPLER: Final = (
    "tinker_sync.ray.Sampler samples a data set of Ray Data, and takes save_to; tasks and actors take a "
    "sampling client as an argument"
)

_BILL: Final = "AdminClient(service.holder).get_billing_usage has the bill, and service.usage() the counts"

_INSTEAD: Final = {
    "_base_client": _REQUESTS,
    "_client": _REQUESTS,
    "_compat": "types have the methods model_dump, model_copy and model_validate",
    "_constants": "tinker_sync.Timeout and ServiceClient(max_retries=...) have the settings of requests",
    "_files": _REQUESTS,
    "_models": "types have the methods model_dump, model_copy and model_validate",
    "_qs": _REQUESTS,
    "_resource": _REQUESTS,
    "_response": _REQUESTS,
    "_streaming": _REQUESTS,
    "_types": "tinker_sync.Timeout and tinker_sync.RequestOptions have the settings of requests",
    "_utils": _REQUESTS,
    "proto": "tinker_sync.wire.proto reads and writes these messages",
    "resources": _REQUESTS,
    "telemetry": _TELEMETRY,
    "types._pydantic_types": "tinker_sync.types has these classes",
    "types._tensor_container": "TensorData has the conversions",
    "types._torch_utils": "TensorData has the conversions",
    "lib._auth_token_provider": _KEYS,
    "lib._jwt_auth": _KEYS,
    "lib._pydantic_conv": "types have the methods model_dump and model_validate",
    "lib.async_tinker_provider": _HOLDER,
    "lib.backcompat_concurrent_future": _WAITING,
    "lib.base_url": "ServiceClient(base_url=...) and TINKER_BASE_URL set the address",
    "lib.client_connection_pool_type": _HOLDER,
    "lib.credentials": _KEYS,
    "lib.internal_client_holder": _HOLDER,
    "lib.queue_state_logger": _QUEUE,
    "lib.retryable_exception": _RETRIES,
    "lib.sdk_method": "the clients name their methods in each request",
    "lib.session_futures_poller": _WAITING,
    "lib.sync_only": "calls may block in an event loop; await their futures there",
    "lib.telemetry": _TELEMETRY,
    "lib.telemetry_provider": _TELEMETRY,
    "lib.public_interfaces.backcompat_client_future": "a client is the future of its own creation",
    "lib.public_interfaces.rest_client_common": _REQUESTS,
    # Names in modules that this package does have.
    "lib.QueueStateObserver": _QUEUE,
    "lib.RetryHandler": _RETRIES,
    "lib._CombinedAPIFuture": "tinker_sync.gather waits for several futures",
    # Names that earlier versions had.
    "demo": "`tinker-sync demo` runs tinker_sync.examples.demo",
    "journal": _CRASHES,
    "JournalError": _CRASHES,
    "errors.JournalError": _CRASHES,
    "ServiceClient.attach": _CRASHES,
    "ServiceClient.trainings": _CRASHES,
    "ServiceClient.reconcile": _BILL,
    "TrainingClient.steps": f"range(first, stop) counts the steps, and {_CRASHES}",
    "TrainingClient.unread": _CRASHES,
    "TrainingClient.settled": _CRASHES,
    "insight.reconcile": _BILL,
    "insight.Reconciliation": _BILL,
    "insight.Difference": _BILL,
    "testing.latency": _LATENCY,
    "ray.map": _SAMPLER,
    "ray.SamplerPool": _SAMPLER,
}
"""What to use in the place of a module, a name in it, or an attribute of a client, by its path."""

OPTIONS_OF_TRANSFORMERS: Final = (
    *("text_pair", "padding", "truncation", "max_length", "pad_to_multiple_of", "padding_side"),
    *("return_tensors", "return_attention_mask", "return_token_type_ids", "return_special_tokens_mask"),
    *("return_length", "return_assistant_tokens_mask", "tokenizer_kwargs"),
)
"""Options of a tokenizer that `transformers` has and `Tokenizer` has not."""

_VERIFY: Final = "call tinker_sync.loop.verify_checkpoint after the save"
_ARGUMENTS: Final = {
    "FaultPlan(seed)": _LATENCY,
    "LocalServer(process)": "leave it out; a test that kills a server starts `python -m tinker_sync.local`",
    "ServiceClient(journal)": _CRASHES,
    "ServiceClient(keeper)": "leave it out; if the server drops the session of a process that did not run "
    "for minutes, recover() or service.checkpoints() goes on from the last save",
    "ServiceClient(pace)": "set TINKER_PACE in tests, or use the clients of testing.LocalServer(pace=...)",
    "TrainingClient(recorded)": "leave it out",
    "ServiceClient(telemetry)": "leave it out; the client sends nothing but your calls",
    **{
        f"Tokenizer({name})": "get_tokenizer(backend='transformers') returns a tokenizer that has it"
        for name in OPTIONS_OF_TRANSFORMERS
    },
    "create_training_client_from_state_with_optimizer(verify)": _VERIFY,
    "save_state(verify)": _VERIFY,
}
"""What to use in the place of an argument that earlier versions had."""


def words_on(path: str) -> str | None:
    """Return advice on a name that this package leaves out, or on a name inside of it; None for other names.

    >>> words_on("TrainingClient.unread")
    "tinker_sync has no 'TrainingClient.unread': service.checkpoints(directory) saves a training in steps, ...
    """
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        instead = _INSTEAD.get(".".join(parts[:end]))
        if instead is not None:
            return f"tinker_sync has no {path!r}: {instead}"
    return None


def refuse(module: str) -> None:
    """Raise an ImportError that names what to use, if `module` or a package around it is left out.

    >>> refuse("tinker_sync.proto.tinker_public_pb2")
    Traceback (most recent call last):
    ImportError: tinker_sync has no 'proto.tinker_public_pb2': tinker_sync.wire.proto reads and ...
    """
    words = words_on(module.partition(".")[2])
    if words is not None:
        raise ImportError(words, name=module)


def refuse_arguments(call: str, given: Iterable[str], *, unknown: bool = False) -> None:
    """Raise a TypeError for an argument that `call` has no more. The error names what to use in its place.

    Args:
        call: the method or class.
        given: the names of arguments that it does not have.
        unknown: also raise for an argument that no version had.

    >>> refuse_arguments("ServiceClient", ["telemetry"])
    Traceback (most recent call last):
    TypeError: ServiceClient has no argument 'telemetry' any more: leave it out; the client sends nothing ...
    """
    for name in given:
        instead = _ARGUMENTS.get(f"{call}({name})")
        if instead is not None:
            raise TypeError(f"{call} has no argument {name!r} any more: {instead}")
        if unknown:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}")


class Removed:
    """An attribute that a class had in an earlier version. Reading it says what to use instead."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._path = f"{owner.__name__}.{name}"

    def __get__(self, instance: Any, owner: type) -> NoReturn:
        raise AttributeError(words_on(self._path))
