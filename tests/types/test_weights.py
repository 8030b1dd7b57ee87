"""Console addresses of saved weights, and access tokens hidden from reprs and errors."""

from __future__ import annotations

import traceback
from typing import Any

import pytest

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    AuthTokenResponse,
    CopyWeightsRequest,
    LoadWeightsRequest,
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)

SECRET = "marked-secret-77"
LOAD = {"path": "tinker://r/weights/a", "optimizer": False}


@pytest.mark.parametrize("cls", [SaveWeightsResponse, SaveWeightsForSamplerResponse])
def test_console_addresses_quote_both_parts(cls: type[Any]) -> None:
    saved = cls(path="tinker://s:train:0/weights/a b?")
    base = "https://tinker.thinkingmachines.ai/checkpoints/"
    assert saved.get_console_url() == base + "s%3Atrain%3A0/weights%2Fa%20b%3F"
    with pytest.raises(InvalidInputError, match="FOLDER"):
        cls(path="elsewhere").get_console_url()


def test_playground_addresses_quote_the_path() -> None:
    saved = SaveWeightsForSamplerResponse(path="tinker://r/sampler_weights/a&b")
    base = "https://tinker.thinkingmachines.ai/playground?mode=checkpoint&checkpoint="
    assert saved.get_playground_url() == base + "tinker%3A%2F%2Fr%2Fsampler_weights%2Fa%26b"


@pytest.mark.parametrize(
    "made",
    [
        LoadWeightsRequest(**LOAD, weights_access_token=SECRET),
        CopyWeightsRequest(source_path="tinker://r/weights/a", weights_access_token=SECRET),
        AuthTokenResponse(jwt=SECRET),
    ],
)
def test_a_token_is_dumped_but_not_shown(made: Any) -> None:
    assert SECRET in made.model_dump().values()
    assert SECRET not in repr(made)
    assert SECRET not in str([made])
    assert SECRET not in f"{made}"


@pytest.mark.parametrize(
    "make",
    [
        lambda: LoadWeightsRequest(**LOAD, weights_access_token=[SECRET]),
        lambda: LoadWeightsRequest.model_validate({**LOAD, "weights_access_token": {"token": SECRET}}),
        lambda: LoadWeightsRequest.model_validate({**LOAD, "weights_access_token": SECRET, "x": 1}),
        lambda: AuthTokenResponse.model_validate(SECRET),
        lambda: AuthTokenResponse.model_validate({"jwt": [SECRET]}),
    ],
)
def test_errors_do_not_show_a_token(make: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        make()
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in repr(caught.value.__context__)
