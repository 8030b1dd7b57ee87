"""Write `tests/wire/golden/`: known messages, encoded by the reference client's protobuf classes.

    python tests/interop/make_golden.py

Each message gives two files. NAME.hex has its bytes. NAME.json has its kind and its content, with bytes as
{"hex": ...}. The default suite compares the codecs of this package with these files;
`test_proto_oracle.py` checks that the reference client still writes the same bytes.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from tinker.proto import tinker_public_pb2 as pb

GOLDEN = Path(__file__).parent.parent / "wire" / "golden"


def int32s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def int64s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def float32s(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}f", *numbers)


def bfloat16s(*numbers: float) -> bytes:
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)


def tensor(dtype: int, data: bytes, shape: list[int]) -> Any:
    return pb.Tensor(dense=data, dtype=dtype, shape=shape)


def messages() -> dict[str, Any]:
    """Return every golden message, by name."""
    return {**_requests(), **_outputs(), **_samples()}


def _requests() -> dict[str, Any]:
    simple = pb.ForwardBackwardRequest(model_id="model_ab", seq_id=1, loss_fn="cross_entropy")
    datum = simple.data.add()
    datum.model_input.add().encoded_text.tokens = int32s(1, 200, 300)
    datum.loss_fn_inputs["target_tokens"].CopyFrom(tensor(pb.DTYPE_INT64, int64s(200, 300, -1), [3]))
    datum.loss_fn_inputs["weights"].CopyFrom(tensor(pb.DTYPE_FLOAT32, float32s(1, 0.5, 0), [3]))

    full = pb.ForwardBackwardRequest(model_id="m☃", seq_id=2**31 - 1, loss_fn="ppo", forward_only=True)
    for name, value in (("beta", 0.1), ("clip", 0.0)):
        full.loss_fn_config[name] = value
        full.loss_fn_config_v2[name].number = value
    full.loss_fn_config_v2["mode"].text = "token"
    datum = full.data.add()
    datum.model_input.add().encoded_text.tokens = int32s(5)
    image = datum.model_input.add().image
    image.data, image.format, image.expected_tokens = b"\x89PNG\r\n", "png", 0
    datum.model_input.add().image.MergeFrom(pb.ImageChunk(data=b"\xff\xd8", format="jpeg"))
    datum.model_input.add().dmel.dmel = bytes((0, 2, 3, 80))
    datum.model_input.add().encoded_text.SetInParent()
    sparse = datum.loss_fn_inputs["target_tokens"]
    sparse.dtype = pb.DTYPE_INT64
    sparse.shape.extend([2, 3])
    sparse.sparse_csr.values = int64s(7, 8, 9)
    sparse.sparse_csr.crow_indices = int64s(0, 1, 3)
    sparse.sparse_csr.col_indices = int64s(2, 0, 1)
    datum.loss_fn_inputs["weights"].CopyFrom(tensor(pb.DTYPE_FLOAT32, b"", [0]))
    datum.loss_fn_inputs["x"].CopyFrom(tensor(pb.DTYPE_FLOAT32, float32s(1, 2, 3, 4), [2, 2]))
    datum.loss_fn_inputs["y"].CopyFrom(tensor(pb.DTYPE_INT64, int64s(4), []))
    datum.model_input_spans.add().prompt_tokens.MergeFrom(pb.PromptProvenanceSpan(sequence_id="s1", length=4))
    datum.model_input_spans.add().sampled_tokens.MergeFrom(
        pb.SampledProvenanceSpan(sequence_id="s2", offset=3, length=2**40)
    )
    datum.loss_fn_input_spans.add().sampled_tokens.MergeFrom(
        pb.SampledProvenanceSpan(sequence_id="s2", length=0)
    )
    full.data.add()
    return {"request_simple": simple, "request_full": full, "request_empty": pb.ForwardBackwardRequest()}


def _outputs() -> dict[str, Any]:
    simple = pb.ForwardBackwardOutput(loss_fn_output_type="a.b:ArrayRecord", metrics={"loss:sum": 1.5})
    record = simple.loss_fn_outputs.add(num_datums=2)
    record.fields["logprobs"].MergeFrom(
        pb.BatchedTensor(data=bfloat16s(-1, -2, -0.5), offsets=int64s(0, 4, 6), dtype=pb.DTYPE_BFLOAT16)
    )

    ragged = pb.ForwardBackwardOutput(
        loss_fn_output_type="RaggedRecord", metrics={"a:mean": 0.0, "b:sum": -1e300}
    )
    record = ragged.loss_fn_outputs.add(type_tag="x.y:RaggedRecord", num_datums=2)
    record.fields["ids"].MergeFrom(
        pb.BatchedTensor(
            data=int32s(1, 2, 3, 4, -5, 6),
            offsets=int64s(0, 16, 24),
            dtype=pb.DTYPE_INT32,
            trailing_shape=[2],
        )
    )
    record.fields["scores"].MergeFrom(
        pb.BatchedTensor(data=float32s(0.5, 1.5), offsets=int64s(0, 4, 8), dtype=pb.DTYPE_FLOAT32)
    )
    record = ragged.loss_fn_outputs.add()  # without `num_datums`, as from older servers
    record.fields["ids"].MergeFrom(
        pb.BatchedTensor(
            data=int64s(7, 8, 9), offsets=int64s(0, 24), dtype=pb.DTYPE_INT64, trailing_shape=[3]
        )
    )
    record.fields["scores"].MergeFrom(pb.BatchedTensor(offsets=int64s(0, 0), dtype=pb.DTYPE_FLOAT32))
    dropped = pb.ForwardBackwardOutput(loss_fn_output_type="m:ArrayRecord", metrics={"loss:sum": 2.0})
    dropped.loss_fn_outputs.add(num_datums=3)
    return {"output_simple": simple, "output_ragged": ragged, "output_dropped": dropped}


def _samples() -> dict[str, Any]:
    simple = pb.SampleResponse(prompt_logprobs=float32s(float("nan"), -0.5), prompt_cache_hit_tokens=1)
    simple.sequences.add(stop_reason=pb.STOP_REASON_LENGTH, tokens=int32s(5, 6), logprobs=float32s(-1, -2))

    full = pb.SampleResponse(prompt_logprobs=b"", prompt_cache_hit_tokens=-1)
    full.sequences.add(tokens=int32s(-1, 2**31 - 1), logprobs=b"")
    sequence = full.sequences.add(stop_reason=pb.STOP_REASON_STOP)
    sequence.topk_sampled_logprobs.MergeFrom(
        pb.TopkLogprobs(token_ids=int32s(3, 4, 5, 0), logprobs=float32s(-1, -2, -3, -99999), k=2, length=2)
    )
    full.topk_prompt_logprobs.k = 5
    full.target_prompt_logprobs.dtype = pb.DTYPE_BFLOAT16
    full.target_prompt_logprobs.shape.extend([2, 4])
    full.target_prompt_logprobs.sparse_csr.values = bfloat16s(1, -0.25)
    full.target_prompt_logprobs.sparse_csr.crow_indices = int64s(0, 0, 2)
    full.target_prompt_logprobs.sparse_csr.col_indices = int64s(1, 3)
    full.prompt_alt_tokens.tokens.CopyFrom(tensor(pb.DTYPE_INT32, int32s(1, 2, 3, 4), [2, 2]))
    full.prompt_alt_tokens.logprobs.CopyFrom(tensor(pb.DTYPE_FLOAT32, float32s(-1, -2, -3, -4), [2, 2]))
    return {"samples_simple": simple, "samples_full": full, "samples_empty": pb.SampleResponse()}


def content(message: Any) -> dict[str, Any]:
    """Return the fields of a message as JSON data, with the keys of maps sorted as in its bytes."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type and field.message_type.GetOptions().map_entry:
            found[field.name] = {key: _json(value[key]) for key in sorted(value, key=str.encode)}
        elif field.is_repeated:
            found[field.name] = [_json(item) for item in value]
        else:
            found[field.name] = _json(value)
    return found


def _json(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return content(value) if hasattr(value, "ListFields") else value


def golden_json(message: Any) -> str:
    """Return the text of the file NAME.json for a message."""
    described = {"message": type(message).__name__, "content": content(message)}
    return json.dumps(described, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def golden_hex(message: Any) -> str:
    """Return the text of the file NAME.hex for a message."""
    return str(message.SerializeToString(deterministic=True).hex()) + "\n"


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, message in messages().items():
        (GOLDEN / f"{name}.json").write_text(golden_json(message), encoding="utf-8")
        (GOLDEN / f"{name}.hex").write_text(golden_hex(message))


if __name__ == "__main__":
    main()
