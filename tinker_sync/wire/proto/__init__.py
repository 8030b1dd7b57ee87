"""Protobuf without protobuf: the messages of package `tinker_public`, by hand on bytes and numpy.

Two layers. `read_message` and `write_message` turn bytes into dicts and back, driven by the field tables,
and know every message. On top of them one pair for each message that has a type of ours. Decoders raise
nothing but `WireError`, encoders nothing but `InvalidInputError`. Pure functions; any thread may use them.
"""

from __future__ import annotations

from tinker_sync.wire.proto._reader import read_message
from tinker_sync.wire.proto._writer import Buffers, write_message
from tinker_sync.wire.proto.outputs import decode_forward_backward_output, encode_forward_backward_output
from tinker_sync.wire.proto.requests import (
    decode_forward_backward_request,
    encode_forward_backward_request,
    peek_model_and_number,
)
from tinker_sync.wire.proto.samples import (
    decode_sample_response,
    decode_sampling_params,
    encode_sample_response,
    encode_sampling_params,
)

__all__ = [
    "Buffers",
    "decode_forward_backward_output",
    "decode_forward_backward_request",
    "decode_sample_response",
    "decode_sampling_params",
    "encode_forward_backward_output",
    "encode_forward_backward_request",
    "encode_sample_response",
    "encode_sampling_params",
    "peek_model_and_number",
    "read_message",
    "write_message",
]
