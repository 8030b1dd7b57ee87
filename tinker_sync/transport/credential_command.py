"""Runs of the user's credential command: a shell line whose output is the key.

The thread that calls `run` waits. Two short-lived threads read the two outputs of the command, because a
command that fills an unread pipe never ends. The output is wrapped in a `Secret` before anything can fail.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from contextlib import suppress
from typing import IO, Final

from attrs import field, frozen

from tinker_sync._base.clock import SYSTEM_CLOCK, Clock, in_seconds
from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.errors import CredentialError

# Tokens have a few KiB; a command that prints more is no credential helper.
_MAX_OUTPUT_BYTES: Final = 64 * 1024
_MAX_COMPLAINT_BYTES: Final = 2 * 1024
_MAYBE_KEY: Final = re.compile(r"(?![/.~$])(?=.*[0-9])(?=.*[A-Za-z]).{8,}")
# A killed command's pipes close at once, unless a process that it started in another session holds them.
_AFTER_KILL_S: Final = 1.0


@frozen
class CredentialCommand:
    """A shell command that prints a credential. It has no state; any thread may run it.

    >>> CredentialCommand(Secret("echo tml-example")).run()
    Secret('***')
    """

    command: Secret
    time_limit_s: float = 30.0
    clock: Clock = field(default=SYSTEM_CLOCK, repr=False)

    def run(self) -> Secret:
        """Run the command and return its output without surrounding blanks.

        The standard input of the command is empty. On POSIX systems, the command runs in its own session, so
        that `run` can end it together with its child processes.

        Raises:
            CredentialError: The command could not be started, took too long, failed, or did not print
                exactly one word. The text quotes the end of its error output, and masks its standard output
                there.
        """
        end = _run(self.command, self.time_limit_s, self.clock)
        if end.problem:
            said = f"; it said: {end.complaint}" if end.complaint else ""
            raise CredentialError(f"the credential command (TINKER_CREDENTIAL_CMD) {end.problem}{said}")
        return end.output


@frozen
class _End:
    """The result of a run of the command: its output, and the problem if it has failed."""

    output: Secret
    problem: str = ""
    complaint: str = ""


class _Run:
    """A started command and the two threads that read its outputs, for the one thread that owns it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.done = threading.Event()
        self.output = Secret("")  # written by the output thread, read after `done` or a join
        self.too_much = False  # the same
        self.complaint = b""  # the same for the complaint thread
        self._threads = [
            threading.Thread(target=work, args=(pipe,), name=f"tinker-command-{name}", daemon=True)
            for name, work, pipe in (
                ("output", self._take_output, process.stdout),
                ("complaint", self._take_complaint, process.stderr),
            )
        ]

    def wait(self, time_limit_s: float, clock: Clock) -> bool:
        """Wait for the command, and kill it at the limit. Return True if it ended before the limit."""
        try:
            for thread in self._threads:
                thread.start()
            return clock.wait(self.done, time_limit_s)
        finally:  # also after Ctrl-C
            if not self.done.is_set():
                self.kill()
            for thread in self._threads:
                if thread.ident is not None:
                    thread.join(_AFTER_KILL_S)

    def kill(self) -> None:
        """End the command and, on POSIX systems, the other processes of its group."""
        with suppress(OSError):  # the command has just ended by itself
            if os.name == "posix":
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def _take_output(self, pipe: IO[bytes]) -> None:
        with pipe:
            self.output = Secret(pipe.read(_MAX_OUTPUT_BYTES + 1).decode("utf-8", "replace").strip())
            if pipe.read(1):
                self.too_much = True
                self.kill()

    def _take_complaint(self, pipe: IO[bytes]) -> None:
        with pipe:
            while piece := pipe.read(_MAX_COMPLAINT_BYTES):
                self.complaint = (self.complaint + piece)[-_MAX_COMPLAINT_BYTES:]
        self._threads[0].join()
        self.process.wait()
        self.done.set()


def _run(command: Secret, time_limit_s: float, clock: Clock) -> _End:
    try:
        process = subprocess.Popen(  # noqa: S602 - the setting is defined as a shell line
            command.reveal(),
            shell=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=os.name == "posix",
        )
    except (OSError, ValueError) as error:  # not chained: the frames below hold the command line
        return _End(Secret(""), f"could not be started: {getattr(error, 'strerror', None) or error}")
    run = _Run(process)
    in_time = run.wait(time_limit_s, clock)
    return _End(
        run.output,
        _problem_of(run, time_limit_s, in_time=in_time),
        _presentable(
            run.complaint, (run.output, *map(Secret, run.output.reveal().split()), *_keys_in(command))
        ),
    )


def _problem_of(run: _Run, time_limit_s: float, *, in_time: bool) -> str:
    if not in_time:
        return f"did not end within {in_seconds(time_limit_s)}"
    if run.too_much:
        return f"printed more than {_MAX_OUTPUT_BYTES // 1024} KiB"
    status = run.process.returncode
    if status:
        return f"failed with exit status {status}" if status > 0 else f"was ended by signal {-status}"
    if not run.output:
        return "printed nothing"
    if not all("!" <= character <= "~" for character in run.output.reveal()):
        return "printed more than one word, or characters that cannot stand in a header"
    return ""


def _keys_in(command: Secret) -> list[Secret]:
    """Return the texts to mask in error texts: the command line, and those of its words that may be keys.

    Shells and tools quote words of the command line. The result leaves out names of programs and files,
    because an error text without them would be useless.
    """
    words = re.split(r"[\s'\"=:;|&()<>]+", command.reveal())
    return [command, *(Secret(word) for word in words if _MAYBE_KEY.match(word))]


def _presentable(complaint: bytes, secrets: tuple[Secret, ...]) -> str:
    return " ".join(mask_text(complaint.decode("utf-8", "replace"), secrets).split())
