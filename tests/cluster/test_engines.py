"""Clients work as arguments in processes of joblib, Dask and torch: the examples of many processes run."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.isolation import hold_embedded_server

from tinker_sync.examples import cluster
from tinker_sync.examples.cluster import processes

ROOT = Path(__file__).parents[2]
# CLUSTER_ENGINES=1 runs every start method; other tests of the default suite cover forks.
START_METHODS = multiprocessing.get_all_start_methods() if os.environ.get("CLUSTER_ENGINES") else ["spawn"]
SECRET = "tml-secret-that-stays-here"


@pytest.fixture(autouse=True, scope="module")
def _one_server() -> Iterator[None]:
    let_go = hold_embedded_server()
    yield
    let_go()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("start_method", START_METHODS)
def test_processes_of_this_machine(start_method: str) -> None:
    shares = processes.main(["--steps", "3"], start_method=start_method, workers=2)
    assert shares == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "engine"), [("joblib_lots", "joblib"), ("dask_lots", "distributed"), ("data_loader", "torch")]
)
def test_other_engines(name: str, engine: str) -> None:
    pytest.importorskip(engine, reason=f"no {engine}")
    # Run it as a separate program, because these engines leave threads running.
    done = subprocess.run(
        [sys.executable, "-m", f"tinker_sync.examples.cluster.{name}", "--steps", "2"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "100% of the sums were right" in done.stdout


def test_the_examples_are_short_and_listed() -> None:
    for name in ("processes", "joblib_lots", "dask_lots", "data_loader"):
        path = Path(processes.__file__).with_name(f"{name}.py")
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path
        assert f"python -m tinker_sync.examples.cluster.{name}" in (cluster.__doc__ or "")


@pytest.mark.parametrize("module", ["pickle", "cloudpickle", "ray.cloudpickle", "distributed.protocol"])
def test_no_serializer_carries_the_key(module: str) -> None:
    dump = pytest.importorskip(module, reason=f"no {module}").dumps
    from tinker_sync.testing import LocalServer

    with LocalServer(model="tinker-sync/random", key=SECRET) as server, server.service() as service:
        sampling = service.create_sampling_client(base_model="tinker-sync/random").result()
        travelling = dump(sampling)
        frames = [bytes(each) for each in travelling] if isinstance(travelling, list) else [travelling]
        handle = sampling.get_sampler_handle()
    state = base64.urlsafe_b64decode(handle)
    assert json.loads(state)["holder"]["api_key"] is None
    for frame in frames:
        assert SECRET.encode() not in frame
        assert base64.b64encode(SECRET.encode()).rstrip(b"=")[:-2] not in frame
