"""Runs recorded against a server, and replayed without one."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tinker_sync
from tinker_sync import types
from tinker_sync.testing import FaultPlan, LocalServer, faults, record, replay
from tinker_sync.testing.cassette import Cassette

MODEL = "tinker-sync/random"
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})


def program(prompts: int = 6) -> list[Any]:
    """Train, save a checkpoint, take samples concurrently and read lists. Return the results."""
    found: list[Any] = []
    with tinker_sync.ServiceClient(user_metadata={"run": "a"}) as service:
        training = service.create_lora_training_client(MODEL, rank=2)
        for _ in range(3):
            passed = training.forward_backward([DATUM], "cross_entropy")
            training.optim_step(types.AdamParams(learning_rate=0.01)).result()
            found.append(passed.result().metrics)
        path = training.save_weights_for_sampler("final").result().path
        found.append(path)
        sampling = service.create_sampling_client(path)
        params = types.SamplingParams(max_tokens=4)
        futures = [sampling.sample(types.ModelInput.from_ints([n]), 1, params) for n in range(1, prompts + 1)]
        found += [list(future.result().sequences[0].tokens) for future in futures]
        rest = service.create_rest_client()
        found.append([each.checkpoint_id for each in rest.iter_checkpoints(training.model_id)])
        try:
            rest.get_training_run("no-such-run").result()
        except tinker_sync.NotFoundError as error:
            found.append(error.status_code)
    return found


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any], str]:
    place = tmp_path_factory.mktemp("cassettes") / "run.cassette"
    plan = FaultPlan().on("asample", faults.status(503), nth=2)
    with LocalServer(plan, model=MODEL, fwdbwd_max_chunk_len=4) as server:
        with record(place, base_url=server.url, api_key=server.key):
            found = program()
        return place, found, server.key


def test_a_replay_gives_what_was_recorded(recorded: tuple[Path, list[Any], str]) -> None:
    place, found, _ = recorded
    for _ in range(2):
        with replay(place) as server:
            assert program() == found
        assert server.misses == []
    assert "TINKER_BASE_URL" not in os.environ


def test_the_file_holds_no_key_and_can_be_read(recorded: tuple[Path, list[Any], str]) -> None:
    place, _, key = recorded
    text = place.read_text(encoding="utf-8")
    assert key not in text
    assert "authorization" not in text.lower()
    entries = [json.loads(line) for line in text.splitlines()]
    assert entries[0]["format"] == 1
    assert {"/api/v1/asample", "/api/v1/create_model"} <= {entry["target"] for entry in entries[1:]}
    polls = [entry["request"]["request_id"] for entry in entries[1:] if "retrieve_future" in entry["target"]]
    assert len(polls) == len(set(polls))


def ask_for_something_else(place: Path) -> None:
    with replay(place) as server:
        service = server.service()
        training = service.create_lora_training_client(MODEL, rank=2)
        sampling = service.create_sampling_client(f"tinker://{training.model_id}/sampler_weights/final")
        other = sampling.sample(types.ModelInput.from_ints([99]), 1, types.SamplingParams(max_tokens=4))
        assert isinstance(other.exception(), tinker_sync.BadRequestError)


def test_a_request_that_was_not_recorded_is_named(recorded: tuple[Path, list[Any], str]) -> None:
    place, _, _ = recorded
    with pytest.raises(tinker_sync.InvalidInputError, match=r"no answer to POST /api/v1/asample.*prompt"):
        ask_for_something_else(place)
    with replay(place, strict=False) as server:
        service = server.service()
        with pytest.raises(tinker_sync.BadRequestError, match="Record it again"):
            service.get_server_capabilities()
        assert server.unused


def test_a_failed_run_leaves_the_file_alone(tmp_path: Path) -> None:
    place = tmp_path / "kept.cassette"
    place.write_text("before", encoding="utf-8")
    with LocalServer(model=MODEL) as server:
        recording = record(place, base_url=server.url, api_key=server.key)
        with pytest.raises(KeyError), recording:
            raise KeyError
    assert place.read_text(encoding="utf-8") == "before"


@pytest.mark.parametrize("text", ["", "before", '{"format": 99}\n', '{"format": 1}\n{"method": "GET"}\n'])
def test_files_that_are_no_cassettes_are_refused(text: str, tmp_path: Path) -> None:
    place = tmp_path / "odd.cassette"
    place.write_text(text, encoding="utf-8")
    with pytest.raises(tinker_sync.ConfigurationError, match=r"odd\.cassette"):
        replay(place)
    with pytest.raises(tinker_sync.ConfigurationError, match=r"testing\.record"):
        replay(tmp_path / "none")


def test_bytes_survive_the_file(recorded: tuple[Path, list[Any], str], tmp_path: Path) -> None:
    first = Cassette.load(recorded[0])
    first.save(tmp_path / "copy")
    assert Cassette.load(tmp_path / "copy").exchanges == first.exchanges
    assert any(b"\xff" in one.reply.content or not one.reply.content.isascii() for one in first.exchanges)
