"""The command line prints exactly the same JSON as that of the reference client, on the same embedded server.

Some intended differences are not compared: `version` names this package; `auth status` has a JSON form only
here; the texts for people; the exit code if some deletions failed; checkpoints for sampling, which only this
package downloads and uploads; the text of the uploaded README.md.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from interop.conftest import shared_print
from interop.programs import Programs
from support.cli_runs import Run, runner
from support.cli_world import KEY, World
from support.file_server import Content, FileServer
from support.hub import TOKEN, Hub, Repository
from support.tinker_stub import Answer, StubServer

import tinker_sync
from tinker_sync.testing import FaultPlan, LocalServer, faults
from tinker_sync.types import Datum, ModelInput, SamplingParams

SCRIPT = Path(__file__).with_name("cli_script.py")
MODEL = "tinker-sync/random"

Theirs = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def server() -> Iterator[LocalServer]:
    with LocalServer(model=MODEL, pjwt_auth_enabled=True) as server:
        yield server


@pytest.fixture
def run_id(server: LocalServer) -> str:
    """Return the id of a run with checkpoints of every kind. The server has another run too, and usage."""
    with server.service(user_metadata={"purpose": "naïve"}) as service:
        other = service.create_lora_training_client(MODEL, rank=4)
        other.save_state("first").result(120)
        training = service.create_lora_training_client(MODEL, rank=2, user_metadata={"who": "ada"})
        datum = Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4], "weights": [1, 1, 1]})
        training.forward_backward([datum], "cross_entropy").result(120)
        for name in ("a", "b", "c", "d", "e", "f"):
            training.save_state(name, ttl_seconds=7200 if name == "b" else None).result(120)
        training.save_weights_for_sampler("s").result(120)
        training.save_weights_external("x").result(120)
        sampling = training.save_weights_and_get_sampling_client()
        sampling.sample(ModelInput.from_ints([1, 2]), 1, SamplingParams(max_tokens=3)).result(120)
        return training.model_id


@pytest.fixture
def settings(server: LocalServer, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", server.key)


@pytest.fixture
def ours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def theirs(programs: Programs) -> Theirs:
    """Return a function that runs the command line of the reference client."""

    def run(*lines: tuple[str, ...], typed: str = "") -> list[dict[str, Any]]:
        return apart(programs, "tinker", *lines, typed=typed)

    return run


def apart(programs: Programs, package: str, *lines: tuple[str, ...], typed: str = "") -> list[dict[str, Any]]:
    """Run command lines of a client in a separate process. Return the exit code and output of each."""
    ended: list[dict[str, Any]] = programs.results(
        package,
        SCRIPT if package == "tinker" else OWN,
        typed=json.dumps([[list(line), typed] for line in lines]),
        environment={**os.environ, "TINKER_TELEMETRY": "0"},
    )
    return ended


# This package's command line also runs in a separate process, because huggingface_hub reads its settings when
# it is imported.
OWN = """
import contextlib, io, json, sys
from tinker_sync.cli import main
ended = []
for arguments, _ in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    ended.append({"code": code, "out": out.getvalue(), "problem": err.getvalue()})
json.dump(ended, sys.stdout)
"""


def hours() -> tuple[str, str]:
    now = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    return tuple(f"{now + timedelta(hours=away):%Y-%m-%dT%H:00:00Z}" for away in (-1, 2))  # type: ignore[return-value]


def test_what_only_reads_prints_the_same(settings: None, run_id: str, ours: Run, theirs: Theirs) -> None:
    path = f"tinker://{run_id}"
    lines = [
        ("run", "list"),
        ("run", "list", "--limit", "1"),
        ("run", "list", "--limit", "0", "-c", "id,owner"),
        ("run", "info", run_id),
        ("checkpoint", "list"),
        ("checkpoint", "list", "--limit", "3"),
        ("checkpoint", "list", "--run-id", run_id),
        *(("checkpoint", "info", f"{path}/{name}") for name in ("weights/b", "sampler_weights/s")),
        ("checkpoint", "info", f"{path}/external_weights/x"),
        ("model", "list"),
        ("model", "list", "RANDOM"),
        ("auth", "whoami"),
        ("billing", "usage", *hours()),
        ("billing", "usage", *hours(), "--csv", "-"),
        ("billing", "usage", *hours(), "--sessions-csv", "-"),
        ("billing", "checkpoint-storage"),
        ("billing", "checkpoint-storage", "--csv", "-"),
        ("session", "export-trace", run_id.partition(":")[0], "--url-only"),
    ]
    check_that_both_print(lines, ours, theirs)


def check_that_both_print(lines: list[tuple[str, ...]], ours: Run, theirs: Theirs) -> None:
    """Check that both clients print the same JSON, with the option at the beginning and at the end."""
    reference = theirs(*[("--format", "json", *line) for line in lines])
    for line, expected in zip(lines, reference, strict=True):
        assert expected["code"] == 0, (line, expected)
        for place in (("--format", "json", *line), (*line, "-f", "json")):
            own = ours(*place)
            assert unsigned(shared_print(own.out)) == unsigned(expected["out"]), line
            assert own.code == 0


def unsigned(text: str) -> str:
    """Return an output without the parts that depend on the time: signatures, and the costs of storage."""
    plain = text.partition("?")[0] if '"url"' in text else text.replace("\r\n", "\n")
    return re.sub(r"\b\d(\.\d+)?e-\d+\b", "LITTLE", plain)


def test_what_changes_something_does_the_same(
    settings: None, server: LocalServer, run_id: str, ours: Run, theirs: Theirs
) -> None:
    """Each client changes its own checkpoint, and the checkpoints then are in the same state."""
    path = f"tinker://{run_id}/weights"
    for verb, options, what, before, after in (
        ("publish", (), "public", False, True),
        ("unpublish", (), "public", True, False),
        ("set-ttl", ("--ttl", "7200"), "expires_at", None, "set"),
        ("set-ttl", ("--remove",), "expires_at", "set", None),
    ):
        assert [state(server, f"{path}/{name}", what) for name in "ac"] == [before, before]
        [expected] = theirs(("-f", "json", "checkpoint", verb, f"{path}/a", *options))
        own = ours("-f", "json", "checkpoint", verb, f"{path}/c", *options)
        assert (own.code, own.out) == (expected["code"], expected["out"]) == (0, "")
        assert [state(server, f"{path}/{name}", what) for name in "ac"] == [after, after]
    [expected] = theirs(("-f", "json", "checkpoint", "delete", "--yes", f"{path}/d"))
    own = ours("-f", "json", "checkpoint", "delete", "--yes", f"{path}/e")
    assert own.out == expected["out"]
    [declined] = theirs(("checkpoint", "delete", f"{path}/f"), typed="n\n")
    assert ours("checkpoint", "delete", f"{path}/f", stdin="n\n").code == declined["code"] == 0
    with server.service() as service:
        left = {
            each.checkpoint_id for each in tinker_sync.RestClient(service.holder).iter_checkpoints(run_id)
        }
    assert {"weights/f"} <= left
    assert not {"weights/d", "weights/e"} & left


def state(server: LocalServer, path: str, what: str) -> object:
    with server.service() as service:
        rest = tinker_sync.RestClient(service.holder)
        found = next(each for each in rest.iter_checkpoints(path.split("/")[2]) if each.tinker_path == path)
    value = getattr(found, what)
    return "set" if isinstance(value, datetime) else value


def test_failures_of_a_deletion_are_listed_alike(
    settings: None, run_id: str, ours: Run, theirs: Theirs
) -> None:
    path = f"tinker://{run_id}/weights/none"
    [expected] = theirs(("-f", "json", "checkpoint", "delete", "-y", path))
    own = ours("-f", "json", "checkpoint", "delete", "-y", path)
    trees = [json.loads(text) for text in (own.out, expected["out"])]
    assert [tree["deleted_count"] for tree in trees] == [0, 0]
    assert [[each["tinker_path"] for each in tree["failed"]] for tree in trees] == [[path], [path]]
    assert (own.code, expected["code"]) == (3, 0)


def test_what_fails_fails_in_both(settings: None, run_id: str, ours: Run, theirs: Theirs) -> None:
    lines = [
        ("run", "info", "no-such-run"),
        ("checkpoint", "info", "run-1/weights/a"),
        ("checkpoint", "info", f"tinker://{run_id}/weights/none"),
        ("checkpoint", "publish", f"tinker://{run_id}/weights/none"),
        ("model", "list", "no-such-model"),
        ("billing", "usage", "yesterday", "today"),
        ("frobnicate",),
        ("run", "info"),
        ("run", "list", "--frobnicate"),
    ]
    codes = [each["code"] for each in theirs(*lines)]
    assert [ours(*line).code for line in lines] == codes
    assert set(codes) == {1, 2}


def test_the_trace_is_the_same_file(
    settings: None, run_id: str, ours: Run, tmp_path: Path, theirs: Theirs
) -> None:
    line = ("-f", "json", "session", "export-trace", run_id.partition(":")[0], "-o")
    their_file, our_file = tmp_path / "theirs", tmp_path / "ours"
    outs = theirs((*line, str(their_file)))[0]["out"], ours(*line, str(our_file)).out
    for out, target in zip(outs, (their_file, our_file), strict=True):
        assert json.loads(out)["file_size_bytes"] == target.stat().st_size
    assert outs[0].replace(str(their_file), "FILE") == outs[1].replace(str(our_file), "FILE")
    assert their_file.read_bytes() == our_file.read_bytes()


def test_downloads_are_the_same_files(
    settings: None, run_id: str, ours: Run, tmp_path: Path, theirs: Theirs
) -> None:
    for name, others in (("external_weights/x", ()), ("weights/a", ("--force",))):
        path, made = f"tinker://{run_id}/{name}", []
        for who in ("theirs", "ours"):
            line = ("-f", "json", "checkpoint", "download", path, "-o", str(tmp_path / who), *others)
            out = theirs(line)[0]["out"] if who == "theirs" else ours(*line).out
            target = Path(json.loads(out)["destination"])
            held = {each.name: each.read_bytes() for each in target.iterdir()}
            made.append((out.replace(f"/{who}/", "/"), target.name, held))
        assert made[0] == made[1]
        assert len(made[0][2]) >= 2


@pytest.fixture
def hub_settings(settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")  # another upload protocol, which is not under test
    for name in ("DISABLE_TELEMETRY", "DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(f"HF_HUB_{name}", "1")
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)


Pushed = tuple[list[dict[str, Any]], Hub]


@pytest.fixture
def push(
    hub_settings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: Programs
) -> Callable[..., tuple[Pushed, Pushed]]:
    """Return a function that runs `push-hf` lines with both clients, each with its own hub.

    It returns the outcomes of the lines and the hub, for the reference client and for this package.
    """

    def run(*lines: tuple[str, ...], easy: bool = False) -> tuple[Pushed, Pushed]:
        return one("tinker", *lines, easy=easy), one("tinker_sync", *lines, easy=easy)

    def one(package: str, *lines: tuple[str, ...], easy: bool) -> Pushed:
        with Hub(easy=easy) as hub:
            hub.repositories["ada/branched"] = Repository(branches={"main": {}, "dev": {}})
            monkeypatch.setenv("HF_ENDPOINT", hub.url)
            monkeypatch.setenv("HF_HOME", str(tmp_path / f"{package}-{easy}"))
            whole = [("-f", "json", "checkpoint", "push-hf", *line) for line in lines]
            return apart(programs, package, *whole), hub

    return run


def arrived(hub: Hub) -> list[dict[str, Any]]:
    """Return the commits of a hub, with only the metadata of README.md, because its text differs."""
    return [{**each, "files": {**each["files"], **cards(each["files"])}} for each in hub.commits]


def cards(files: dict[str, bytes]) -> dict[str, list[str]]:
    return {
        name: content.decode().split("---\n")[1].splitlines()
        for name, content in files.items()
        if name == "README.md"
    }


def test_the_same_arrives_at_the_hub(push: Callable[..., tuple[Pushed, Pushed]], run_id: str) -> None:
    external, training = (f"tinker://{run_id}/{name}" for name in ("external_weights/x", "weights/a"))
    everything = ("--public", "--commit-message", "naïve", "--create-pr", "--no-model-card")
    some = ("--allow-pattern", "*.json", "--allow-pattern", "check*", "--ignore-pattern", "README*")
    lines = {
        (external, "-r", "ada/one"): 0,
        (external, "-r", "ada/one", "--public"): 0,
        (training, "-r", "ada/one"): 1,  # the repository has another checkpoint
        (training, "-r", "ada/two", *everything): 0,
        (external, "-r", "ada/three", *some): 0,
        (external, "-r", "ada/four", "--ignore-pattern", "*.json"): 0,
        (external, "-r", "ada/branched", "--revision", "dev"): 0,
        (training, "-r", "ada/branched"): 0,
        (f"tinker://{run_id}/external_weights/none", "-r", "ada/five"): 1,
        ("weights/a",): 1,
    }
    (reference, their_hub), (own, our_hub) = push(*lines)
    for line, expected, ran in zip(lines, reference, own, strict=True):
        assert (expected["code"], ran["code"]) == (lines[line], lines[line]), (line, expected, ran)
        assert ran["out"] == expected["out"], line
        assert bool(ran["out"]) is (lines[line] == 0)
    assert arrived(our_hub) == arrived(their_hub)
    assert [each for each in our_hub.asked if "/revision/" not in each] == their_hub.asked
    assert {name: each.private for name, each in our_hub.repositories.items()} == {
        name: each.private for name, each in their_hub.repositories.items()
    }
    held = {name: set(each.branches["main"]) for name, each in our_hub.repositories.items()}
    assert held["ada/one"] >= {"README.md", "adapter_config.json", "adapter_model.safetensors"}


class Given(Content):
    """The content of a file, given as bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__(len(data))
        self._data = data

    def pieces(self, begin: int, end: int) -> Iterator[bytes]:
        yield self._data[begin:end]


ADAPTER = {
    "adapter_config.json": b'{"r": 2, "base_model_name_or_path": null}',
    "adapter_model.bin": b"\0" * 99,
}


@contextmanager
def exported(server: LocalServer, files: dict[str, bytes], plan: FaultPlan) -> Iterator[None]:
    """Let the server answer with addresses of these files when a client downloads an export.

    `plan` has the other faults of the server.
    """
    with FileServer({name: Given(data) for name, data in files.items()}, life_s=3600.0) as store:
        until = datetime.now(timezone.utc) + timedelta(hours=1)
        answer = {"urls": {name: store.sign(name) for name in files}, "expires": until.isoformat()}
        server.plan = plan.on(
            "get_external_weights_urls",
            faults.FixedReply(200, json.dumps(answer).encode(), "application/json"),
        )
        yield


def test_what_an_export_lacks_or_has_too_much_is_treated_alike_on_the_way_to_the_hub(
    push: Callable[..., tuple[Pushed, Pushed]], server: LocalServer, run_id: str
) -> None:
    path, whole = f"tinker://{run_id}/external_weights/x", {**ADAPTER, "checkpoint_complete": b"yes"}
    lines = [
        (path, "-r", "ada/one"),
        (path, "-r", "ada/two", "--ignore-pattern", "*.md"),
        (path, "-r", "ada/three", "--allow-pattern", "check*"),
    ]
    encrypted = {"adapter_config.json": b"{}", "adapter_model.safetensors.age": b"?"}
    for files, code in (
        ({**whole, "README.md": b"Mine.\n"}, 0),
        (encrypted, 1),
        ({"adapter_model.bin": b""}, 1),
    ):
        with exported(server, files, FaultPlan()):
            (reference, their_hub), (own, our_hub) = push(*lines)
        for expected, ran in zip(reference, own, strict=True):
            assert (ran["code"], ran["out"]) == (expected["code"], expected["out"])
            assert ran["code"] == code, ran
        assert our_hub.commits == their_hub.commits
        assert our_hub.asked == their_hub.asked
        held = {each["to"]: set(each["files"]) for each in our_hub.commits}
        if code:
            assert held == {}
            continue
        one, two, three = {*ADAPTER, "README.md"}, set(ADAPTER), {"checkpoint_complete"}
        assert held == {"ada/one": one, "ada/two": two, "ada/three": three}
        config = json.loads(our_hub.commits[0]["files"]["adapter_config.json"])
        assert config == {"base_model_name_or_path": MODEL, "r": 2}


def test_both_write_the_same_credentials_file(
    ours: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, theirs: Theirs
) -> None:
    with StubServer(World()) as stub:
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)  # type: ignore[attr-defined]
        files = {}
        for name in ("theirs", "ours"):
            home = tmp_path / name
            home.mkdir()
            monkeypatch.setenv("HOME", str(home))
            if name == "theirs":
                assert theirs(("auth", "login"), typed=f"{KEY}\n")[0]["code"] == 0
            else:
                assert ours("auth", "login", stdin=f"{KEY}\n").code == 0
            path = home / ".tinker" / "credentials.json"
            files[name] = (json.loads(path.read_text()), path.stat().st_mode, path.parent.stat().st_mode)
        assert files["ours"] == files["theirs"]
        # Each client can delete the key that the other has stored.
        monkeypatch.setenv("HOME", str(tmp_path / "theirs"))
        assert ours("auth", "logout").code == 0
        monkeypatch.setenv("HOME", str(tmp_path / "ours"))
        assert theirs(("auth", "logout"))[0]["code"] == 0
        left = [json.loads((tmp_path / name / ".tinker" / "credentials.json").read_text()) for name in files]
        assert left[0] == left[1] == {"version": 1, "keys": {}}


def test_costs_and_unusual_values_print_the_same(
    ours: Run, monkeypatch: pytest.MonkeyPatch, theirs: Theirs
) -> None:
    """A stub sends prices, fractions of seconds and nulls, which the embedded server never sends."""
    with StubServer(World()) as stub:
        monkeypatch.setenv("TINKER_BASE_URL", stub.url)  # type: ignore[attr-defined]
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        world: Any = stub
        run = world.runs[0]["training_run_id"]
        window = ("2026-03-01T09:00:00Z", "2026-03-01T10:00:00Z")
        lines = [
            ("run", "list"),
            ("run", "info", run),
            ("checkpoint", "list"),
            ("checkpoint", "info", f"tinker://{run}/sampler_weights/step-0100"),
            ("billing", "usage", *window),
            ("billing", "usage", *window, "--csv", "-"),
            ("billing", "usage", *window, "--sessions-csv", "-"),
            ("billing", "checkpoint-storage"),
            ("billing", "checkpoint-storage", "--csv", "-"),
            ("auth", "whoami"),
            ("model", "list"),
        ]
        check_that_both_print(lines, ours, theirs)
        stub.script("/checkpoints", Answer(body={"checkpoints": []}))
        [expected] = theirs(("-f", "json", "checkpoint", "list"))
        stub.script("/checkpoints", Answer(body={"checkpoints": []}))
        assert ours("-f", "json", "checkpoint", "list").out == expected["out"]
