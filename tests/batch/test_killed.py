"""Batches whose process is killed or interrupted, and started again: each prompt is in the file once.

In full size:

    BATCH_PROMPTS=100000 BATCH_KILLS=20 pytest -s -o faulthandler_timeout=0 tests/batch/test_killed.py
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.scripts import Script

import tinker_sync
from tinker_sync.testing import LocalServer

PROMPTS = int(os.environ.get("BATCH_PROMPTS", "120"))
KILLS = int(os.environ.get("BATCH_KILLS", "2"))
LARGE = PROMPTS > 1000


@contextmanager
def a_server() -> Iterator[dict[str, str]]:
    """Yield the environment variables that name the server and the model for the processes of a batch.

    All processes use one server. With a large `BATCH_PROMPTS`, each starts its own embedded server.
    """
    if LARGE:
        yield {"TINKER_BASE_URL": "local", "MODEL": "tinker-sync/tiny"}
        return
    with LocalServer(model="tinker-sync/random") as server:
        yield {**server.environment(), "MODEL": "tinker-sync/random"}


def run(server: dict[str, str], path: Path, *more: str) -> subprocess.Popen[str]:
    root, tests = Path(tinker_sync.__file__).parents[1], Path(__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, "-m", "support.long_batch", server["MODEL"], str(path), str(PROMPTS), *more],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(tests)]), **server},
    )


def indexes(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines()]


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
def test_each_prompt_is_in_the_file_once_after_kills_at_random_moments(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    draw = random.Random(7)
    began_s = time.monotonic()
    # One run dies in the middle of a line; the others are killed from outside, between two items or in one.
    with a_server() as server:
        with run(server, path, str(PROMPTS // 8)) as torn:
            torn.communicate()
        assert torn.returncode == -signal.SIGKILL
        assert not path.read_bytes().endswith(b"\n")
        for round_ in range(1, KILLS):
            low, high = round_ * PROMPTS // KILLS, (round_ + 1) * PROMPTS // KILLS
            moment = draw.randrange(low, high)
            with run(server, path) as child:
                assert child.stdout is not None
                for line in child.stdout:
                    if line.strip() == "end" or int(line) >= moment:
                        child.kill()
                        break
        with run(server, path) as last:
            out, _ = last.communicate()
        assert last.returncode == 0
    if LARGE:
        took_s = time.monotonic() - began_s
        sys.stderr.write(f"\n{PROMPTS} prompts, {KILLS} kills, {took_s:.0f} s, {out.splitlines()[-1]}\n")
    assert sorted(indexes(path)) == list(range(PROMPTS))


@pytest.mark.skipif(not LARGE, reason="the memory of a long run is measured with BATCH_PROMPTS=100000")
def test_memory_is_flat(tmp_path: Path) -> None:
    with a_server() as server, run(server, tmp_path / "out.jsonl") as child:
        out, _ = child.communicate()
    word, early_mb, late_mb = out.splitlines()[-1].split()
    sys.stderr.write(f"\n{PROMPTS} prompts: {early_mb} MB after a tenth, {late_mb} MB at the end\n")
    assert word == "end"
    assert int(late_mb) - int(early_mb) < 10


@pytest.mark.skipif(sys.platform == "win32", reason="interrupts by signal")
def test_an_interrupt_leaves_at_once_and_the_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    text = """
        import itertools, os
        service = ServiceClient()
        sampling = service.create_sampling_client(base_model=os.environ["MODEL"])
        prompts = ([1, 2 + n % 7] for n in itertools.count())
        for item in sampling.map(prompts, PARAMS, max_in_flight=8, save_to=os.environ["OUT"]):
            if item.index == 20:
                say("running")
    """
    with a_server() as server, Script(text, **server, OUT=str(path)) as script:
        assert script.hear() == "running"
        script.interrupt()
        ended = script.wait()
    assert ended.code == -signal.SIGINT
    assert ended.err.rstrip().endswith("KeyboardInterrupt")
    found = sorted(indexes(path))
    assert found[:21] == list(range(21))
    assert len(set(found)) == len(found)
