"""A cluster of two machines, simulated on this one, that loses one of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster.conftest import KEY, SETTINGS

from tinker_sync.testing import FaultPlan, LocalServer

MODEL = "tinker-sync/random"

# A separate process, because a process can be the driver of only one cluster at a time.
DRIVER = """
import os, ray, tinker_sync
from ray.cluster_utils import Cluster
from tinker_sync.ray import SamplerPool

node = dict(num_cpus=2, object_store_memory=100 * 2**20, node_ip_address="127.0.0.2")
cluster = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
second = cluster.add_node(**node, resources={"second": 1})
ray.init(
    address=cluster.address, _node_ip_address="127.0.0.2", log_to_driver=False, logging_level="ERROR"
)
cluster.wait_for_nodes()
prompts = ([1 + number % 97, 1 + number // 97] for number in range(200))
with tinker_sync.ServiceClient() as service:
    sampling = service.create_sampling_client(base_model="tinker-sync/random").result()
    params = tinker_sync.SamplingParams(max_tokens=2, seed=7)
    spread = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
    with SamplerPool(sampling, workers=2, max_in_flight=32, ray_options=spread) as pool:
        nodes = set(pool.node_ids())
        items = pool.map(prompts, params, progress=False)
        seen = [next(items) for _ in range(50)]
        cluster.remove_node(second, allow_graceful=False)
        seen += list(items)
        left = set(pool.node_ids())
print()
different = {item.index for item in seen}
print("seen", len(nodes), len(left), len(seen), all(item.ok for item in seen), len(different))
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.skipif(
    not os.environ.get("CLUSTER_NODES"), reason="takes a quiet machine; CLUSTER_NODES=1 runs it"
)
def test_a_lost_machine_loses_no_prompt(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")
    # A second for each, so that the lost machine has samples under way.
    plan = FaultPlan().latency("asample", 1.0)
    with LocalServer(plan, model=MODEL, key=KEY, process=True, pace=1.0) as server:
        known = (
            os.environ
            | SETTINGS
            | {
                "TINKER_BASE_URL": server.url,
                # Notice the loss after a second, in place of half a minute.
                "RAY_health_check_initial_delay_ms": "0",
                "RAY_health_check_period_ms": "500",
                "RAY_health_check_failure_threshold": "2",
            }
        )
        done = subprocess.run(
            [sys.executable, "-c", DRIVER],
            env=known,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "seen 2 1 200 True 200" in done.stdout.splitlines(), done.stdout[-4000:]
