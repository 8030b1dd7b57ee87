"""`session export-trace`: the address, or the whole file."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_runs import Run
from support.cli_world import World
from support.tinker_stub import Answer

from tinker_sync.cli.output import Progress

TRACE = bytes(range(256)) * 1000


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_the_server_cannot_write_the_trace(run: Run, world: World, folder: Path) -> None:
    world.script("/sessions/s-1/trace_export", Answer(body={"status": "failed", "error": "too old"}))
    done = run("session", "export-trace", "s-1")
    assert (done.code, done.out) == (1, "")
    assert done.err.splitlines()[-1] == "Error: the server could not write the trace: too old"
    assert list(folder.iterdir()) == []
