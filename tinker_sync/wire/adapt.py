"""Requests in the form that a server of some dialect takes, and responses that show what it dropped.

`fit` is the one way from a request to what is sent: it refuses what the server lacks or would drop silently,
and gives the rest the form that older servers read. `json_body` then leaves out the fields that they do not
know. `check_response` looks at samples, because a response shows which features the server has dropped. No
function does I/O.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from tinker_sync import types
from tinker_sync._base.numpy import np
from tinker_sync.errors import InvalidInputError, UnsupportedByServerError, WireError
from tinker_sync.wire import json as json_codec
from tinker_sync.wire.dialect import NEWER_PARTS, Dialect

if TYPE_CHECKING:
    from tinker_sync.types import (
        Datum,
        ForwardBackwardInput,
        SampledSequence,
        SampleRequest,
        SampleResponse,
        TensorData,
        TopkLogprobs,
    )
    from tinker_sync.types._model import Model

ModelT = TypeVar("ModelT", bound="Model")

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,255}")


def fit(
    request: ModelT,
    dialect: Dialect,
    *,
    call: str | None = None,
    context_length: Callable[[], int | None] = lambda: None,
) -> ModelT:
    """Return a request in the form that the server takes. For a server of today, that is the request itself.

    Callers do this before they take a sequence number.

    Args:
        request: the request, or the data of a pass.
        dialect: the dialect of the server.
        call: the name of the call, to refuse one that the server does not offer.
        context_length: returns the context length of the model in tokens, or None if it is not known. It is
            called if a sample gives no `max_tokens` and the server needs it.

    Raises:
        UnsupportedByServerError: the server lacks the call, or would skip a part of the request silently.
        InvalidInputError: the server would refuse the request.

    >>> from tinker_sync.types import ModelInput, SampleRequest, SamplingParams
    >>> request = SampleRequest(
    ...     prompt=ModelInput.from_ints([1]), sampling_params=SamplingParams(), topk_sample_logprobs=2
    ... )
    >>> fit(request, Dialect.of_vendor()) is request
    True
    >>> fit(request, Dialect.forced("json"))
    Traceback (most recent call last):
        ...
    tinker_sync.errors.UnsupportedByServerError: this server does not know topk_sample_logprobs ...
    """
    if call is not None and not dialect.offers(call):
        raise UnsupportedByServerError(
            f"this server does not offer {call} "
            f"(it speaks version {'.'.join(map(str, dialect.version))} of the protocol)",
            feature=call,
        )
    if dialect.knows_all:
        return request
    kind = type(request).__name__
    for part in NEWER_PARTS.get(kind, ()):
        if dialect.version < part.since and part.used is not None and part.used(request):
            raise UnsupportedByServerError(
                f"this server does not know {part.name} and would leave it out silently "
                f"(it speaks version {'.'.join(map(str, dialect.version))} of the protocol)",
                feature=part.name,
            )
    if not dialect.reads_data_only:
        return request
    if kind == "SampleRequest":
        return cast("ModelT", _fit_sample(cast("Any", request), context_length))
    if kind == "ForwardBackwardInput":
        return cast("ModelT", _fit_training(cast("Any", request)))
    if kind in ("SaveWeightsRequest", "SaveWeightsForSamplerRequest"):
        _check_checkpoint_name(cast("Any", request).path)
    return request


def _fit_sample(request: SampleRequest, context_length: Callable[[], int | None]) -> SampleRequest:
    """Put a stop text into a list, and set `max_tokens`.

    Raises:
        UnsupportedByServerError: `max_tokens` is not given, and the context length is not known.
        InvalidInputError: the prompt leaves no room in the context, or the length of the prompt is unknown.
    """
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


def _fit_training(given: ForwardBackwardInput) -> ForwardBackwardInput:
    """Make all tensors dense and one-dimensional.

    Raises:
        UnsupportedByServerError: a tensor has more than one dimension of a size other than 1.
    """
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


def _check_checkpoint_name(name: str | None) -> None:
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidInputError(
            f"checkpoint name {name!r}: this server takes 1 to 255 letters, digits, '_' and '-'"
        )


def json_body(request: Model, dialect: Dialect) -> bytes:
    """Return the JSON body of a request, without fields that are newer than the version of the dialect.

    >>> from tinker_sync.types import FutureRetrieveRequest
    >>> json_body(FutureRetrieveRequest(request_id="r"), Dialect.forced("json"))
    b'{"request_id":"r"}'
    """
    if dialect.knows_all:
        return json_codec.encode(request)
    parts = NEWER_PARTS.get(type(request).__name__, ())
    unknown = {part.field for part in parts if part.field and dialect.version < part.since}
    if not unknown:
        return json_codec.encode(request)
    tree: dict[str, Any] = json_codec.to_plain(request)
    return json_codec.dumps({name: value for name, value in tree.items() if name not in unknown})


# ------------------------------------------------------------------------------------------ responses


def name_sequences(response: SampleResponse, sequence_ids: Sequence[str] | None) -> SampleResponse:
    """Give the sequences of a response the ids that the promise had, and return the response.

    Promises of older servers have no ids: the response then stays as it is. The response is changed in place,
    so no other code may have it yet.

    Raises:
        WireError: the number of ids is not the number of sequences.

    >>> from tinker_sync.types import SampledSequence, SampleResponse
    >>> response = SampleResponse([SampledSequence("stop")])
    >>> name_sequences(response, ["seq-1"]).sequences[0].sequence_id
    'seq-1'
    """
    if not sequence_ids:
        return response
    if len(sequence_ids) != len(response.sequences):
        raise WireError(
            f"the promise has {len(sequence_ids)} ids for {len(response.sequences)} sequences",
            "sample_sequence_ids",
        )
    for sequence, name in zip(response.sequences, sequence_ids, strict=True):
        sequence._fill("sequence_id", name)
    return response


def check_response(request: SampleRequest, response: SampleResponse) -> SampleResponse:
    """Check a response against its request, and return it.

    The first prompt token has no score, and some servers leave out its entry in `prompt_logprobs`. If the
    prompt is all text, this function then returns a copy of the response that has the entry.

    Raises:
        UnsupportedByServerError: a part that the request asks for is missing, or the scores of the prompt are
            not limited to `prompt_logprobs_last_n`.
        WireError: the response has a different number of sequences or scores than the request asks for.
    """
    sequences = response.sequences
    if len(sequences) != request.num_samples:
        raise WireError(f"expected {request.num_samples}, got {len(sequences)}", "sequences")
    for index, sequence in enumerate(sequences):
        if sequence._logprobs is not None or request.topk_sample_logprobs:
            _check_sequence(sequence, index, request.topk_sample_logprobs)
    asks_for_prompt = (
        request.prompt_logprobs
        or request.topk_prompt_logprobs
        or request.prompt_alt_tokens_k
        or request.target_prompt_logprobs is not None
    )
    if asks_for_prompt:
        _check_prompt(request, response)
    if asks_for_prompt or response._prompt_logprobs is not None:
        return _with_first_score(request, response)
    return response


def _check_sequence(sequence: SampledSequence, index: int, topk: int) -> None:
    count, logprobs = sequence.length, sequence._logprobs
    # Some servers send an empty list if they computed no scores.
    if logprobs is not None and len(logprobs) not in (0, count):
        _refuse_size(f"sequences[{index}].logprobs", count, len(logprobs))
    if topk and count:
        if sequence.topk_logprobs_np is None:
            raise _ignored("topk_sample_logprobs")
        _check_rows(f"sequences[{index}].topk_logprobs", sequence.topk_logprobs_np, {count})


def _check_prompt(request: SampleRequest, response: SampleResponse) -> None:
    scored, last_n = response._prompt_logprobs, request.prompt_logprobs_last_n
    length = request.prompt.known_length()
    # A prompt of one token has no scores, because a first token has none.
    scorable = length != 1
    if request.prompt_logprobs and scored is None and scorable:
        raise _ignored("prompt_logprobs")
    if request.topk_prompt_logprobs and response.topk_prompt_logprobs_np is None and scorable:
        raise _ignored("topk_prompt_logprobs")
    if request.prompt_alt_tokens_k and response.prompt_alt_tokens is None:
        raise _ignored("prompt_alt_tokens_k")
    if request.target_prompt_logprobs is not None and response.target_prompt_logprobs is None:
        raise _ignored("target_prompt_logprobs")
    if last_n is not None and scored is not None and not _only_last(np.asarray(scored), last_n):
        raise _ignored("prompt_logprobs_last_n")
    if length is not None:
        _check_lengths(request, response, length)


def _check_lengths(request: SampleRequest, response: SampleResponse, length: int) -> None:
    # Some servers leave out the entry of the first token, which has no score.
    expected = {length, length - 1}
    if request.prompt_logprobs_last_n is not None:
        expected.add(request.prompt_logprobs_last_n)
    scored, topk = response._prompt_logprobs, response.topk_prompt_logprobs_np
    if scored is not None and len(scored) not in expected:
        _refuse_size("prompt_logprobs", length, len(scored))
    if topk is not None:
        _check_rows("topk_prompt_logprobs", topk, expected)
    targets, asked = response.target_prompt_logprobs, request.target_prompt_logprobs
    if targets is not None and asked is not None and targets._effective_shape != asked._effective_shape:
        raise WireError(
            f"expected the shape {asked._effective_shape}, got {targets._effective_shape}",
            "target_prompt_logprobs",
        )
    alternatives, width = response.prompt_alt_tokens, request.prompt_alt_tokens_k
    if alternatives is not None and width:
        for name in ("tokens", "logprobs"):
            size = getattr(alternatives, name)._numpy.size
            if size != (length - 1) * width:
                _refuse_size(f"prompt_alt_tokens.{name}", (length - 1) * width, size)


def _check_rows(path: str, topk: TopkLogprobs, expected: set[int]) -> None:
    rows = len(topk.token_ids)
    if rows not in expected:
        _refuse_size(path, max(expected), rows)


def _refuse_size(path: str, expected: int, got: int) -> None:
    raise WireError(f"expected {expected} values, got {got}", path)


def _ignored(feature: str) -> UnsupportedByServerError:
    return UnsupportedByServerError(f"the server ignored {feature}", feature=feature)


def _with_first_score(request: SampleRequest, response: SampleResponse) -> SampleResponse:
    """Return the response, with NaN as the score of the first prompt token if the scores lack this entry."""
    scored, length = response._prompt_logprobs, request.prompt.known_length()
    if scored is None and request.prompt_logprobs and length == 1:
        scored = np.empty(0, dtype=np.float32)
    if scored is not None and len(scored) + 1 == length:
        return response.model_copy(update={"prompt_logprobs_np": np.insert(np.asarray(scored), 0, np.nan)})
    return response


def _only_last(scored: Any, last_n: int) -> bool:
    early = scored[: max(len(scored) - last_n, 0)]
    return bool((early != early).all())  # a token without a score has NaN, which differs from itself
