"""The stub server of the tests, with a faster answer to passes, so that the client takes most of the time.

It counts the data of a pass without decoding their arrays. The answer has an array of log-probabilities for
each datum. Its length is that of the first datum's tokens, or `--answer-tokens`. With `--room N` the server
refuses samples while it works on N of them.

    python _quick_stub.py --latency 2 --config '{"fwdbwd_max_chunk_len": 1024}'     prints its port

The process ends with the process that started it.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from _processes import allow_many_files
from support import tinker_stub
from support.tinker_stub import PROTO, Answer, Asked, Stub

_LOGPROB = -0.25


class QuickStub(Stub):
    """A `Stub` that counts the data of a pass and does not decode them."""

    validates = False
    answer_tokens = 0
    room = 0
    _working = 0

    def on_asample(self, asked: Asked) -> Any:
        if self.room:
            if self._working >= self.room:
                return Answer(429, {"detail": "too many samples"})
            self._working += 1
            asyncio.get_running_loop().call_later(self.behaviour.latency_s, self._end_one)
        return super().on_asample(asked)

    def _end_one(self) -> None:
        self._working -= 1

    def on_forward_backward(self, asked: Asked) -> Any:
        body = asked.body
        if asked.headers.get("content-encoding") == "zstd":
            import zstandard  # only clients that have it compress

            body = zstandard.ZstdDecompressor().decompress(body)  # at once, unlike the stub of the tests
        data, tokens = _size_of(body)
        tokens = self.answer_tokens or tokens
        return self.promise("forward_backward", _output(data, tokens), content_type=PROTO)


def _size_of(body: bytes) -> tuple[int, int]:
    """Return the number of data in a request, and the number of tokens of the first datum."""
    data = tokens = at = 0
    while at < len(body):
        tag, at = tinker_stub._read_varint(body, at)
        length, after = tinker_stub._read_varint(body, at)
        if tag & 7 == 0:
            at = after
            continue
        if tag >> 3 == 3:
            tokens = tokens or _tokens_of(body[after : after + length])
            data += 1
        at = after + length
    return data, tokens


def _tokens_of(datum: bytes) -> int:
    prompt = dict(tinker_stub._fields(datum))[1]
    chunk = dict(tinker_stub._fields(prompt))[1]
    return len(dict(tinker_stub._fields(chunk))[1]) // 4


@lru_cache(maxsize=8)
def _output(data: int, tokens: int) -> bytes:
    rows = struct.pack("<f", _LOGPROB) * (data * tokens)
    offsets = struct.pack(f"<{data + 1}q", *range(0, 4 * tokens * (data + 1), 4 * tokens))
    field = tinker_stub._field
    tensor = field(1, rows) + field(2, offsets) + b"\x18\x01"
    record = field(2, field(1, b"logprobs") + field(2, tensor)) + b"\x18" + tinker_stub._varint(data)
    metric = field(3, field(1, b"loss:sum") + b"\x11" + struct.pack("<d", 1.0))
    return field(1, b"stub:ArrayRecord") + field(2, record) + metric


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--answer-tokens", type=int, default=0)
    parser.add_argument("--room", type=int, default=0)
    options, sys.argv[1:] = parser.parse_known_args()
    QuickStub.answer_tokens, QuickStub.room = options.answer_tokens, options.room
    allow_many_files()
    tinker_stub.main(QuickStub)
