"""An embedded server for each test, in this process, with a ledger of what it has sampled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.agents import Sampled, sample_ledger
from support.chat_templates import TAGGED
from support.tool_user import train_tool_user

from tinker_sync import SamplingClient, SamplingParams, ServiceClient
from tinker_sync.gateway import Gateway
from tinker_sync.testing import LocalServer


@pytest.fixture
def ledger() -> Iterator[list[Sampled]]:
    with sample_ledger() as kept:
        yield kept


@pytest.fixture
def server(ledger: list[Sampled]) -> Iterator[LocalServer]:
    with LocalServer() as running:
        yield running


@pytest.fixture
def service(server: LocalServer) -> Iterator[ServiceClient]:
    with server.service() as client:
        yield client


@pytest.fixture
def sampling(service: ServiceClient) -> SamplingClient:
    return service.create_sampling_client(base_model="tinker-sync/tiny")


@pytest.fixture
def gateway(sampling: SamplingClient) -> Iterator[Gateway]:
    with sampling.endpoint(sampling_params=SamplingParams(max_tokens=12)) as serving:
        yield serving


@pytest.fixture
def tool_user(service: ServiceClient) -> Iterator[Gateway]:
    greedy = SamplingParams(max_tokens=90, temperature=0.0)
    with train_tool_user(service).endpoint(sampling_params=greedy, chat_template=TAGGED) as serving:
        yield serving
