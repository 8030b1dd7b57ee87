"""A large archive over broken connections, from a server that dies, into a process that is killed.

By default the archive has 20 MB, and the connection is cut after every 0.5 MB. With `DOWNLOAD_MB=2000` it has
2 GB, with a cut after every 50 MB. `-s` shows figures.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.file_server import Tar

MEGABYTES = int(os.environ.get("DOWNLOAD_MB", "20"))
SIZE = MEGABYTES * 1_000_000
LIMIT_S = 60 + MEGABYTES
TESTS = Path(__file__).parents[1]

# The process that downloads prints the result and its peak memory.
CLIENT = """
import json, sys
import tinker_sync
from tinker_sync.transport.files import file

def peak_bytes():  # not getrusage: that counts the process this one was forked from
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

url, to, every_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
file.SAVE_EVERY_S = every_s
rest = tinker_sync.RestClient(base_url=url, api_key="tml-large")
got = rest.download_checkpoint("tinker://run/sampler_weights/large", to).result()
print(json.dumps({
    "files": [[file.name, file.size_bytes] for file in got.files],
    "bytes_resumed": got.bytes_resumed,
    "interruptions": got.interruptions,
    "peak_bytes": peak_bytes(),
}))
"""


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environ)
    with process:
        try:
            yield process
        finally:
            process.kill()


def server(port: int = 0, **behaviour: Any) -> Any:
    options = {
        "files": {"archive": SIZE},
        "cut": SIZE // 40,
        "life_s": 1.5,
        "uses": 12,
        "port": port,
        **behaviour,
    }
    return started("-m", "support.file_server", json.dumps(options))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_archive_survives_cuts_and_kills(tmp_path: Path) -> None:
    began_at = time.monotonic()
    to = tmp_path / "out"
    every_s = "0.02" if MEGABYTES < 100 else "1.0"  # a small download ends before the first save
    with server(dies_after=SIZE // 4) as first:
        port = int(first.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        with started("-c", CLIENT, url, str(to), every_s) as client:
            assert first.wait(LIMIT_S) == 3
            with server(port, halts_after=SIZE // 4) as second:
                assert int(second.stdout.readline()) == port
                assert second.stdout.readline() == "halted\n"
                client.send_signal(signal.SIGKILL)
                assert client.wait(120) == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["out.partial"]
    with server(port) as third:
        assert int(third.stdout.readline()) == port
        with started("-c", CLIENT, url, str(to), every_s) as client:
            output, _ = client.communicate(timeout=LIMIT_S)
            assert client.returncode == 0
    got = json.loads(output)
    took_s = time.monotonic() - began_at
    print(f"\n{MEGABYTES} MB in {took_s:.1f} s: {got}")  # noqa: T201  # the figures, shown with -s
    assert got["files"] == [["adapter_model.safetensors", SIZE]]
    assert got["bytes_resumed"] > SIZE // 5
    assert got["interruptions"] >= 10
    assert got["peak_bytes"] < 100_000_000
    assert sum_of(to / "adapter_model.safetensors") == Tar(SIZE).inner.sum("sha256")
    assert os.listdir(tmp_path) == ["out"]


def sum_of(path: Path) -> bytes:
    summed = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            summed.update(piece)
    return summed.digest()
