"""A fixture that runs a test with each back end of JSON."""

from __future__ import annotations

import pytest
from support.json_cases import BACKENDS, Codec


@pytest.fixture(params=BACKENDS, ids=lambda backend: type(backend).__name__)
def codec(request: pytest.FixtureRequest) -> Codec:
    return Codec(request.param)
