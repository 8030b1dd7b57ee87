"""Checkpoint paths are parsed, and reprs hide signed addresses."""

from __future__ import annotations

import pytest

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import Checkpoint, ExternalWeightsUrlsResponse, ParsedCheckpointTinkerPath


@pytest.mark.parametrize(
    ("path", "run", "kind", "checkpoint"),
    [
        ("tinker://run-1/weights/a", "run-1", "training", "weights/a"),
        ("tinker://s:train:0/sampler_weights/b c", "s:train:0", "sampler", "sampler_weights/b c"),
        ("tinker://r/external_weights/é", "r", "external", "external_weights/é"),
        ("tinker://r/weights/...", "r", "training", "weights/..."),
    ],
)
def test_a_path_is_parsed(path: str, run: str, kind: str, checkpoint: str) -> None:
    parsed = ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert parsed.tinker_path == path
    assert (parsed.training_run_id, parsed.checkpoint_type, parsed.checkpoint_id) == (run, kind, checkpoint)


@pytest.mark.parametrize(
    "path",
    [
        "", "run/weights/a", "tinker:/run/weights/a", "Tinker://run/weights/a", " tinker://run/weights/a",
        "tinker://run/weights", "tinker://run/weights/a/b", "tinker://run/other/a",
        "tinker://run/Weights/a", "tinker:///weights/a", "tinker://run/weights/", "tinker://../weights/a",
        "tinker://run/weights/..", "tinker://run/weights/.",
    ],
)  # fmt: skip
def test_a_malformed_path_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert str(caught.value) == (
        f"{path!r}: expected tinker://RUN/FOLDER/NAME, "
        "where FOLDER is one of weights, sampler_weights, external_weights"
    )


def test_reprs_show_the_host_of_signed_addresses_only() -> None:
    urls = {
        "a": "https://user:pass-777@files.example:8443/secret-777/a?X-Amz-Signature=sig-777#frag-777",
        "b": "https://[broken-777",
        "c": "sig-777",
    }
    response = ExternalWeightsUrlsResponse(urls=urls, expires="2026-01-31T12:00:00Z")
    assert "777" not in repr(response)
    assert "'a': 'https://files.example/…'" in repr(response)
    assert response.urls == urls
    assert response.model_dump()["urls"] == urls


def test_an_unknown_kind_of_checkpoint_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^Checkpoint\.checkpoint_type: expected one of 'training', "
    ):
        Checkpoint(checkpoint_id="a", checkpoint_type="weights", time=0, tinker_path="a")
