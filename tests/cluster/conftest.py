"""One Ray cluster on this machine for the tests of this folder.

They need `pip install -e '.[ray,test]'` and are skipped without it. Ray's own threads, sockets and processes
are outside the rules of the suite, which watch threads and locks of this package.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KEY = "tml-of-the-cluster"
WORKERS = int(os.environ.get("CLUSTER_WORKERS", "2"))
# The processes of Ray inherit these. Its monitor of memory judges the whole machine, so it is off.
SETTINGS = {
    "TINKER_API_KEY": KEY,
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_TOKEN": "token-of-the-cluster",  # or Ray writes one into the home directory
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_worker_register_timeout_seconds": "300",
    "RAY_health_check_failure_threshold": "60",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Start Ray with a key in the environment of its workers, and yield it."""
    ray = pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        started = partial(
            ray.init,
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 * 2**20,
            _node_ip_address="127.0.0.1",
        )
        # Ray gives its own processes half a minute to start, which is too short on a busy machine.
        for _ in range(3):
            try:
                started()
                break
            except Exception:  # noqa: BLE001  # Ray raises no narrower class
                ray.shutdown()
        else:
            started()
    yield ray
    ray.shutdown()
