"""The credential command runs as the user wrote it, and its failures have a reason."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.crowd import until

from tinker_sync._base.secret import Secret
from tinker_sync.errors import CredentialError
from tinker_sync.transport.credential_command import CredentialCommand

KEY = "tml-planted-key-0123456789"

pytestmark = pytest.mark.skipif(os.name != "posix", reason="the shell lines here are POSIX")


def run(line: str) -> str:
    return CredentialCommand(Secret(line)).run().reveal()


def failure(line: str, **more: object) -> str:
    with pytest.raises(CredentialError) as caught:
        CredentialCommand(Secret(line), **more).run()  # type: ignore[arg-type]  # keywords of the class
    text = str(caught.value)
    assert text.startswith("the credential command (TINKER_CREDENTIAL_CMD) ")
    assert KEY not in text
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    return text.removeprefix("the credential command (TINKER_CREDENTIAL_CMD) ")


def test_it_goes_through_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PART", "0123456789")
    assert run("echo tml-$PART | cat") == "tml-0123456789"


def test_standard_input_is_empty() -> None:
    assert run("read line || echo at-its-end") == "at-its-end"


def test_the_exit_status_counts() -> None:
    assert failure(f"echo {KEY}; exit 3") == "failed with exit status 3"


def test_the_error_output_is_quoted_without_the_output() -> None:
    said = failure(f"echo {KEY}; echo 'expired session' >&2; echo 'was: {KEY}' >&2; exit 1")
    assert said == "failed with exit status 1; it said: expired session was: ***"


@pytest.mark.parametrize("line", ["true", "echo", "printf '  \\n '"])
def test_empty_output(line: str) -> None:
    assert failure(line) == "printed nothing"


@pytest.mark.parametrize(
    "line", [f"echo {KEY}; echo more", f"echo {KEY} x", "printf 'tml-\\303\\274'", "printf '\\377'"]
)
def test_output_that_cannot_be_sent(line: str) -> None:
    assert failure(line).startswith("printed more than one word, or characters that cannot stand in a header")


def test_a_command_that_does_not_exist() -> None:
    assert "failed with exit status 127; it said: " in failure("no-such-command-anywhere")


def test_a_shell_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert failure(f"echo {KEY}") == "could not be started: Cannot allocate memory"


def test_a_line_no_process_can_be_given() -> None:
    assert failure(f"echo {KEY}\0").startswith("could not be started: ")


def test_the_time_limit_ends_everything_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    line = f"sleep 600 & echo $! $$ > {pids}; wait"
    for limit_s in (0.2, 2.0, 60.0):  # the shell of a busy machine may need a while to start
        text = failure(line, time_limit_s=limit_s)
        assert text == f"did not end within {limit_s:.3g} s"
        if pids.exists() and pids.read_text().count(" ") == 1:
            break
    for pid in map(int, pids.read_text().split()):
        until(lambda pid=pid: not alive(pid))


def alive(pid: int) -> bool:
    """Return True while a process runs. A process that has ended may still be listed as a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return not Path("/proc/self").exists()
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")


def test_what_was_printed_before_the_time_limit_stays_hidden() -> None:
    assert failure(f"echo {KEY}; echo {KEY} >&2; exec sleep 600", time_limit_s=0.05).startswith(
        "did not end within 0.05 s"
    )


def test_ctrl_c_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        until(lambda: pid.exists() and pid.read_text().endswith("\n"))
        raise KeyboardInterrupt

    pid = tmp_path / "pid"
    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(f"echo $$ > {pid}; exec sleep 600")
    until(lambda: not alive(int(pid.read_text())))


def test_no_pipes_are_left() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0

    run(f"echo {KEY}")
    before = descriptors()
    for _ in range(5):
        run(f"echo {KEY}")
        failure("exit 1")
    assert descriptors() == before
