"""The codec of `ForwardBackwardRequest`: the client encodes it, the embedded server decodes it.

Encoding is the hot path. A datum is a few arrays with some dozen bytes of framing around each. The framing
depends only on names, dtypes and lengths, so it is cached for each combination. Any thread may use this
module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from tinker_sync.errors import InvalidInputError
from tinker_sync.types.datum import Datum, PromptProvenanceSpan, SampledProvenanceSpan
from tinker_sync.types.model_input import DmelChunk, EncodedTextChunk, ImageChunk, ModelInput, ModelInputChunk
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardInput, ForwardBackwardRequest
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._tensors import (
    INT32,
    LAYOUTS,
    OWN_INT32,
    WIRE_DTYPES,
    find_wire_dtype,
    read_tensor,
    tensor_to_plain,
    view_array,
    wire_values,
)
from tinker_sync.wire.proto.codec import (
    MAX_SIZE,
    STRING,
    Buffers,
    FieldFault,
    Piece,
    Plain,
    Readable,
    check_size,
    name_entry,
    read_message,
    translate_refusals,
    undecodable,
    unencodable,
    varint,
    write_plain,
)

Span = PromptProvenanceSpan | SampledProvenanceSpan

# ------------------------------------------------------------------------------------------ out


def encode_forward_backward_request(
    request: ForwardBackwardRequest, *, forward_only: bool = False
) -> Buffers:
    """Encode a request. Pieces may be views of arrays: join or send them before the arrays change.

    Args:
        request: the request; a `seq_id` of None or 0 is left out.
        forward_only: compute the loss without gradients.

    Raises:
        InvalidInputError: a value has no protobuf form, such as an image given by its address; the message
            names the path, as in ``data[3].model_input.chunks[1]``.

    >>> from tinker_sync.types import Datum, ForwardBackwardInput, ModelInput
    >>> data = [Datum(ModelInput.from_ints([1]), {"target_tokens": [2]})]
    >>> request = ForwardBackwardRequest(ForwardBackwardInput(data, "cross_entropy"), "model_a", 1)
    >>> encode_forward_backward_request(request).size
    72
    """
    body = request.forward_backward_input
    envelope = request.model_id, request.seq_id, body.loss_fn, forward_only
    try:
        config = body.loss_fn_config
        before, after = _write_envelope(*envelope, config) if config else _make_envelope(*envelope)
        pieces: list[Piece] = [before]
        size = len(before) + _write_data(body.data, pieces) + len(after)
        pieces.append(after)
        if size > MAX_SIZE:
            check_size(size)
    except FieldFault as fault:
        raise unencodable("ForwardBackwardRequest", fault) from None
    return Buffers(pieces, size)


def _write_envelope(
    model_id: str, seq_id: int | None, loss_fn: str, forward_only: bool, config: Mapping[str, float | str]
) -> tuple[bytes, bytes]:
    """Return the bytes of the request's fields before the data, and of the fields after the data."""
    numbers, settings = _config_to_plain(config)
    before = {"model_id": model_id, "seq_id": seq_id}
    after = {
        "loss_fn": loss_fn,
        "loss_fn_config": numbers,
        "forward_only": forward_only,
        "loss_fn_config_v2": settings,
    }
    table = tables.FORWARD_BACKWARD_REQUEST
    return write_plain(table, before).join(), write_plain(table, after).join()


def _config_to_plain(config: Mapping[str, float | str]) -> tuple[Plain, Plain]:
    """Return the settings of the loss as the older and the newer map of the protocol.

    Numbers are in both maps, because older servers read only the older one. Text fits only the newer one.
    """
    numbers: Plain = {}
    settings: Plain = {}
    for name, value in config.items():
        if isinstance(value, str):
            settings[name] = {"text": value}
        else:
            numbers[name] = float(value)
            settings[name] = {"number": float(value)}
    return numbers, settings


def _write_data(data: Sequence[Datum], pieces: list[Piece]) -> int:
    """Append the encoded data to `pieces`. Return the number of bytes."""
    written = index = 0
    try:
        for index, datum in enumerate(data):  # noqa: B007 -- the except clause uses it
            head_at = len(pieces)
            pieces.append(b"")  # the place of the head, which needs the size
            size = _write_datum(datum, pieces)
            pieces[head_at] = head = _make_head(size)
            written += len(head) + size
    except FieldFault as fault:
        raise fault.under(f"data[{index}]") from None
    return written


def _write_datum(datum: Datum, pieces: list[Piece]) -> int:
    """Append an encoded datum to `pieces`, without its tag and length. Return the number of bytes."""
    size = index = 0
    try:
        for index, chunk in enumerate(datum.model_input.chunks):  # noqa: B007 -- the except clause uses it
            size += _write_chunk(chunk, pieces)
    except FieldFault as fault:
        raise fault.under(f"model_input.chunks[{index}]") from None
    name = ""
    try:
        for name, tensor in datum.loss_fn_inputs.items():
            if tensor._crow is not None:
                size += _write_sparse(name, tensor, pieces)
                continue
            dtype = tensor.dtype
            values = tensor._numpy
            if values.dtype is not LAYOUTS.get(dtype) or not values.flags.c_contiguous:
                values = wire_values(values, find_wire_dtype(tensor)[1])
            before, after, field_size = _make_dense_frame(
                name, dtype, None if tensor.shape is None else values.shape, values.nbytes
            )
            pieces += (before, values, after)
            size += field_size
    except FieldFault as fault:
        raise fault.under(name_entry("loss_fn_inputs", name)) from None
    if datum.model_input_spans or datum.loss_fn_input_spans:
        size += _put(_write_spans(datum), pieces)
    return size


def _put(written: Buffers, pieces: list[Piece]) -> int:
    pieces += written.pieces
    return written.size


def _write_chunk(chunk: ModelInputChunk, pieces: list[Piece]) -> int:
    if not isinstance(chunk, EncodedTextChunk):
        return _put(write_plain(tables.DATUM, {"model_input": [_chunk_to_plain(chunk)]}), pieces)
    tokens: Piece = chunk.tokens if chunk._packed is None else chunk._packed
    if type(tokens) is bytes:
        size = len(tokens)
    else:
        if getattr(tokens, "dtype", None) is not INT32 or not tokens.flags.c_contiguous:
            try:
                tokens = wire_values(chunk.as_int32(), INT32)
            except InvalidInputError as error:
                raise FieldFault(str(error).removeprefix("EncodedTextChunk.")) from None
        size = tokens.nbytes
    frame = _make_text_frame(size)
    pieces += (frame, tokens)
    return len(frame) + size


def _write_sparse(name: str, tensor: TensorData, pieces: list[Piece]) -> int:
    plain = {"loss_fn_inputs": {name: tensor_to_plain(tensor)}}
    return _put(write_plain(tables.DATUM, plain), pieces)


def _chunk_to_plain(chunk: ModelInputChunk) -> Plain:
    if isinstance(chunk, ImageChunk):
        image = {"data": chunk.data, "format": chunk.format, "expected_tokens": chunk.expected_tokens}
        return {"image": image}
    if isinstance(chunk, DmelChunk):
        return {"dmel": {"dmel": chunk.dmel}}
    raise FieldFault(
        f"{type(chunk).__name__} cannot be sent in a protobuf request; give the bytes themselves"
    )


def _write_spans(datum: Datum) -> Buffers:
    plain = {
        "model_input_spans": [_span_to_plain(span) for span in datum.model_input_spans or ()],
        "loss_fn_input_spans": [_span_to_plain(span) for span in datum.loss_fn_input_spans or ()],
    }
    return write_plain(tables.DATUM, plain)


def _span_to_plain(span: Span) -> Plain:
    plain = {"sequence_id": span.sequence_id, "offset": span.offset, "length": span.length}
    return {"sampled_tokens" if isinstance(span, SampledProvenanceSpan) else "prompt_tokens": plain}


# ------------------------------------------------------------------------------------------ framing

# The chunks of a request have few different lengths, and the same data return every epoch.
_CACHE_SIZE = 4096

_TEXT_TAGS = (
    tables.ENCODED_TEXT_CHUNK.by_name["tokens"].tag,
    tables.CHUNK.by_name["encoded_text"].tag,
    tables.DATUM.by_name["model_input"].tag,
)
"""The tags around tokens, innermost first."""

_DATA_TAG = tables.FORWARD_BACKWARD_REQUEST.by_name["data"].tag
_INPUTS = tables.DATUM.by_name["loss_fn_inputs"]
_KEY_TAG, _VALUE_TAG = (field.tag for field in _INPUTS.message.fields)
_DENSE_TAG = tables.TENSOR.by_name["dense"].tag


@lru_cache(64, typed=True)
def _make_envelope(
    model_id: str, seq_id: int | None, loss_fn: str, forward_only: bool
) -> tuple[bytes, bytes]:
    """Return the bytes before and after the data of a request whose loss has no settings."""
    return _write_envelope(model_id, seq_id, loss_fn, forward_only, {})


@lru_cache(_CACHE_SIZE)
def _make_head(size: int) -> bytes:
    """Return the bytes before a datum of `size` bytes."""
    return _DATA_TAG + varint(size)


@lru_cache(_CACHE_SIZE)
def _make_text_frame(size: int) -> bytes:
    """Return the bytes before `size` bytes of tokens in a datum."""
    frame = b""
    for tag in _TEXT_TAGS if size else _TEXT_TAGS[1:]:  # an empty field is left out
        frame = tag + varint(len(frame) + size) + frame
    return frame


@lru_cache(_CACHE_SIZE)
def _make_dense_frame(
    name: str, dtype: str, shape: tuple[int, ...] | None, size: int
) -> tuple[bytes, bytes, int]:
    """Return the bytes before and after `size` bytes of values in a datum's map of inputs.

    The third result is the number of bytes in all. A shape of None is left out.
    """
    after = write_plain(tables.TENSOR, {"dtype": WIRE_DTYPES[dtype][0], "shape": shape}).join()
    before = _DENSE_TAG + varint(size)
    before = _VALUE_TAG + varint(len(before) + size + len(after)) + before
    before = _KEY_TAG + STRING.write(name) + before
    before = _INPUTS.tag + varint(len(before) + size + len(after)) + before
    return before, after, len(before) + size + len(after)


# ------------------------------------------------------------------------------------------ in


def decode_forward_backward_request(
    data: Readable, unknown: set[str] | None = None
) -> tuple[ForwardBackwardRequest, bool]:
    """Decode a request and its forward-only flag. All arrays are writable copies.

    The newer map of settings takes precedence over the older one. A `seq_id` of 0 becomes None.

    Args:
        data: the bytes of the request.
        unknown: a set, to which the names of unknown fields are added, at most a hundred. These fields are
            skipped.

    Raises:
        WireError: the bytes are not a valid request; `path` names the field.

    >>> request, forward_only = decode_forward_backward_request(bytes.fromhex("0a016d1005220178"))
    >>> request.model_id, request.seq_id, forward_only
    ('m', 5, False)
    """
    plain = read_message(tables.FORWARD_BACKWARD_REQUEST, data, unknown)
    data_read: list[Datum] = []
    try:
        try:
            for datum in plain.get("data", ()):
                data_read.append(_read_datum(datum))  # noqa: PERF401 -- the except clause uses its length
        except FieldFault as fault:
            raise fault.under(f"data[{len(data_read)}]") from None
        body = ForwardBackwardInput(data_read, plain.get("loss_fn", ""), _read_config(plain))
        request = ForwardBackwardRequest(body, plain.get("model_id", ""), plain.get("seq_id"))
    except (FieldFault, InvalidInputError) as error:
        raise undecodable("ForwardBackwardRequest", error) from None
    return request, plain.get("forward_only", False)


def _read_config(plain: Plain) -> dict[str, float | str] | None:
    settings = plain.get("loss_fn_config_v2")
    if settings is None:
        return plain.get("loss_fn_config")
    for name, setting in settings.items():
        if not setting:
            raise FieldFault("neither number nor text is set", name_entry("loss_fn_config_v2", name))
    return {
        name: setting["text"] if "text" in setting else setting["number"]
        for name, setting in settings.items()
    }


def _read_datum(plain: Plain) -> Datum:
    chunks: list[ModelInputChunk] = []
    tensors: dict[str, TensorData] = {}
    name = ""
    try:
        for chunk in plain.get("model_input", ()):
            chunks.append(_read_chunk(chunk))  # noqa: PERF401 -- the except clause uses its length
    except FieldFault as fault:
        raise fault.under(f"model_input[{len(chunks)}]") from None
    try:
        for name, tensor in plain.get("loss_fn_inputs", {}).items():
            tensors[name] = read_tensor(tensor)
    except FieldFault as fault:
        raise fault.under(name_entry("loss_fn_inputs", name)) from None
    model_input = ModelInput(chunks=chunks)
    if not ("model_input_spans" in plain or "loss_fn_input_spans" in plain):
        return Datum(model_input, tensors)
    # The wire does not distinguish empty lists from absent ones; a datum has both kinds of spans or none.
    return Datum(
        model_input,
        tensors,
        _read_spans(plain, "model_input_spans"),
        _read_spans(plain, "loss_fn_input_spans"),
    )


def _read_chunk(plain: Plain) -> ModelInputChunk:
    if "encoded_text" in plain:
        try:
            tokens = view_array(plain["encoded_text"], "tokens", INT32)
        except FieldFault as fault:
            raise fault.under("encoded_text") from None
        return EncodedTextChunk(tokens=tokens.astype(OWN_INT32))
    if "image" in plain:
        image = plain["image"]
        with translate_refusals("image"):
            return ImageChunk(
                data=bytes(image.get("data", b"")),
                format=image.get("format", ""),
                expected_tokens=image.get("expected_tokens"),
            )
    if "dmel" in plain:
        return DmelChunk(dmel=bytes(plain["dmel"].get("dmel", b"")))
    raise FieldFault("no kind of chunk is set")


def _read_spans(plain: Plain, field: str) -> list[Span]:
    spans: list[Span] = []
    for span in plain.get(field, ()):
        with translate_refusals(f"{field}[{len(spans)}]"):
            spans.append(_read_span(span))
    return spans


def _read_span(plain: Plain) -> Span:
    for name, kind in (("prompt_tokens", PromptProvenanceSpan), ("sampled_tokens", SampledProvenanceSpan)):
        if name in plain:
            run = plain[name]
            return kind(
                sequence_id=run.get("sequence_id", ""),
                offset=run.get("offset", 0),
                length=run.get("length", 0),
            )
    raise FieldFault("no kind of span is set")
