"""`base_url="local"` in separate programs: exits, signals, forked and spawned children."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from support.clock import PATIENCE_S
from support.scripts import UNHURRIED
from support.served import served

import tinker_sync
from tinker_sync.local.store import Store

ROOT = Path(tinker_sync.__file__).parents[1]
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="has no fork")


@contextmanager
def program(directory: Path, code: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program as a process until the end of the block, and yield the process."""
    path = directory / "program.py"
    path.write_text(textwrap.dedent(code), encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watchdog = threading.Timer(PATIENCE_S * 4, process.kill)
    watchdog.start()
    try:
        with process:
            yield process
    finally:
        watchdog.cancel()
        process.kill()


def finish(process: subprocess.Popen[str]) -> list[str]:
    """Wait for the end of a process, which must succeed without error output. Return the output's words."""
    output, errors = process.communicate(timeout=PATIENCE_S * 2)
    assert process.returncode == 0, errors
    assert errors == ""
    return output.split()


def await_gone(pid: int, place: Path) -> None:
    never = threading.Event()
    for _ in range(int(PATIENCE_S * 100)):
        if not Path(f"/proc/{pid}").exists() and not place.exists():
            return
        never.wait(0.01)
    raise AssertionError(f"{pid} still runs, or {place} is still there")


SHOW = """
import json, os, sys, threading
from tinker_sync import ServiceClient, _embedded
from tinker_sync.local import launch

def shown():
    server = _embedded.current_server()
    port = int(server.base_url.rpartition(":")[2])
    return json.dumps({"pid": server.pid, "url": server.base_url, "place": str(launch.locate(port))})
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks at processes")
@pytest.mark.parametrize("how", ["killed", "ends"])
def test_the_server_ends_with_its_owner(tmp_path: Path, how: str) -> None:
    code = f"""{SHOW}{UNHURRIED}
client = ServiceClient(base_url="local")
training = client.create_lora_training_client("tinker-sync/tiny", rank=2)
training.save_state("kept").result()
print(shown().replace(" ", ""), flush=True)
sys.stdin.readline()
"""
    with program(tmp_path, code, TINKER_LOCAL_DATA_DIR=str(tmp_path / "data")) as process:
        assert process.stdout is not None
        server = json.loads(process.stdout.readline() or "{}")
        assert Path(f"/proc/{server['pid']}").exists()
        if how == "killed":
            process.kill()
            process.wait(PATIENCE_S)
        else:
            assert finish(process) == []
        await_gone(server["pid"], Path(server["place"]))
    with Store(tmp_path / "data") as store:
        [session] = store.list_sessions(10, 0)[0]
        # A program that ends closes its session while the server still listens.
        status: Any = store.session(session).status
        assert status.type == ("active" if how == "killed" else "client_finished")
        assert how == "killed" or status.reason.type == "success"
        [run] = store.session_runs(session)
        [row] = store.list_checkpoints(run)
        assert store.load_checkpoint(run, row.checkpoint_type, "kept")


def test_a_program_that_was_killed_at_work_goes_on_at_once_when_it_is_started_again(tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    work = """
from tinker_sync import Datum, ModelInput, ServiceClient
client = ServiceClient(base_url="local")
training = client.create_lora_training_client("tinker-sync/tiny", rank=2)
print(training.save_state("kept").result().path, flush=True)
datum = Datum(ModelInput.from_ints([5] * 500), {"target_tokens": [5] * 500})
passes = [training.forward_backward([datum] * number, "cross_entropy") for number in (1, *[64] * 10)]
passes[0].result()
print("at work", flush=True)
passes[-1].result()
"""
    with program(tmp_path, work, **at_home(tmp_path)) as process:
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        assert process.stdout.readline() == "at work\n"
        resume = f"import tinker_sync.clients.service\nprint(flush=True)\ninput()\n{LOAD}"
        with program(tmp_path / "again", resume, **at_home(tmp_path)) as second:
            assert second.stdout is not None
            second.stdout.readline()  # it is ready, so that little time passes between the two servers
            process.kill()
            process.wait(PATIENCE_S)
            assert second.communicate("\n", timeout=PATIENCE_S * 2) == (f"{path} 2\n", "")


SAVE = """
import sys
from tinker_sync import ServiceClient
with ServiceClient(base_url=sys.argv[1] if len(sys.argv) > 1 else "local") as client:
    training = client.create_lora_training_client("tinker-sync/tiny", rank=2)
    print(training.save_state("kept").result().path)
"""
LOAD = """
from tinker_sync import ServiceClient
with ServiceClient(base_url="local") as client:
    for found in client.create_rest_client().list_user_checkpoints().result().checkpoints:
        path = found.tinker_path
        print(path, client.create_training_client_from_state(path).get_info().lora_rank)
"""


def at_home(home: Path) -> dict[str, str]:
    """Return the environment of a user who has set nothing."""
    return {"HOME": str(home), "USERPROFILE": str(home), "TINKER_LOCAL_DATA_DIR": ""}


def test_a_later_program_finds_the_checkpoints_of_an_earlier_one(tmp_path: Path) -> None:
    environment = at_home(tmp_path)
    with program(tmp_path, SAVE, **environment) as process:
        [path] = finish(process)
    with program(tmp_path, LOAD, **environment) as process:
        assert finish(process) == [path, "2"]
    assert (tmp_path / ".tinker" / "local" / "state.sqlite").exists()


def test_a_program_says_that_its_server_has_deleted_old_checkpoints(tmp_path: Path) -> None:
    with program(tmp_path, SAVE, **at_home(tmp_path)) as process:
        finish(process)
    with closing(sqlite3.connect(tmp_path / ".tinker" / "local" / "state.sqlite")) as database, database:
        database.execute("UPDATE checkpoints SET size_bytes = ?", (5 << 30,))
    with program(tmp_path, LOAD, **at_home(tmp_path)) as process:
        output, errors = process.communicate(timeout=PATIENCE_S * 2)
    assert (process.returncode, output) == (0, "")
    assert "had more than 4 GiB of checkpoints, so the oldest were deleted: 1; to keep all" in errors


@pytest.mark.parametrize("why", ["another server", "not a directory"])
def test_a_home_that_cannot_be_used_gives_a_warning_and_a_temporary_one(tmp_path: Path, why: str) -> None:
    home = tmp_path / ".tinker" / "local"
    if why == "another server":
        used: Any = Store(home)
    else:
        (tmp_path / ".tinker").touch()
        used = nullcontext()
    with used, program(tmp_path, SAVE, **at_home(tmp_path)) as process:
        output, errors = process.communicate(timeout=PATIENCE_S * 2)
    assert (process.returncode, output[:9]) == (0, "tinker://"), errors
    assert "checkpoints of this program's embedded server end with it" in errors
    assert "local:PATH" in errors
    if why == "another server":
        assert list((home / "checkpoints").iterdir()) == []


def test_a_program_uses_the_server_that_its_user_has_started(tmp_path: Path) -> None:
    environment = at_home(tmp_path)
    with (
        served(**environment) as (_, url),
        program(
            tmp_path,
            f"{SAVE}\nprint(client.holder.settings.base_url)",
            **environment,
        ) as process,
    ):
        path, used = finish(process)
    assert used == url
    with Store(tmp_path / ".tinker" / "local") as store:
        assert [row.tinker_path for row in store.list_user_checkpoints(10, 0)[0]] == [path]


@needs_fork
def test_forked_children_share_a_server_that_had_not_started(tmp_path: Path) -> None:
    code = f"""{SHOW}
import threading
client = ServiceClient(base_url="local")
children = []
for number in range(2):
    child = os.fork()
    if child == 0:
        client.get_server_capabilities()
        again = ServiceClient(base_url="local")
        again.get_server_capabilities()
        same = again.holder.settings.base_url == client.holder.settings.base_url
        again.close().result()
        client.close().result()
        # In one write: the other child prints at the same time.
        shared = same and _embedded.current_server().pid is None
        print("shared\\n" if shared else "apart\\n", end="", flush=True)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
client.get_server_capabilities()  # what children close is closed for them alone
print("alive" if _embedded.current_server().running else "gone")
client.close().result()
"""
    with program(tmp_path, code) as process:
        assert finish(process) == ["shared", "shared", "alive"]


@needs_fork
def test_a_forked_child_starts_its_own_server_after_the_parent_closed(tmp_path: Path) -> None:
    code = f"""{SHOW}
from tinker_sync import APIConnectionError
client = ServiceClient(base_url="local")
client.get_server_capabilities()
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.close(writer)
    os.read(reader, 1)  # until the parent has closed
    try:
        client.get_server_capabilities()
    except APIConnectionError as error:
        print("refused" if "belongs to the process" in str(error) else error, flush=True)
    with ServiceClient(base_url="local") as own:
        own.get_server_capabilities()
        print("own" if _embedded.current_server().running else "none", flush=True)
    os._exit(0)
client.close().result()
print("stopped" if not _embedded.current_server().running else "runs", flush=True)
os.close(writer)
os.waitpid(child, 0)
"""
    with program(tmp_path, code) as process:
        assert finish(process) == ["stopped", "refused", "own"]


def test_spawned_children_share_the_server_and_use_pickled_clients(tmp_path: Path) -> None:
    code = f"""{SHOW}
import multiprocessing

def work(sampler, url, path):
    sampler.get_base_model()
    with ServiceClient(base_url="local") as client:
        same = client.holder.settings.base_url == url
        client.create_training_client_from_state(path)
    return "shared" if same else "apart"

if __name__ == "__main__":
    with ServiceClient(base_url="local") as client:
        training = client.create_lora_training_client("tinker-sync/tiny", rank=2)
        path = training.save_state("one").result().path
        sampler = client.create_sampling_client(base_model="tinker-sync/tiny")
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(pool.apply(work, (sampler, client.holder.settings.base_url, path)), flush=True)
            pool.close()
            pool.join()
        client.get_server_capabilities()
        print("alive")
"""
    with program(tmp_path, code) as process:
        assert finish(process) == ["shared", "alive"]


def test_ctrl_c_reaches_the_program_and_not_its_server(tmp_path: Path) -> None:
    code = f"""{SHOW}
client = ServiceClient(base_url="local")
client.create_lora_training_client("tinker-sync/tiny", rank=2).result()
try:
    print("ready", flush=True)
    while True:
        threading.Event().wait(0.1)  # a longer wait may begin just after the signal, which it would miss
except KeyboardInterrupt:
    client.close("interrupted").result()
"""
    with program(tmp_path, code, TINKER_LOCAL_DATA_DIR=str(tmp_path / "data")) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        assert finish(process) == []
    with Store(tmp_path / "data") as store:
        [session] = store.list_sessions(10, 0)[0]
        status: Any = store.session(session).status
        assert status.reason.type == "interrupted"
