"""A map stage of Ray Data: rows keep their order, errors are rows, a new run finds what was saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.conftest import KEY, ROOT, WORKERS

import tinker_sync
from tinker_sync.testing import LocalServer
from tinker_sync.types import SamplingParams

# CLUSTER_ROWS=20000 is the long form.
ROWS = int(os.environ.get("CLUSTER_ROWS", "400"))
MODEL = "tinker-sync/random"
PARAMS = SamplingParams(max_tokens=2, seed=7)

pytestmark = pytest.mark.filterwarnings("default")  # Ray Data warns of its own settings


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"row {number}", "prompt": [1 + number % 97, 1 + number // 97]} for number in range(count)]


def sampled(ray: Any, service: tinker_sync.ServiceClient, data: list[dict[str, Any]], **options: Any) -> Any:
    from tinker_sync.ray import Sampler

    sampling = service.create_sampling_client(base_model=MODEL).result()
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    return ray.data.from_items(data).map_batches(
        Sampler,
        fn_constructor_kwargs={"sampling": sampling, "params": PARAMS, **options},
        concurrency=WORKERS,
        batch_size=50,
        num_cpus=0.5,
    )


def test_rows_keep_their_order_and_get_their_samples(cluster: Any) -> None:
    with LocalServer(model=MODEL, key=KEY, process=True) as server, server.service() as service:
        found = list(sampled(cluster, service, rows(ROWS)).iter_rows())
    assert [row["id"] for row in found] == [f"row {number}" for number in range(ROWS)]
    assert all(row["error"] is None for row in found)
    assert {(len(row["tokens"]), len(row["tokens"][0]), len(row["logprobs"][0])) for row in found} == {
        (1, 2, 2)
    }


def test_a_wrong_prompt_is_a_row_with_its_error(cluster: Any) -> None:
    data = rows(5)
    data[3]["prompt"] = [1, -4]
    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        found = sampled(cluster, service, data).take_all()
    assert [row["error"] is None for row in found] == [True, True, True, False, True]
    assert "Error" in found[3]["error"]
    assert len(found[3]["tokens"]) == 0


def test_a_new_run_samples_what_the_first_did_not_save(cluster: Any, tmp_path: Path) -> None:
    options = {"key": "id", "save_to": str(tmp_path / "rows")}
    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        first = sampled(cluster, service, rows(60), **options).take_all()
        submitted = len(server.calls_to("asample"))
        second = sampled(cluster, service, rows(100), **options).take_all()
        assert (submitted, len(server.calls_to("asample"))) == (60, 100)
    before = {row["id"]: [list(each) for each in row["tokens"]] for row in first}
    after = {row["id"]: [list(each) for each in row["tokens"]] for row in second}
    assert len(after) == 100
    assert before.items() <= after.items()


DRIVER = """
import sys, ray
sys.path[:0] = [{tests!r}]
import tinker_sync
from cluster.test_ray_data import ROWS, rows, sampled

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         object_store_memory=100 * 2**20, _node_ip_address="127.0.0.1")
with tinker_sync.ServiceClient() as service:
    for number, row in enumerate(sampled(ray, service, rows(ROWS), key="id", save_to={saved!r}).iter_rows()):
        print(number, flush=True)
"""


def test_a_killed_driver_goes_on_where_it_was(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="no Ray: pip install 'tinker-sync[ray]'")
    saved = tmp_path / "rows"
    script = DRIVER.format(tests=str(ROOT / "tests"), saved=str(saved))
    with LocalServer(model=MODEL, key=KEY) as server:
        known = os.environ | {
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": KEY,
            "PYTHONPATH": str(ROOT),
            "RAY_memory_monitor_refresh_ms": "0",
        }
        command = [sys.executable, "-c", script]
        first = subprocess.Popen(command, env=known, stdout=subprocess.PIPE, text=True)
        assert first.stdout is not None
        with first.stdout:
            for _ in range(ROWS // 4):
                first.stdout.readline()
            first.kill()
            first.wait()
        before = len(server.calls_to("asample"))
        second = subprocess.run(command, env=known, capture_output=True, text=True, timeout=600, check=True)
        submitted = len(server.calls_to("asample"))
    assert len(second.stdout.split()) == ROWS
    found = [
        json.loads(line)["row"]
        for part in saved.glob("*.jsonl")
        for line in part.read_text().splitlines()
        if line.endswith("}")
    ]
    assert len(found) == len(set(found)) == ROWS
    # The first run had at most a batch of each worker under way, which nobody saved.
    assert before <= submitted <= ROWS + 50 * WORKERS * 2
