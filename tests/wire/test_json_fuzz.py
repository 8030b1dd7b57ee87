"""Damaged answers of every kind: only `WireError`, and the same one from both back ends."""

from __future__ import annotations

import json
import os
import random
import zlib
from typing import Any

import pytest
from support.each import for_each
from support.json_cases import BACKENDS, answer_kinds, mangled, random_answer, spoiled

from tinker_sync.errors import InvalidInputError, WireError
from tinker_sync.wire.json import MAX_DEPTH, STANDARD_LIBRARY, decode, encode

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "50"))

ANSWERS = {name: cls for name, cls in answer_kinds().items() if name != "SamplingParams"}


def outcome(data: bytes, cls: type[Any], backend: Any) -> str:
    """Decode an answer, and return the result or the refusal as text, because NaN does not equal itself."""
    refusal = None
    try:
        decoded = decode(data, cls, backend=backend)
    except WireError as error:
        refusal = error
    if refusal is not None:
        assert refusal.path.startswith("$")
        assert len(str(refusal)) < 10_000
        assert refusal.__cause__ is None
        assert refusal.__context__ is None
        return f"refused: {refusal}"
    try:
        return encode(decoded, backend=STANDARD_LIBRARY).decode()
    except InvalidInputError:  # half a surrogate pair can be decoded, but not encoded
        return repr(decoded)


@for_each("name", sorted(ANSWERS))
def test_any_bytes_are_an_answer_or_a_wire_error(name: str) -> None:
    rng, cls = random.Random(zlib.crc32(name.encode())), ANSWERS[name]
    refused = 0
    for _ in range(ROUNDS):
        tree = random_answer(rng, cls)
        data = json.dumps(spoiled(rng, tree), default=str).encode("utf-8", "surrogatepass")
        if rng.random() < 0.5:
            data = mangled(rng, data)
        outcomes = {outcome(data, cls, backend) for backend in BACKENDS}
        assert len(outcomes) == 1, data
        refused += outcomes.pop().startswith("refused")
    assert 0 < refused < ROUNDS


@pytest.mark.parametrize("bomb", [b"[" * 2_000_000, b'{"a":' * 500_000, b"[" * 900_000 + b"]" * 900_000])
@pytest.mark.parametrize("backend", BACKENDS)
def test_depth_bombs_are_refused(bomb: bytes, backend: Any) -> None:
    with pytest.raises(WireError, match=f"more than {MAX_DEPTH} deep"):
        decode(bomb, ANSWERS["AuditLogResponse"], backend=backend)
