"""Console addresses of saved weights, and access tokens hidden from reprs and errors."""

from __future__ import annotations

from typing import Any

import pytest

from tinker_sync.errors import InvalidInputError
from tinker_sync.types import (
    SaveWeightsForSamplerResponse,
    SaveWeightsResponse,
)


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
