"""A server for the tests of a file that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.embedded import Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("server"), seed=1) as made:
        session = made.session()
        made.model(session)
        made.sampler(session)
        made.sampled(f"{session}:sample:0", 0)  # its threads start here
        yield made
