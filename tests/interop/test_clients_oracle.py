"""The service, training and sampling clients send the same requests as the reference client's.

Each package runs one script in its own process, against its own server. The tests compare the results, and
the logs of the servers step by step; `recording.py` lists the permitted differences. Custom losses are
compared if torch is installed. `conftest.py` has everything that depends on the version of the reference
client.

The script leaves out these intended differences of this package:

- A sampler path need not begin with `tinker://` on servers other than the vendor's.
- The page of a training run has an address only at the vendor's service.
- After a training call that could not be sent, later ones fail.
- A `weights_access_token` is sent as it was given, also to a server that exchanges keys for tokens.
- A metric is kept if its reduction is unknown, or if some chunks lack it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen
from interop.conftest import server_settings
from interop.programs import HungError, Programs
from interop.recording import BACKGROUND, RecordingStub, own_rules_broken, steps, without_chance
from support.hasty import FLAGS
from support.tinker_stub import Behaviour, StubServer

SCRIPT = Path(__file__).with_name("acceptance_script.py")
ROOT = SCRIPT.parents[2]
PATIENCE_S = 100.0


@frozen
class Variant:
    """Settings and behaviour of a server, and the names of the scripts that run against it."""

    name: str
    scripts: tuple[str, ...]
    flags: dict[str, Any] = field(factory=dict)
    behaviour: dict[str, Any] = field(factory=dict)

    def server(self) -> StubServer:
        behaviour = Behaviour(config=server_settings({**FLAGS, **self.flags}), hold_s=1.0, **self.behaviour)
        return StubServer(RecordingStub(behaviour))


VARIANTS = [
    Variant(
        "as it is", ("service", "environment", "training", "refusals", "from_state", "sampling", "twins")
    ),
    Variant("parallel chunks", ("training",), {"fwdbwd_max_chunk_len": 2}),
    Variant(
        "serial chunks by size",
        ("training",),
        {"fwdbwd_max_chunk_bytes_count": 100, "parallel_fwdbwd_chunks": False},
    ),
    Variant("compressed", ("training",), {"proto_compress_fwdbwd": True, "fwdbwd_max_chunk_len": 3}),
    Variant(
        "one poll for all samples",
        ("sampling", "twins"),
        {"sample_use_retrieve_futures": True, "sample_join_sampling_session": True},
        {"latency_s": 0.01},
    ),
    Variant("joined copies", ("sampling",), {"sample_join_sampling_session": True}),
    Variant("models from checkpoints at once", ("from_state",), {"create_model_via_load_weights": True}),
    Variant("sizes before results", ("training", "sampling"), behaviour={"metadata_over": 40}),
    Variant("tokens", ("training", "sampling", "twins"), {"pjwt_auth_enabled": True}),
    Variant("tokenizer", ("tokenizer", "service")),
    Variant("a flag of tomorrow", ("training", "sampling"), {"a_flag_of_tomorrow": {"x": 1}}),
    *(
        [
            Variant("losses", ("losses",)),
            Variant("losses in chunks", ("losses",), {"fwdbwd_max_chunk_len": 2}),
            Variant("losses on the server", ("losses",), {"custom_loss_server_side": True}),
        ]
        if importlib.util.find_spec("torch")
        else []
    ),
]


def environment() -> dict[str, str]:
    """Return environment variables without settings of a client, and with this source tree on the path."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TINKER_")}
    return {**kept, "PYTHONPATH": f"{ROOT}{os.pathsep}{SCRIPT.parents[1]}", "TINKER_TELEMETRY": "0"}


def run(programs: Programs, package: str, url: str, *scripts: str, **more: str) -> Any:
    """Run scripts with a package in a new process, and return the results."""
    known = {**environment(), **more}
    return without_chance(programs.results(package, SCRIPT, package, url, *scripts, environment=known))


def recorded(programs: Programs, package: str, variant: Variant) -> tuple[Any, RecordingStub]:
    """Run the scripts of a variant against its server, and return the results and the server.

    The scripts of the reference client run once more when they hang, because its `close` sometimes does. This
    package gets no second chance.
    """
    try:
        return recorded_once(programs, package, variant)
    except HungError as hung:
        if package == "tinker_sync":
            raise
        programs.remarks.append(str(hung))
        return recorded_once(programs, package, variant)


def recorded_once(programs: Programs, package: str, variant: Variant) -> tuple[Any, RecordingStub]:
    with variant.server() as stub:
        try:
            return run(programs, package, stub.url, *variant.scripts), stub
        except HungError as hung:
            known = [each for each in stub.recorded if not each[1].path.endswith(BACKGROUND)]
            last = [f"{step} {asked.path}, answered {told}\n" for step, asked, told in known[-5:]]
            raise HungError(f"{variant.name}: {hung}\nlast requests:\n{''.join(last)}") from None


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda variant: variant.name)
def runs(
    request: pytest.FixtureRequest, programs: Programs
) -> Iterator[dict[str, tuple[Any, RecordingStub]]]:
    """Run a variant with both clients, and yield the results and the server of each package."""
    with ThreadPoolExecutor(2) as pool:
        flights = {
            package: pool.submit(recorded, programs, package, request.param)
            for package in ("tinker", "tinker_sync")
        }
        yield {package: flight.result() for package, flight in flights.items()}


def test_results(runs: dict[str, tuple[Any, RecordingStub]]) -> None:
    theirs, ours = dict(runs["tinker"][0]), dict(runs["tinker_sync"][0])
    assert len(theirs) == len(runs["tinker"][0]) > 5
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name] == value, name


def test_requests(runs: dict[str, tuple[Any, RecordingStub]]) -> None:
    theirs, ours = steps(runs["tinker"][1]), steps(runs["tinker_sync"][1])
    assert len(theirs) > 4
    assert sorted(ours) == sorted(theirs)
    for step, requests in theirs.items():
        assert ours[step] == requests, step


def test_rules_of_its_own(runs: dict[str, tuple[Any, RecordingStub]]) -> None:
    assert list(own_rules_broken(runs["tinker_sync"][1])) == []


@pytest.mark.parametrize(("maker", "user"), [("tinker", "tinker_sync"), ("tinker_sync", "tinker")])
def test_handles_go_from_one_client_to_the_other(programs: Programs, maker: str, user: str) -> None:
    if user == "tinker" and version("tinker") < "0.38":
        pytest.skip("before 0.38 the reference client reads no handle that names its base model")
    server = VARIANTS[0].server()
    with server as stub, a_handle(maker, stub.url) as handle:
        results = dict(run(programs, user, stub.url, "foreign_handle", A_HANDLE=handle))
        sampled = results["foreign handle.sample"]["sequences"][0]
        assert (sampled["tokens"], sampled["sequence_id"]) == (
            [6, 7, 8],
            "session-0:sample:0:some block + 0:0",
        )
        assert results["foreign handle.base model"] == "stub/model"
        assert len(stub.asked("/client/config")) == 1  # by the maker; the user has the settings in the handle


@contextlib.contextmanager
def a_handle(package: str, url: str) -> Iterator[str]:
    """Yield a handle of a sampling client that lives until the end of the `with` block."""
    command = [sys.executable, str(SCRIPT), package, url, "a_handle"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()
            assert process.wait(PATIENCE_S) == 0


def test_a_program_that_hangs_is_ended_and_tells_where(programs: Programs) -> None:
    text = "import time\ndef stuck():\n    time.sleep(1000)\nstuck()"
    with pytest.raises(HungError, match=r"(?s)a program x hangs with tinker_sync.* in stuck\n"):
        programs.results("tinker_sync", text, "x", patience_s=1)
    assert programs.results("tinker_sync", "print(7)") == 7
