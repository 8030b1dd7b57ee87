"""`checkpoint download`, `push-hf` and `session export-trace`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.cli_runs import Run
from support.cli_world import World
from support.tinker_stub import Answer

from tinker_sync.cli.output import Progress
from tinker_sync.testing import FaultPlan, LocalServer, faults

MODEL = "tinker-sync/random"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalServer]:
    with LocalServer(model=MODEL) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        yield server


@pytest.fixture
def paths(server: LocalServer) -> tuple[str, str]:
    """Save two checkpoints of a model, one for training and an export. Return their paths in this order."""
    with server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=2).result()
        return training.save_state("a").result(120).path, training.save_weights_external("x").result(120).path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def files(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir()}


def test_download(run: Run, paths: tuple[str, str], folder: Path) -> None:
    for path in paths:
        target = folder / path.removeprefix("tinker://").replace("/", "_")
        done = run("checkpoint", "download", path, "-f", "json")
        assert done.code == 0, done.err
        assert {"adapter_config.json", "adapter_model.safetensors"} <= files(target)
        size = sum(each.stat().st_size for each in target.iterdir())
        assert done.json == {"checkpoint_path": path, "destination": str(target), "file_size_bytes": size}
    # The temporary export of the training checkpoint is gone.
    listed = run("checkpoint", "list", "-f", "json").json["checkpoints"]
    assert {each["tinker_path"] for each in listed} == set(paths)


def test_an_existing_directory_needs_force(run: Run, paths: tuple[str, str], folder: Path) -> None:
    line = ("checkpoint", "download", paths[1], "-o", "models")
    assert "Saved to" in run(*line).out
    [target] = (folder / "models").iterdir()
    (target / "mine").write_text("kept")
    again = run(*line)
    assert again.code == 1
    assert "Give --force" in again.err
    assert (target / "mine").exists()
    assert run(*line, "--force").code == 0
    assert not (target / "mine").exists()
    assert files(folder / "models") == {target.name}


def test_failure_leaves_nothing(run: Run, server: LocalServer, paths: tuple[str, str], folder: Path) -> None:
    server.plan = FaultPlan().on("get_external_weights_urls", faults.status(403))
    done = run("checkpoint", "download", paths[1])
    assert done.code == 1
    assert not any(not name.endswith(".partial") for name in files(folder))
    missing = run("checkpoint", "download", paths[1].replace("/x", "/none"))
    assert missing.code == 1


class Hub:
    """A double of `huggingface_hub.HfApi`, with the methods that `push-hf` calls. It records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.branches = {"main"}
        self.problem: Exception | None = None
        self.uploaded: dict[str, bytes] = {}
        self.readme = ""
        self.place: Path | None = None

    def whoami(self) -> None:
        if self.place is None:
            raise self.problem or RuntimeError("no token")

    def create_repo(self, **options: Any) -> Any:
        self.calls.append(("create_repo", options))
        name = options["repo_id"]
        return SimpleNamespace(repo_id=name if "/" in name else f"ada/{name}")

    def revision_exists(self, repo_id: str, revision: str) -> bool:
        assert "/" in repo_id
        return revision in self.branches

    def create_branch(self, repo_id: str, **options: Any) -> None:
        assert not self.revision_exists(repo_id, options["branch"])
        self.calls.append(("create_branch", {"repo_id": repo_id, **options}))
        self.branches.add(options["branch"])

    def hf_hub_download(self, **options: Any) -> str:
        assert self.place is not None
        if not self.readme:
            raise FileNotFoundError
        (self.place / "README.md").write_text(self.readme)
        return str(self.place / "README.md")

    def upload_folder(self, **options: Any) -> None:
        if self.problem is not None:
            raise self.problem
        self.calls.append(("upload_folder", options))
        self.uploaded = {each.name: each.read_bytes() for each in Path(options["folder_path"]).iterdir()}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    made = Hub()
    made.place = tmp_path
    monkeypatch.setattr("huggingface_hub.HfApi", lambda: made)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    return made


def test_push(run: Run, paths: tuple[str, str], hub: Hub) -> None:
    path = paths[0]
    done = run("checkpoint", "push-hf", path, "-f", "json")
    run_id = path.split("/")[2]
    name = f"tinker-random-{run_id.replace(':', '-')}"
    full = f"ada/{name}"
    assert done.json == {"checkpoint_path": path, "repo_id": full, "revision": "weights-a", "public": False}
    assert hub.calls[0] == ("create_repo", {"repo_id": name, "private": True, "exist_ok": True})
    assert hub.calls[1] == ("create_branch", {"repo_id": full, "branch": "weights-a", "exist_ok": True})
    upload = hub.calls[2][1]
    assert (upload["repo_id"], upload["revision"], upload["create_pr"]) == (full, "weights-a", False)
    assert (upload["allow_patterns"], upload["ignore_patterns"]) == (None, ["checkpoint_complete"])
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= set(hub.uploaded)
    readme = hub.uploaded["README.md"].decode()
    assert readme.startswith(f"---\nbase_model: {MODEL}\nlibrary_name: peft\ntags:\n- tinker\n")
    assert f"tinker_path: {path}\n" in readme
    assert "- LoRA rank: 2\n" in readme
    assert f'PeftModel.from_pretrained(base, "{full}", revision="weights-a")' in readme
    assert isinstance(json.loads(hub.uploaded["adapter_config.json"])["base_model_name_or_path"], str)
    both = run("checkpoint", "push-hf", paths[1], "--create-pr", "--revision", "dev")
    assert (both.code, both.out) == (2, "")
    assert "--revision or --create-pr" in both.err
    patched = run("checkpoint", "push-hf", paths[1], "-r", "ada/adapter", "--create-pr", "-f", "json")
    assert "revision" not in patched.json  # a pull request goes to main


def test_another_checkpoint_in_the_repository_stays(run: Run, paths: tuple[str, str], hub: Hub) -> None:
    hub.readme = "of `tinker://other/weights/else`"
    done = run("checkpoint", "push-hf", paths[1], "-r", "ada/adapter")
    assert done.code == 1
    assert "holds another checkpoint, tinker://other/weights/else" in done.err
    assert hub.uploaded == {}
    hub.readme = f"of `{paths[1]}`"
    assert run("checkpoint", "push-hf", paths[1], "-r", "ada/adapter").code == 0


def test_a_refusal_of_the_hub_hides_signatures(run: Run, paths: tuple[str, str], hub: Hub) -> None:
    hub.problem = ValueError("403 Forbidden\n\nfor url: https://files.example/a/b?X-Signature=abc (no quota)")
    done = run("checkpoint", "push-hf", paths[1], "-r", "ada/adapter")
    assert (done.code, done.out) == (1, "")
    assert done.err == (
        "Error: the hub refused: 403 Forbidden for url: https://files.example/a/b (no quota)\n"
    )


def test_an_unreachable_hub_is_not_a_missing_login(
    run: Run, server: LocalServer, paths: tuple[str, str], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_unknown")
    hub.place, hub.problem = None, ConnectionError("[Errno 111] Connection refused")
    server.forget()
    away = run("checkpoint", "push-hf", paths[1])
    assert (away.code, away.out) == (1, "")
    assert away.err.startswith("Error: the hub did not confirm your login: [Errno 111] Connection refused\n")
    assert "hf auth login" not in away.err
    hub.problem = ConnectionError("401 Client Error")
    hub.problem.response = SimpleNamespace(status_code=401)  # type: ignore[attr-defined]
    refused = run("checkpoint", "push-hf", paths[1])
    assert refused.code == 1
    assert "Run hf auth login." in refused.err
    assert server.calls == []


TRACE = bytes(range(256)) * 1000


def serve(world: World, answer: Answer) -> None:
    """Script the answer to requests for the signed address of the trace, whose path is outside the API."""
    world.script("/files/trace", answer)


def test_the_address_alone(run: Run, world: World, folder: Path) -> None:
    url = f"{world.url}/files/trace"  # type: ignore[attr-defined]
    assert run("session", "export-trace", "s-1", "--url-only").out == f"{url}\n"
    data = run("session", "export-trace", "s-1", "--url-only", "-f", "json").json
    assert data == {"session_id": "s-1", "url": url}
    assert list(folder.iterdir()) == []


def test_the_file(run: Run, world: World, folder: Path) -> None:
    serve(world, Answer(body=TRACE))
    done = run("session", "export-trace", "s-1", "-f", "json")
    target = folder / "s-1.pftrace"
    assert done.json == {"session_id": "s-1", "destination": str(target), "file_size_bytes": len(TRACE)}
    assert target.read_bytes() == TRACE
    [fetched] = [asked for asked in world.log if asked.path == "/files/trace"]
    assert "x-api-key" not in fetched.headers
    serve(world, Answer(body=TRACE))
    assert "250.0 KB" in run("session", "export-trace", "s-1", "-o", "new/t").out
    assert (folder / "new" / "t").read_bytes() == TRACE


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Answer(403, {"detail": "expired"}), "the server answered 403"),
        (Answer(abort="before"), "could not be fetched"),
    ],
)
def test_a_failure_leaves_no_file(run: Run, world: World, folder: Path, answer: Answer, words: str) -> None:
    serve(world, answer)
    done = run("session", "export-trace", "s-1")
    assert (done.code, done.out) == (1, "")
    assert words in done.err
    assert list(folder.iterdir()) == []


def test_ctrl_c_leaves_no_file(run: Run, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(bar: Progress, done: int, total: int | None) -> None:
        assert (0 < done <= len(TRACE), total) == (True, len(TRACE))
        raise KeyboardInterrupt

    (folder / "s-1.pftrace").write_text("from before")
    serve(world, Answer(body=TRACE))
    monkeypatch.setattr(Progress, "update", interrupt)
    done = run("session", "export-trace", "s-1")
    assert (done.code, done.out) == (130, "")
    assert [each.name for each in folder.iterdir()] == ["s-1.pftrace"]
    assert (folder / "s-1.pftrace").read_text() == "from before"
