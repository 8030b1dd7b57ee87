"""`ForwardBackwardOutput`: what a pass returned, one record of tensors for each datum.

On the wire the records stand in batches: for each name one run of bytes and the offsets where each datum's
array begins. A batch is rectangular behind the first dimension; ragged outputs come as several batches. Any
thread may use this.
"""

from __future__ import annotations

from itertools import groupby

import numpy as np

from tinker_sync.types.tensor_data import TensorData
from tinker_sync.types.training import ForwardBackwardOutput
from tinker_sync.wire.proto import tables
from tinker_sync.wire.proto._fault import Fault, decoding, encoding, entry
from tinker_sync.wire.proto._reader import Plain, Readable, read_message
from tinker_sync.wire.proto._tensors import INT64, payload, split_batch, wire_dtype
from tinker_sync.wire.proto._writer import Buffers, check_size, write_plain

Record = dict[str, TensorData]

MAX_EMPTY_RECORDS = 16_384
"""Records without a single tensor cost the sender nothing, so no message may ask for more of them than this.
Servers send them when told to drop outputs; a request has 1024 data unless a server allows more."""

# ------------------------------------------------------------------------------------------ in


def decode_forward_backward_output(data: Readable) -> ForwardBackwardOutput:
    """The output in these bytes. Every tensor has an array of its own: writable, float32 or int64.

    Raises:
        WireError: the bytes are no such output; `path` names the field, as in
            ``loss_fn_outputs[0].fields['logprobs'].offsets``.

    >>> decode_forward_backward_output(bytes.fromhex("1a130a086c6f73733a73756d11000000000000f83f")).metrics
    {'loss:sum': 1.5}
    """
    plain = read_message(tables.FORWARD_BACKWARD_OUTPUT, data)
    batches = plain.get("loss_fn_outputs", ())
    kind = plain.get("loss_fn_output_type", "")
    # Some servers name the class in full, "package.module:ArrayRecord".
    kind = kind.rpartition(":")[2] if batches else kind or "ArrayRecord"
    records: list[Record] = []
    index = empty = 0
    with decoding("ForwardBackwardOutput"):
        try:
            for index, batch in enumerate(batches):  # noqa: B007 -- tells which one failed
                if not batch.get("fields"):
                    empty += batch.get("num_datums", 0)
                    _check_empty(empty)
                records.extend(_read_batch(batch))
        except Fault as fault:
            raise fault.under(f"loss_fn_outputs[{index}]") from None
    return ForwardBackwardOutput(kind, records, plain.get("metrics", {}))


def _check_empty(count: int) -> None:
    if count > MAX_EMPTY_RECORDS:
        raise Fault(f"{count} data without any field, at most {MAX_EMPTY_RECORDS} are read", "num_datums")


def _read_batch(batch: Plain) -> list[Record]:
    columns: dict[str, list[TensorData]] = {}
    name = ""
    try:
        for name, column in batch.get("fields", {}).items():
            columns[name] = split_batch(column)
    except Fault as fault:
        raise fault.under(entry("fields", name)) from None
    count = batch.get("num_datums", 0)
    if count < 0:
        raise Fault(f"{count} is negative", "num_datums")
    # Older servers leave the number out.
    count = count or len(next(iter(columns.values()), ()))
    for name, column in columns.items():
        if len(column) != count:
            raise Fault(
                f"the offsets are those of {len(column)} data, not of {count}",
                f"{entry('fields', name)}.offsets",
            )
    records: list[Record] = [{} for _ in range(count)]
    for name, column in columns.items():
        for record, tensor in zip(records, column):  # noqa: B905 -- just compared
            record[name] = tensor
    return records


# ------------------------------------------------------------------------------------------ out


def encode_forward_backward_output(output: ForwardBackwardOutput) -> Buffers:
    """The output as buffers, neighbouring data of equal form in one batch; the arrays are views.

    Sparse tensors are sent dense, scalars as one-element vectors: a batch has no other form for them.

    Raises:
        InvalidInputError: something does not fit its field; the text names its place.

    >>> encode_forward_backward_output(ForwardBackwardOutput("ArrayRecord", [], {"loss:sum": 1.5})).size
    34
    """
    with encoding("ForwardBackwardOutput"):
        batches = []
        for _, run in groupby(output.loss_fn_outputs, key=_form):
            batches.append(_plain_batch(list(run)))
        plain: Plain = {
            "loss_fn_output_type": output.loss_fn_output_type,
            "loss_fn_outputs": batches,
            "metrics": output.metrics,
        }
        out = write_plain(tables.FORWARD_BACKWARD_OUTPUT, plain)
        check_size(out.size)
    return out


def _form(record: Record) -> tuple[object, ...]:
    """What data of one batch have in common."""
    return tuple((name, tensor.dtype, tensor.to_numpy().shape[1:]) for name, tensor in record.items())


def _plain_batch(records: list[Record]) -> Plain:
    fields = {name: _plain_column([record[name] for record in records]) for name in records[0]}
    return {"fields": fields, "num_datums": len(records)}


def _plain_column(tensors: list[TensorData]) -> Plain:
    dtype, layout = wire_dtype(tensors[0])
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
