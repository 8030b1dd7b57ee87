"""The JSON back ends to test, and random JSON answers of every type, valid and damaged."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from support.random_models import flat_models, random_arguments, random_json

from tinker_sync.types import ForwardBackwardOutput, SampleResponse, SamplingParams
from tinker_sync.wire import json as wire_json
from tinker_sync.wire.json import HAS_ORJSON, STANDARD_LIBRARY, Backend, Orjson

BACKENDS: list[Backend] = [STANDARD_LIBRARY, *([Orjson()] if HAS_ORJSON else [])]


class Codec:
    """The functions of `tinker_sync.wire.json` with one back end."""

    def __init__(self, backend: Backend) -> None:
        self.decode = partial(wire_json.decode, backend=backend)
        self.encode = partial(wire_json.encode, backend=backend)
        self.loads = partial(wire_json.loads, backend=backend)
        self.dumps = partial(wire_json.dumps, backend=backend)


def answer_kinds() -> dict[str, type[Any]]:
    """Return the classes of all answers of a server, by the names of the classes."""
    flat = {name: cls for name, cls in flat_models().items() if cls.__response__}
    return {**flat, "ForwardBackwardOutput": ForwardBackwardOutput, "SampleResponse": SampleResponse}


def random_answer(rng: random.Random, cls: type[Any]) -> dict[str, Any]:
    """Return random fields of an answer of this class, in a form that a server may send."""
    if cls is SampleResponse:
        return _sample(rng)
    if cls is ForwardBackwardOutput:
        return _output(rng)
    assert cls is not SamplingParams
    return random_arguments(rng, cls)


def _sample(rng: random.Random) -> dict[str, Any]:
    return {
        "sequences": [
            {
                "stop_reason": rng.choice(["length", "stop"]),
                "tokens": _tokens(rng),
                "logprobs": rng.choice([None, _numbers(rng)]),
                "topk_logprobs": rng.choice([None, _topk(rng)]),
            }
            for _ in range(rng.randrange(3))
        ],
        "prompt_logprobs": rng.choice([None, [None, *_numbers(rng)]]),
        "topk_prompt_logprobs": rng.choice([None, _topk(rng)]),
        "target_prompt_logprobs": rng.choice([None, _tensor(rng)]),
        "prompt_cache_hit_tokens": 3,
        "type": "sample",
    }


def _output(rng: random.Random) -> dict[str, Any]:
    return {
        "loss_fn_output_type": "scalar",
        "loss_fn_outputs": [{"logprobs": _tensor(rng), "x": _tensor(rng)} for _ in range(rng.randrange(3))],
        "metrics": {"loss:sum": rng.choice([1, 0.5, None])},
    }


def _tensor(rng: random.Random) -> dict[str, Any]:
    tensor: dict[str, Any] = {"data": [1, 2, 3, 4], "dtype": rng.choice(["int64", "float32"])}
    sparse = {"shape": [2, 5], "sparse_crow_indices": [0, 2, 4], "sparse_col_indices": [0, 1, 3, 4]}
    return {**tensor, **rng.choice([{}, {"shape": [2, 2]}, {"shape": None}, sparse])}


def _topk(rng: random.Random) -> list[Any]:
    return [rng.choice([None, [[7, -0.5]], [[1, -0.1], [2, None]], []]) for _ in range(rng.randrange(4))]


def _tokens(rng: random.Random) -> list[int]:
    return [rng.randrange(200_000) for _ in range(rng.randrange(4))]


def _numbers(rng: random.Random) -> list[float]:
    return [-rng.random() for _ in range(rng.randrange(4))]


def spoiled(rng: random.Random, tree: Any) -> Any:
    """Return a copy of a tree in which random values are replaced, missing or added."""
    if rng.random() < 0.1:
        odd = [random_json(rng), tree, [tree], {"type": tree}, str(tree), float("nan"), 2**90, "\ud800"]
        return rng.choice(odd)
    if isinstance(tree, dict):
        kept = {name: spoiled(rng, value) for name, value in tree.items() if rng.random() < 0.97}
        return {**kept, "type": rng.choice(["own", "stop", 1, None])} if rng.random() < 0.05 else kept
    if isinstance(tree, list):
        return [spoiled(rng, item) for item in tree if rng.random() < 0.97]
    return tree


_PIECES = [
    b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"NaN", b"-", b"1e999", b"9" * 25, b"\\ud800",
    b"\xff", b"\xef\xbb\xbf", b"\x00", b"0", b'"type":', b"\xf0\x9f\x98\x80", b"[" * 300, b"\n",
]  # fmt: skip


def mangled(rng: random.Random, data: bytes) -> bytes:
    """Return a copy of the bytes with random parts removed, replaced or repeated."""
    mangled = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        start = rng.randrange(len(mangled) + 1)
        end = min(len(mangled), start + rng.choice([0, 0, 1, 1, 2, 8]))
        elsewhere = rng.randrange(len(mangled) + 1)
        mangled[start:end] = rng.choice([b"", rng.choice(_PIECES), mangled[elsewhere : elsewhere + 9]])
    return bytes(mangled[: rng.randrange(len(mangled) + 1)] if rng.random() < 0.1 else mangled)
