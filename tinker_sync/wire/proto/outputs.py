"""The codec of `ForwardBackwardOutput`, which has one record for each datum: its tensors by name.

On the wire, records form batches. A batch has, for each name, the bytes of all arrays in a row and the offset
of each datum's array. The arrays of one name in a batch may differ only in their first dimension; records
that differ in other ways take several batches. Any thread may use this module.
"""

from __future__ import annotations

from itertools import groupby

from tinker_sync._base.numpy import np
from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardOutput
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._tensors import INT64, find_shared, find_wire_dtype, payload, split_batch
from tinker_sync.wire.proto.codec import (
    Buffers,
    FieldFault,
    Plain,
    Readable,
    check_size,
    name_entry,
    read_message,
    undecodable,
    unencodable,
    write_plain,
)

Record = dict[str, TensorData]

MAX_EMPTY_RECORDS = 16_384
"""The most records without tensors in a message, since they cost the sender no bytes. Servers send such
records for requests that drop the outputs; a request has 1024 data unless a server allows more."""


# ------------------------------------------------------------------------------------------ in


def decode_forward_backward_output(data: Readable) -> ForwardBackwardOutput:
    """Decode the bytes of an output. The array of each tensor is writable, and float32 or int64.

    If `data` is a `bytearray`, the arrays may use its memory (see `_tensors.find_shared`): do not use `data`
    afterwards.

    Raises:
        WireError: the bytes are not a valid output; `path` names the field, as in
            ``loss_fn_outputs[0].fields['logprobs'].offsets``.

    >>> decode_forward_backward_output(bytes.fromhex("1a130a086c6f73733a73756d11000000000000f83f")).metrics
    {'loss:sum': 1.5}
    """
    plain = read_message(tables.FORWARD_BACKWARD_OUTPUT, data)
    batches = plain.get("loss_fn_outputs", ())
    shared = find_shared(data, sum(map(_count_bytes, batches))) if isinstance(data, bytearray) else None
    kind = plain.get("loss_fn_output_type", "")
    # Some servers name the class in full, "package.module:ArrayRecord".
    kind = kind.rpartition(":")[2] if batches else kind or "ArrayRecord"
    records: list[Record] = []
    index = empty = 0
    try:
        for index, batch in enumerate(batches):  # noqa: B007 -- the except clause uses it
            if not batch.get("fields"):
                empty += batch.get("num_datums", 0)
                _check_empty(empty)
            records.extend(_read_batch(batch, shared))
    except FieldFault as fault:
        raise undecodable("ForwardBackwardOutput", fault.under(f"loss_fn_outputs[{index}]")) from None
    return ForwardBackwardOutput(kind, records, plain.get("metrics", {}))


def _check_empty(count: int) -> None:
    if count > MAX_EMPTY_RECORDS:
        raise FieldFault(
            f"{count} data without any field, at most {MAX_EMPTY_RECORDS} are read", "num_datums"
        )


def _count_bytes(batch: Plain) -> int:
    return sum([len(column.get("data", b"")) for column in batch.get("fields", {}).values()])


def _read_batch(batch: Plain, shared: memoryview | None) -> list[Record]:
    columns: dict[str, list[TensorData]] = {}
    name = ""
    try:
        for name, column in batch.get("fields", {}).items():
            columns[name] = split_batch(column, shared)
    except FieldFault as fault:
        raise fault.under(name_entry("fields", name)) from None
    count = batch.get("num_datums", 0)
    if count < 0:
        raise FieldFault(f"{count} is negative", "num_datums")
    # Older servers leave the number out.
    count = count or len(next(iter(columns.values()), ()))
    for name, column in columns.items():
        if len(column) != count:
            raise FieldFault(
                f"the offsets describe {len(column)} data, not {count}",
                f"{name_entry('fields', name)}.offsets",
            )
    records: list[Record] = [{} for _ in range(count)]
    for name, column in columns.items():
        for record, tensor in zip(records, column):  # noqa: B905 -- lengths are equal, checked above
            record[name] = tensor
    return records


# ------------------------------------------------------------------------------------------ out


def encode_forward_backward_output(output: ForwardBackwardOutput) -> Buffers:
    """Encode an output. Neighbouring data of equal form share a batch.

    The pieces of the result are views of the arrays where possible: join or send them before the arrays
    change. Sparse tensors become dense and scalars become one-element vectors, since batches have no other
    form.

    Raises:
        InvalidInputError: a value does not fit its field; the message names the path.

    >>> encode_forward_backward_output(ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5})).size
    34
    """
    try:
        plain: Plain = {
            "loss_fn_output_type": output.loss_fn_output_type,
            "loss_fn_outputs": [
                _batch_to_plain(list(run)) for _, run in groupby(output.loss_fn_outputs, key=_get_form)
            ],
            "metrics": output.metrics,
        }
        out = write_plain(tables.FORWARD_BACKWARD_OUTPUT, plain)
        check_size(out.size)
    except FieldFault as fault:
        raise unencodable("ForwardBackwardOutput", fault) from None
    return out


def _get_form(record: Record) -> tuple[object, ...]:
    """Return the properties that are equal for all records of a batch: names, dtypes and trailing shapes."""
    return tuple((name, tensor.dtype, tensor.to_numpy().shape[1:]) for name, tensor in record.items())


def _batch_to_plain(records: list[Record]) -> Plain:
    fields = {name: _column_to_plain([record[name] for record in records]) for name in records[0]}
    return {"fields": fields, "num_datums": len(records)}


def _column_to_plain(tensors: list[TensorData]) -> Plain:
    dtype, layout = find_wire_dtype(tensors[0])
    arrays = [tensor.to_numpy() for tensor in tensors]
    pieces = [payload(array, layout) for array in arrays]
    offsets = np.zeros(len(pieces) + 1, dtype=np.int64)
    np.cumsum([piece.nbytes for piece in pieces], out=offsets[1:])
    return {
        "data": Buffers(pieces),
        "offsets": payload(offsets, INT64),
        "dtype": dtype,
        "trailing_shape": arrays[0].shape[1:],
    }
