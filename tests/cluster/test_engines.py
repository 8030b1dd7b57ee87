"""Clients work as arguments in processes of this machine, of joblib, Dask and torch."""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.isolation import hold_embedded_server

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
def test_processes_of_this_machine(
    start_method: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "LOTS", 3)
    monkeypatch.setattr(processes, "PROCESSES", 2)
    processes.main(start_method)
    assert capsys.readouterr().out.count("100% of 32 sums are right") == 3


# Programs of the engines that the docstring of `processes` names, with its line for each.
HEAD = """
import tinker_sync as tinker
from tinker_sync.examples.cluster import processes
from tinker_sync.examples.cluster.processes import score
processes.LOTS = 2

def main():
    with tinker.ServiceClient(base_url="local") as service:
        sampling = service.create_sampling_client(base_model="tinker-sync/tiny").result()
        lots = processes.make_lots()
{body}

if __name__ == "__main__":
    main()
"""
ENGINES = {
    "joblib": """
from joblib import Parallel, delayed
print(Parallel(n_jobs=2)(delayed(score)(sampling, lot) for lot in lots))
""",
    "distributed": """
from functools import partial
from dask.distributed import Client, LocalCluster
with LocalCluster(n_workers=2, host="127.0.0.1", dashboard_address=None) as here, Client(here) as client:
    print(client.gather(client.map(partial(score, sampling), lots, pure=False)))
""",
    "torch": """
from torch.utils.data import DataLoader, Dataset
class Scored(Dataset):
    def __len__(self):
        return len(lots)
    def __getitem__(self, index):
        return score(sampling, lots[index])
print([float(share) for batch in DataLoader(Scored(), num_workers=2) for share in batch])
""",
}


@pytest.mark.parametrize("engine", ENGINES)
def test_other_engines(engine: str, tmp_path: Path) -> None:
    pytest.importorskip(engine, reason=f"no {engine}")
    # A separate program, because these engines leave threads running.
    program = tmp_path / "program.py"
    program.write_text(HEAD.format(body=textwrap.indent(ENGINES[engine], " " * 8)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[1.0, 1.0]\n"


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
