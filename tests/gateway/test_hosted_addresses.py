"""The addresses at which the hosted service itself speaks chat."""

from __future__ import annotations

import pytest

from tinker_sync import ServiceClient, UnsupportedByServerError
from tinker_sync.testing import LocalServer

NAMES = {"openai_base_url": "/oai/api/v1", "anthropic_base_url": "/anthropic/api"}


@pytest.mark.parametrize("name", NAMES)
def test_the_hosted_service_has_addresses_for_chats(name: str) -> None:
    root = "https://tinker.thinkingmachines.dev/services/tinker-prod"
    for base_url in (None, f"{root}/", "https://staging.thinkingmachines.dev/services/next"):
        with ServiceClient(base_url=base_url, api_key="tml-example") as service:
            assert getattr(service, name) == (base_url or root).rstrip("/") + NAMES[name]


@pytest.mark.parametrize("name", NAMES)
def test_other_servers_have_none_and_the_error_names_the_gateway(name: str) -> None:
    with LocalServer() as server, server.service() as service:
        with pytest.raises(UnsupportedByServerError, match=rf"sampling\.endpoint\(\).*gateway\.{name}\(\)"):
            getattr(service, name)
        assert server.calls_to("create_session") == []
