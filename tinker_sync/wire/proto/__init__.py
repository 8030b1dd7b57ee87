"""Codecs for the protobuf messages of package `tinker_public`, without the protobuf library.

The room has two layers. `read_message` and `write_message` convert between bytes and dicts of any message,
driven by the field tables. Each message with a type of this package has an encoder and a decoder on top of
them. Decoders raise `WireError`, encoders `InvalidInputError`. Pure functions; any thread may use them.
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
    encode_sample_response,
)

__all__ = [
    "Buffers",
    "decode_forward_backward_output",
    "decode_forward_backward_request",
    "decode_sample_response",
    "encode_forward_backward_output",
    "encode_forward_backward_request",
    "encode_sample_response",
    "peek_model_and_number",
    "read_message",
    "write_message",
]
