"""JSON bodies: this package sends and reads exactly the same JSON as the reference client.

Both sides get the same random arguments. Absent and null differ, and so do 1 and 1.0. Every kind of request
and of answer has its own seed, so a failure can be repeated alone.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator
from datetime import date, datetime, time, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args, get_origin
from uuid import UUID

import attrs
import numpy as np
import pydantic
import pytest
import tinker.types
from interop.conftest import shared
from support.random_models import (
    exact,
    exported_models,
    flat_models,
    random_arguments,
    random_object,
    random_text,
    seeded,
)
from tinker._compat import model_dump
from tinker.types._pydantic_types.forward_backward_input import ForwardBackwardInput
from tinker.types.telemetry_send_request import TelemetrySendRequest

import tinker_sync.types
from tinker_sync.types._model import Model
from tinker_sync.types._structured import tag_of
from tinker_sync.wire.json import STANDARD_LIBRARY, Orjson, decode, encode

Arguments = dict[str, Any]

REQUESTS_OF_EACH_KIND = 5000
ANSWERS_OF_EACH_KIND = 1000

BACKENDS = [STANDARD_LIBRARY, Orjson()]

# The reference client has dataclasses for the data of training requests. These models have their JSON form.
THEIRS = {"ForwardBackwardInput": ForwardBackwardInput, "TelemetrySendRequest": TelemetrySendRequest}


def theirs(name: str) -> type[pydantic.BaseModel]:
    """Return the reference client's model of this name."""
    return THEIRS.get(name) or getattr(tinker.types, name)


def body(request: pydantic.BaseModel) -> Any:
    """Return the body that the reference client sends for a request."""
    tree = model_dump(request, exclude_unset=False, exclude_none=True, mode="json")
    return json.loads(json.dumps(tree, ensure_ascii=False, separators=(",", ":"), allow_nan=False))


# ------------------------------------------------------------------------------------------------ requests


def is_request(name: str) -> bool:
    return name.endswith("Request") and hasattr(tinker.types, name)


REQUESTS = sorted(filter(is_request, flat_models()))
PARTS = ["CustomLossGraph", "LoraConfig", "AdamParams", "DimuonParams", "UserSearchOwner"]


@pytest.mark.parametrize("name", [*REQUESTS, *PARTS])
def test_requests_are_what_the_reference_sends(name: str) -> None:
    rng, ours, reference = seeded(name), getattr(tinker_sync.types, name), theirs(name)
    seen = set()
    for number in range(REQUESTS_OF_EACH_KIND):
        arguments = spelled(rng, ours, shared(random_arguments(rng, ours)))
        mine, other = optimizers(rng, name, arguments)
        encoded = encode(ours(**mine), backend=BACKENDS[number % 2])
        expected = body(reference(**other))
        assert exact(shared(json.loads(encoded))) == exact(expected), mine
        seen.add(encoded)
    assert len(seen) >= 5


def spelled(rng: random.Random, cls: type[Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments, in which some ints became their digits as text, or whole floats."""
    for field in attrs.fields(cls):
        value = arguments.get(field.name)
        if type(value) is int and rng.random() < 0.2 and int in (field.type, *get_args(field.type)):
            arguments[field.name] = rng.choice([str(value), float(value)]) if abs(value) < 2**53 else value
    return arguments


def optimizers(rng: random.Random, name: str, arguments: Arguments) -> tuple[Arguments, Arguments]:
    """Return the arguments for this client, and the same arguments for the reference client.

    In some, the settings of an optimizer are instances of each client's types, or have another valid name.
    """
    ours, other = dict(arguments), dict(arguments)
    if "optimizer_config" in arguments and rng.random() < 0.3:
        ours["optimizer_config"] = tinker_sync.types.DimuonOptimizerConfig()
        other["optimizer_config"] = tinker.types.DimuonOptimizerConfig()
    if name == "OptimStepRequest":
        spoken = rng.choice(["optim_params", "adam_params", "optimizer_params"])
        given = ours.pop("optim_params"), other.pop("optim_params")
        if rng.random() < 0.3:
            settings = random_arguments(rng, tinker_sync.types.DimuonParams)
            given = tinker_sync.types.DimuonParams(**settings), tinker.types.DimuonParams(**settings)
        ours[spoken], other[spoken] = given
    return ours, other


# ------------------------------------------------------------------------------------- requests with arrays


def random_tokens(rng: random.Random) -> list[int]:
    return [rng.choice([0, 1, rng.randrange(200_000), 2**31 - 1, -1]) for _ in range(rng.randrange(6))]


def random_chunk(rng: random.Random) -> dict[str, Any]:
    kind = rng.choice(["encoded_text", "encoded_text", "image", "image_asset_pointer", "dmel"])
    expected = {"expected_tokens": rng.choice([None, 0, 7, "7"])} if rng.random() < 0.5 else {}
    picture = {"format": rng.choice(["png", "jpeg"]), **expected}
    return {
        "encoded_text": lambda: {"tokens": random_tokens(rng)},
        "image": lambda: {"data": rng.randbytes(rng.randrange(5)), **picture},
        "image_asset_pointer": lambda: {"location": random_text(rng), **picture},
        "dmel": lambda: {"dmel": rng.randbytes(rng.randrange(5))},
    }[kind]() | {"type": kind}


def random_prompt(rng: random.Random) -> dict[str, Any]:
    return {"chunks": [random_chunk(rng) for _ in range(rng.randrange(4))]}


def random_tensor(rng: random.Random, dtype: str) -> dict[str, Any]:
    """Return a random tensor: dense or sparse, with or without a shape. Its floats are float32 values."""
    rows, columns = rng.randrange(4), rng.randrange(1, 4)
    size = rows * columns
    sparse = rng.random() < 0.3
    stored = min(size, 2) if sparse else size
    if dtype == "int64":
        data: list[Any] = [rng.choice([-1, 0, rng.randrange(2**40), -(2**63)]) for _ in range(stored)]
    else:
        data = [float(np.float32(rng.choice([0.0, -0.0, 1.0, rng.gauss(0, 1), 1e30]))) for _ in range(stored)]
    tensor = {"data": data, "dtype": dtype}
    if sparse:
        crow = [min(row * columns, stored) for row in range(rows + 1)]
        col = [cell % columns for cell in range(stored)]
        return {**tensor, "shape": [rows, columns], "sparse_crow_indices": crow, "sparse_col_indices": col}
    return {**tensor, **rng.choice([{}, {"shape": [size]}, {"shape": [rows, columns]}, {"shape": None}])}


def random_sampling(rng: random.Random) -> dict[str, Any]:
    choices = {
        "max_tokens": [None, 0, 16, "16", 16.0],
        "seed": [None, 0, -1, 2**40],
        "stop": [None, "", "end", [], ["a", "é☃"], [1, 2], (3,), ("x",), ["4", "5"]],
        "temperature": [0, 1, 0.7, "0.5", 1e-3, 2.0],
        "top_k": [-1, 0, 40],
        "top_p": [1, 0.9, "0.1", 1e-9],
    }
    return {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.7}


def random_sample_request(rng: random.Random) -> dict[str, Any]:
    choices = {
        "num_samples": [1, 2, "3", 4.0],
        "base_model": [None, "", "base/model"],
        "model_path": [None, "tinker://r/weights/1"],
        "sampling_session_id": [None, "s:sample:0"],
        "seq_id": [None, 0, 10**9],
        "prompt_logprobs": [None, True, False, 1, "false"],
        "topk_prompt_logprobs": [0, 5],
        "topk_sample_logprobs": [0, 5],
        "target_prompt_logprobs": [None, random_tensor(rng, "int64")],
        "prompt_alt_tokens_k": [0, 3],
        "prompt_logprobs_last_n": [None, 2],
        "record_stability_info": [None, True, False],
        "type": ["sample"],
    }
    arguments = {name: rng.choice(values) for name, values in choices.items() if rng.random() < 0.6}
    return {**arguments, "prompt": random_prompt(rng), "sampling_params": random_sampling(rng)}


def arrays_for_lists(rng: random.Random, prompt: dict[str, Any]) -> dict[str, Any]:
    """Return the same prompt with its tokens in lists, tuples or arrays. Only this package accepts arrays."""
    containers = [list, tuple, np.array, lambda tokens: np.array(tokens, dtype=np.int32)]
    chunks = [dict(chunk) for chunk in prompt["chunks"]]
    for chunk in chunks:
        if chunk.get("tokens"):
            chunk["tokens"] = rng.choice(containers)(chunk["tokens"])
    return {"chunks": chunks}


def test_sample_requests_are_what_the_reference_sends() -> None:
    rng = seeded("SampleRequest")
    for number in range(REQUESTS_OF_EACH_KIND):
        arguments = random_sample_request(rng)
        ours = {**arguments, "prompt": arrays_for_lists(rng, arguments["prompt"])}
        encoded = encode(tinker_sync.types.SampleRequest(**ours), backend=BACKENDS[number % 2])
        expected = body(tinker.types.SampleRequest(**arguments))
        assert exact(json.loads(encoded)) == exact(expected), ours


def test_free_form_values_are_what_the_reference_sends() -> None:
    rng = seeded("free")
    for number in range(REQUESTS_OF_EACH_KIND):
        metadata = {**random_object(rng), "odd": odd_value(rng)}
        arguments = {"tags": [], "user_metadata": metadata, "sdk_version": "1"}
        encoded = encode(tinker_sync.types.CreateSessionRequest(**arguments), backend=BACKENDS[number % 2])
        assert exact(json.loads(encoded)) == exact(body(tinker.types.CreateSessionRequest(**arguments)))


def odd_value(rng: random.Random) -> Any:
    """Return a value that is no usual JSON value, and that both clients can encode."""
    value = rng.choice(
        [
            (1, None, ("a",)),
            b"text",
            bytearray(b"more"),
            datetime(2026, 1, 1),  # noqa: DTZ001  # naive on purpose
            datetime(2026, 1, 1, 1, 2, 3, 4, tzinfo=timezone.utc),
            date(2026, 1, 1),
            time(12, 30),
            Decimal("1.50"),
            Path("/a/b"),
            UUID(int=7),
            tinker_sync.types.RequestErrorCategory.User,
            {1: "whole", 1.5: "real", "": None},
            2**200,
            -0.0,
            1e22,
            5e-324,
        ]
    )
    return rng.choice([value, [value], {"nested": {"value": value, "null": None}}])


# ------------------------------------------------------------------------------------------------- answers


def answers() -> Iterator[str]:
    for name, cls in exported_models().items():
        reference = THEIRS.get(name) or getattr(tinker.types, name, None)
        if cls.__response__ and inspect.isclass(reference) and issubclass(reference, pydantic.BaseModel):
            yield name


ANSWERS = sorted(answers())


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_mean_what_they_mean_to_the_reference(name: str) -> None:
    rng, ours, reference = seeded(name), getattr(tinker_sync.types, name), theirs(name)
    added = 0
    for number in range(ANSWERS_OF_EACH_KIND):
        arguments = random_sampling(rng) if name == "SamplingParams" else shared(random_arguments(rng, ours))
        tree = reference(**within_64_bits(arguments)).model_dump(mode="json", exclude_none=rng.random() < 0.5)
        added += grown(rng, ours, tree)
        received = decode(json.dumps(tree).encode(), ours, backend=BACKENDS[number % 2])
        expected = reference.model_validate(tree)
        assert exact(shared(received.model_dump(mode="json"))) == exact(expected.model_dump(mode="json")), (
            tree
        )
    assert added > ANSWERS_OF_EACH_KIND / 4


def within_64_bits(value: Any) -> Any:
    """Return a tree with integers below 2**40, because both clients read very large ones as floats."""
    if isinstance(value, dict):
        return {name: within_64_bits(item) for name, item in value.items()}
    if isinstance(value, list):
        return [within_64_bits(item) for item in value]
    return value % 2**40 if type(value) is int else value


def grown(rng: random.Random, kind: Any, tree: Any) -> int:
    """Add unknown fields to some of the JSON objects in `tree`, and return the number of added fields.

    Only objects that are read as a `Model` get such fields. `kind` is the declared type of the tree.
    """
    if isinstance(tree, list) and get_args(kind):
        return sum(grown(rng, get_args(kind)[0], item) for item in tree)
    if not isinstance(tree, dict):
        return 0
    if get_origin(kind) is dict:
        return sum(grown(rng, get_args(kind)[1], item) for item in tree.values())
    models = [
        model for model in (kind, *get_args(kind)) if inspect.isclass(model) and issubclass(model, Model)
    ]
    # Of a union, take the member that the tag selects.
    models = [model for model in models if len(models) == 1 or tag_of(model) in tree.items()]
    if not models or not models[0].__response__:
        return 0
    added = sum(grown(rng, field.type, tree.get(field.name)) for field in attrs.fields(models[0]))
    if rng.random() < 0.5:
        tree["of_a_later_protocol"] = rng.choice([None, 1, [{"a": {}}]])
        return added + 1
    return added
