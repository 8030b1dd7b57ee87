"""The tables of the protobuf messages of package `tinker_public` that this package uses.

Numbers inside `bytes` fields are little-endian, matrices row-major. The protocol defines field numbers and
names; a change here changes the bytes on the wire. Tables are immutable; any thread may use them.
"""

from __future__ import annotations

from tinker_sync.wire.proto.codec import (
    BOOL,
    BYTES,
    DOUBLE,
    ENUM,
    INT32,
    INT64,
    STRING,
    UINT32,
    Message,
    mapping,
    oneof,
    plain,
    present,
    repeated,
)

# ----------------------------------------------------------------------------------------------------- enums

STOP_REASON_STOP = 0
STOP_REASON_LENGTH = 1

DTYPE_UNSPECIFIED = 0
DTYPE_FLOAT32 = 1
DTYPE_INT64 = 2
DTYPE_INT32 = 3
DTYPE_BFLOAT16 = 4

# --------------------------------------------------------------------------------------------------- tensors

SPARSE_CSR = Message(
    "SparseCsr",
    plain(1, "values", BYTES),  # in the tensor's dtype
    plain(2, "crow_indices", BYTES),  # int64, rows + 1
    plain(3, "col_indices", BYTES),  # int64, one for each value
)
TENSOR = Message(
    "Tensor",
    *oneof(present(1, "dense", BYTES), present(2, "sparse_csr", SPARSE_CSR)),
    plain(3, "dtype", ENUM),
    repeated(4, "shape", INT64),  # the dense shape, for CSR too
)
BATCHED_TENSOR = Message(
    "BatchedTensor",
    plain(1, "data", BYTES),  # the arrays of all data, concatenated
    plain(2, "offsets", BYTES),  # int64, n + 1 byte offsets into `data`
    plain(3, "dtype", ENUM),
    repeated(4, "trailing_shape", INT64),
)

# ----------------------------------------------------------------------------------------------- model input

ENCODED_TEXT_CHUNK = Message("EncodedTextChunk", plain(1, "tokens", BYTES))  # int32
IMAGE_DIMENSIONS = Message("ImageDimensions", plain(1, "width", UINT32), plain(2, "height", UINT32))
IMAGE_CHUNK = Message(
    "ImageChunk",
    plain(1, "data", BYTES),
    plain(2, "format", STRING),
    present(3, "expected_tokens", INT32),
    present(4, "override_dimensions", IMAGE_DIMENSIONS),
)
DMEL_CHUNK = Message("DmelChunk", plain(1, "dmel", BYTES))
CHUNK = Message(
    "Chunk",
    *oneof(
        present(1, "encoded_text", ENCODED_TEXT_CHUNK),
        present(2, "image", IMAGE_CHUNK),
        present(3, "dmel", DMEL_CHUNK),
    ),
)

# -------------------------------------------------------------------------------------------------- training


def _make_span(name: str) -> Message:
    return Message(
        name, plain(1, "sequence_id", STRING), plain(2, "offset", INT64), plain(3, "length", INT64)
    )


PROMPT_PROVENANCE_SPAN = _make_span("PromptProvenanceSpan")
SAMPLED_PROVENANCE_SPAN = _make_span("SampledProvenanceSpan")
PROVENANCE_SPAN = Message(
    "ProvenanceSpan",
    *oneof(
        present(1, "prompt_tokens", PROMPT_PROVENANCE_SPAN),
        present(2, "sampled_tokens", SAMPLED_PROVENANCE_SPAN),
    ),
)
DATUM = Message(
    "Datum",
    repeated(1, "model_input", CHUNK),
    mapping(2, "loss_fn_inputs", TENSOR),
    repeated(3, "model_input_spans", PROVENANCE_SPAN),
    repeated(4, "loss_fn_input_spans", PROVENANCE_SPAN),
)
LOSS_CONFIG_VALUE = Message(
    "LossConfigValue", *oneof(present(1, "number", DOUBLE), present(2, "text", STRING))
)
FORWARD_BACKWARD_REQUEST = Message(
    "ForwardBackwardRequest",
    plain(1, "model_id", STRING),
    plain(2, "seq_id", INT32),
    repeated(3, "data", DATUM),
    plain(4, "loss_fn", STRING),
    mapping(5, "loss_fn_config", DOUBLE),  # the older form: numbers only
    plain(6, "forward_only", BOOL),
    mapping(7, "loss_fn_config_v2", LOSS_CONFIG_VALUE),
)
ARRAY_RECORD = Message(
    "ArrayRecord",
    plain(1, "type_tag", STRING),
    mapping(2, "fields", BATCHED_TENSOR),
    plain(3, "num_datums", INT64),
)
FORWARD_BACKWARD_OUTPUT = Message(
    "ForwardBackwardOutput",
    plain(1, "loss_fn_output_type", STRING),
    repeated(2, "loss_fn_outputs", ARRAY_RECORD),
    mapping(3, "metrics", DOUBLE),
)

# -------------------------------------------------------------------------------------------------- sampling

TOPK_LOGPROBS = Message(
    "TopkLogprobs",
    plain(1, "token_ids", BYTES),  # int32 [length, k]
    plain(2, "logprobs", BYTES),  # float32 [length, k]
    plain(3, "k", UINT32),
    plain(4, "length", UINT32),
)
SAMPLED_SEQUENCE = Message(
    "SampledSequence",
    plain(1, "stop_reason", ENUM),
    plain(2, "tokens", BYTES),  # int32
    present(3, "logprobs", BYTES),  # float32, one for each token
    present(4, "topk_sampled_logprobs", TOPK_LOGPROBS),
)
PROMPT_ALT_TOKENS = Message("PromptAltTokens", present(1, "tokens", TENSOR), present(2, "logprobs", TENSOR))
SAMPLE_RESPONSE = Message(
    "SampleResponse",
    repeated(1, "sequences", SAMPLED_SEQUENCE),
    present(2, "prompt_logprobs", BYTES),  # float32, NaN where not computed
    present(3, "topk_prompt_logprobs", TOPK_LOGPROBS),
    plain(4, "prompt_cache_hit_tokens", INT32),
    present(5, "target_prompt_logprobs", TENSOR),
    present(6, "prompt_alt_tokens", PROMPT_ALT_TOKENS),
)
