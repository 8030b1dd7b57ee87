"""A client of the stub."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.tinker_stub import Stub

from tinker_sync.clients.service import ServiceClient


@pytest.fixture
def service(stub: Stub) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=stub.url, api_key="tml-x") as service:
        yield service
