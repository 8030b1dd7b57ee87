"""A map stage of Ray Data: rows keep their order, errors become rows, and a new run finds saved responses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster.conftest import KEY, ROOT, SETTINGS, WORKERS
from support.tinker_stub import StubServer

import tinker_sync
from tinker_sync.testing import LocalServer
from tinker_sync.types import SamplingParams

# CLUSTER_ROWS=20000 runs the long version.
ROWS = int(os.environ.get("CLUSTER_ROWS", "300"))
MODEL = "tinker-sync/random"
PARAMS = SamplingParams(max_tokens=2, seed=7)

pytestmark = pytest.mark.filterwarnings("default")  # Ray Data warns of its own settings


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"row {number}", "prompt": [1 + number % 97, 1 + number // 97]} for number in range(count)]


def sampled(
    ray: Any,
    service: tinker_sync.ServiceClient,
    data: list[dict[str, Any]],
    *,
    model: str = MODEL,
    **options: Any,
) -> Any:
    from tinker_sync.ray import Sampler

    sampling = service.create_sampling_client(base_model=model).result()
    ray.data.DataContext.get_current().enable_progress_bars = False
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    return ray.data.from_items(data).map_batches(
        Sampler,
        fn_constructor_kwargs={"sampling": sampling, "params": PARAMS, **options},
        concurrency=WORKERS,
        batch_size=50,
        num_cpus=0.5,
    )


def test_a_wrong_prompt_is_a_row_with_its_error(cluster: Any, tmp_path: Path) -> None:
    data = rows(5)
    data[3]["prompt"] = [1, -4]
    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        found = sampled(cluster, service, data, key="id", save_to=str(tmp_path / "rows")).take_all()
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
    assert list(after) == [row["id"] for row in rows(100)]
    assert before.items() <= after.items()


DRIVER = """
import sys, ray
sys.path[:0] = [{tests!r}]
import tinker_sync
from cluster.test_ray_data import ROWS, rows, sampled

ray.init(address={address!r}, _node_ip_address="127.0.0.1", log_to_driver=False, logging_level="ERROR")
with tinker_sync.ServiceClient() as service:
    found = sampled(ray, service, rows(ROWS), model="stub/model", key="id", save_to={saved!r})
    for number, row in enumerate(found.iter_rows()):
        print(number, flush=True)
"""


def test_a_killed_driver_goes_on_where_it_was(cluster: Any, tmp_path: Path) -> None:
    saved = tmp_path / "rows"
    address = cluster.get_runtime_context().gcs_address
    script = DRIVER.format(tests=str(ROOT / "tests"), saved=str(saved), address=address)
    with StubServer() as stub:
        known = os.environ | SETTINGS | {"TINKER_BASE_URL": stub.url}
        command = [sys.executable, "-c", script]
        with subprocess.Popen(command, env=known, stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            for _ in range(ROWS // 4):
                assert first.stdout.readline()
            first.kill()
        before = len(stub.asked("/asample"))
        second = subprocess.run(command, env=known, capture_output=True, text=True, timeout=1200, check=False)
        submitted = len(stub.asked("/asample"))
    assert second.returncode == 0, second.stderr[-4000:]
    assert len(second.stdout.split()) == ROWS
    found = [
        json.loads(line)["row"]
        for part in saved.glob("*.jsonl")
        for line in part.read_text().splitlines()
        if line.endswith("}")
    ]
    assert len(found) == len(set(found)) == ROWS
    # At most one batch of each worker was under way, and not saved, when the first run ended.
    assert before <= submitted <= ROWS + 50 * WORKERS
