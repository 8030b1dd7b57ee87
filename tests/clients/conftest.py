"""A stub of a current server, and a client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.tinker_stub import Stub, StubServer

from tinker_sync.clients.service import ServiceClient


@pytest.fixture
def stub() -> Iterator[Stub]:
    # By this setting clients recognise the newest servers.
    with StubServer(config={"custom_loss_server_side": False}) as stub:
        yield stub


@pytest.fixture
def service(stub: Stub) -> Iterator[ServiceClient]:
    with ServiceClient(base_url=stub.url, api_key="tml-x") as service:
        yield service
