"""Functions that fit requests to the dialect of a server, or refuse features that it would drop.

The functions are pure. A request that needs no change is returned as it is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from tinker_sync import types
from tinker_sync.errors import InvalidInputError, UnsupportedByServerError
from tinker_sync.wire import json as json_codec
from tinker_sync.wire.dialect import Dialect, Version

if TYPE_CHECKING:
    from tinker_sync.types import Datum, ForwardBackwardInput, SampleRequest, TensorData
    from tinker_sync.types._model import Model

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,255}")

# Fields that requests always carry, and their first version: older servers may refuse them. Requests are
# listed by the names of their classes, so that a program loads only the classes that it uses.
_SINCE: Final[Mapping[str, Mapping[str, Version]]] = {
    "CreateModelRequest": {"optimizer_config": (0, 29)},
    "FutureRetrieveRequest": {"allow_metadata_only": (0, 18)},
    "SaveWeightsRequest": {"overwrite": (0, 18)},
    "SaveWeightsForSamplerRequest": {"kind": (0, 38)},
    "SampleRequest": {
        "record_stability_info": (0, 26),
        "topk_sample_logprobs": (0, 29),
        "prompt_alt_tokens_k": (0, 31),
    },
}


def refuse_unsupported(request: Model, dialect: Dialect) -> None:
    """Refuse a request with features that the server would skip silently.

    Raises:
        UnsupportedByServerError: the request has such a feature; nothing was sent.

    >>> from tinker_sync.types import ModelInput, SampleRequest, SamplingParams
    >>> request = SampleRequest(
    ...     prompt=ModelInput.from_ints([1]), sampling_params=SamplingParams(), topk_sample_logprobs=2
    ... )
    >>> refuse_unsupported(request, Dialect.forced("json"))
    Traceback (most recent call last):
        ...
    tinker_sync.errors.UnsupportedByServerError: this server does not know topk_sample_logprobs ...
    """
    find_features = _FEATURES_OF.get(type(request).__name__)
    for feature in find_features(request) if find_features is not None else ():
        if not dialect.knows(feature):
            raise UnsupportedByServerError(
                f"this server does not know {feature} and would leave it out silently "
                f"(it speaks version {'.'.join(map(str, dialect.version))} of the protocol)",
                feature=feature,
            )


def refuse_missing_call(name: str, dialect: Dialect) -> None:
    """Refuse a call that the server does not offer, before the call takes a sequence number.

    Raises:
        UnsupportedByServerError: the server has no such call; nothing was sent.

    >>> refuse_missing_call("save_weights_external", Dialect.forced("json"))
    Traceback (most recent call last):
        ...
    tinker_sync.errors.UnsupportedByServerError: this server does not offer save_weights_external ...
    """
    if not dialect.offers(name):
        raise UnsupportedByServerError(
            f"this server does not offer {name} "
            f"(it speaks version {'.'.join(map(str, dialect.version))} of the protocol)",
            feature=name,
        )


def _of_sampling(request: SampleRequest) -> Iterator[str]:
    for name in ("topk_sample_logprobs", "prompt_alt_tokens_k", "record_stability_info"):
        if getattr(request, name):
            yield name
    for name in ("target_prompt_logprobs", "prompt_logprobs_last_n"):
        if getattr(request, name) is not None:
            yield name


def _of_training(given: ForwardBackwardInput) -> Iterator[str]:
    if any(isinstance(value, str) for value in (given.loss_fn_config or {}).values()):
        yield "text in loss_fn_config"
    if any(datum.model_input_spans is not None for datum in given.data):
        yield "provenance spans"


def _of_optim_step(request: types.OptimStepRequest) -> Iterator[str]:
    if not isinstance(request.optim_params, types.AdamParams):
        yield "optimizers other than Adam"


def _of_creation(request: types.CreateModelRequest) -> Iterator[str]:
    if not isinstance(request.optimizer_config, types.AdamOptimizerConfig):
        yield "optimizers other than Adam"


def _of_loading(request: types.LoadWeightsRequest) -> Iterator[str]:
    if request.model_id is None:
        yield "create_model_via_load_weights"


def _of_saving(request: types.SaveWeightsForSamplerRequest) -> Iterator[str]:
    if request.kind == "inflight":
        yield "inflight sampling clients"


_FEATURES_OF: Final[Mapping[str, Callable[[Any], Iterator[str]]]] = {
    "SampleRequest": _of_sampling,
    "ForwardBackwardInput": _of_training,
    "ForwardBackwardRequest": lambda request: _of_training(request.forward_backward_input),
    "ForwardRequest": lambda request: _of_training(request.forward_input),
    "OptimStepRequest": _of_optim_step,
    "CreateModelRequest": _of_creation,
    "LoadWeightsRequest": _of_loading,
    "SaveWeightsForSamplerRequest": _of_saving,
    "CreateCustomLossRequest": lambda _: iter(["custom losses on the server"]),
}
"""The functions that yield the newer features that a request uses, by the class of the request."""


def normalise_sample_request(
    request: SampleRequest, dialect: Dialect, context_length: Callable[[], int | None] = lambda: None
) -> SampleRequest:
    """Fit a sample request to an older server: stop texts in a list, and `max_tokens` set.

    Args:
        request: the request.
        dialect: the dialect of the server.
        context_length: returns the context of the model in tokens, or None if it is not known. Called if
            `max_tokens` is not given: a sample may then be as long as the context allows.

    Raises:
        UnsupportedByServerError: `max_tokens` is not given, and the context is not known.
        InvalidInputError: the prompt leaves no room in the context.
    """
    if not dialect.reads_data_only:
        return request
    params = request.sampling_params
    changes: dict[str, Any] = {}
    if params.max_tokens is None:
        changes["max_tokens"] = _room_for_tokens(request, context_length())
    if isinstance(params.stop, str):
        changes["stop"] = [params.stop]
    if not changes:
        return request
    return request.model_copy(update={"sampling_params": params.model_copy(update=changes)})


def _room_for_tokens(request: SampleRequest, context: int | None) -> int:
    if context is None:
        raise UnsupportedByServerError(
            "this server needs max_tokens to be given, and does not name the context length of the model: "
            "SamplingParams(max_tokens=...)",
            feature="max_tokens",
        )
    room = context - request.prompt.length
    if room < 1:
        raise InvalidInputError(
            f"prompt: {request.prompt.length} tokens leave no room in the context of {context} tokens"
        )
    return room


def normalise_forward_backward(given: ForwardBackwardInput, dialect: Dialect) -> ForwardBackwardInput:
    """Fit examples to a server that reads flat values only: make sparse tensors dense, and drop shapes.

    Raises:
        UnsupportedByServerError: a tensor has two dimensions larger than 1.
    """
    if not dialect.reads_data_only:
        return given
    data = [_flat_datum(datum, index) for index, datum in enumerate(given.data)]
    if all(new is old for new, old in zip(data, given.data, strict=True)):
        return given
    return given.model_copy(update={"data": data})


def _flat_datum(datum: Datum, index: int) -> Datum:
    inputs = {
        name: _flat(tensor, f"data[{index}].loss_fn_inputs[{name!r}]")
        for name, tensor in datum.loss_fn_inputs.items()
    }
    if all(inputs[name] is tensor for name, tensor in datum.loss_fn_inputs.items()):
        return datum
    return datum.model_copy(update={"loss_fn_inputs": inputs})


def _flat(tensor: TensorData, place: str) -> TensorData:
    shape = tensor.shape
    if shape is None or (len(shape) == 1 and not tensor.is_sparse):
        return tensor
    if sum(size != 1 for size in shape) > 1:
        raise UnsupportedByServerError(
            f"{place}: this server takes one value a token, not shape {shape}",
            feature="tensors of two dimensions",
        )
    return types.TensorData._wrap(tensor.to_numpy().reshape(-1), tensor.dtype, [math.prod(shape)])


def check_checkpoint_name(name: str, dialect: Dialect) -> None:
    """Refuse a checkpoint name that older servers refuse, before the call takes a sequence number.

    Raises:
        InvalidInputError: the name is too long, or has other characters than letters, digits, `_` and `-`.
    """
    if dialect.reads_data_only and not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"checkpoint name {name!r}: this server takes 1 to 255 letters, digits, '_' and '-'"
        )


def json_body(request: Model, dialect: Dialect) -> bytes:
    """Return the JSON body of a request, without fields that a server of this version does not know.

    >>> from tinker_sync.types import FutureRetrieveRequest
    >>> json_body(FutureRetrieveRequest(request_id="r"), Dialect.forced("json"))
    b'{"request_id":"r"}'
    """
    unknown = [
        name for name, since in _SINCE.get(type(request).__name__, {}).items() if dialect.version < since
    ]
    if not unknown:
        return json_codec.encode(request)
    tree: dict[str, Any] = json_codec.to_plain(request)
    return json_codec.dumps({name: value for name, value in tree.items() if name not in unknown})
