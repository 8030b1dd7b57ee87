"""Runs of the user's credential command: a shell line whose output is the key.

The thread that calls `run` waits. The output is wrapped in a `Secret` before anything can fail.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from typing import Final

from attrs import frozen

from tinker_sync._base.clock import in_seconds
from tinker_sync._base.secret import Secret, mask_text
from tinker_sync.errors import CredentialError

_MAX_COMPLAINT: Final = 2 * 1024
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

    def run(self) -> Secret:
        """Run the command and return its output without surrounding blanks.

        The standard input of the command is empty. On POSIX systems, the command runs in its own session, so
        that `run` can end it together with its child processes.

        Raises:
            CredentialError: The command could not be started, took too long, failed, or did not print
                exactly one word. The text quotes the end of its error output, and masks its standard output
                there.
        """
        output, complaint, problem = self._run()
        if problem:
            hidden = (output, *map(Secret, output.reveal().split()), *_keys_in(self.command))
            said = " ".join(mask_text(complaint, hidden).split())
            raise CredentialError(
                f"the credential command (TINKER_CREDENTIAL_CMD) {problem}{said and f'; it said: {said}'}"
            )
        return output

    def _run(self) -> tuple[Secret, str, str]:
        """Return the output, the end of the error output, and the problem of a command that has failed.

        The problem is no exception, because the frames of one would hold the command line.
        """
        octets, complaint, problem = b"", b"", ""
        try:
            process = subprocess.Popen(  # noqa: S602 - the setting is defined as a shell line
                self.command.reveal(),
                shell=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=os.name == "posix",
            )
        except (OSError, ValueError) as error:
            return Secret(""), "", f"could not be started: {getattr(error, 'strerror', None) or error}"
        with process:
            try:
                octets, complaint = process.communicate(timeout=self.time_limit_s)
            except subprocess.TimeoutExpired:
                problem = f"did not end within {in_seconds(self.time_limit_s)}"
                _kill(process)
                with suppress(subprocess.TimeoutExpired):
                    octets, complaint = process.communicate(timeout=_AFTER_KILL_S)
            except BaseException:  # such as Ctrl-C
                _kill(process)
                raise
        output = Secret(octets.decode("utf-8", "replace").strip())
        said = complaint[-_MAX_COMPLAINT:].decode("utf-8", "replace")
        return output, said, problem or _problem_of(process.returncode, output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and, on POSIX systems, the other processes of its group."""
    with suppress(OSError):  # the command has just ended by itself
        if os.name == "posix":
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()


def _problem_of(status: int, output: Secret) -> str:
    if status:
        return f"failed with exit status {status}" if status > 0 else f"was ended by signal {-status}"
    if not output:
        return "printed nothing"
    if not all("!" <= character <= "~" for character in output.reveal()):
        return "printed more than one word, or characters that cannot stand in a header"
    return ""


def _keys_in(command: Secret) -> list[Secret]:
    """Return the texts to mask in error texts: the command line, and those of its words that may be keys.

    Shells and tools quote words of the command line. The result leaves out names of programs and files,
    because an error text without them would be useless.
    """
    words = re.split(r"[\s'\"=:;|&()<>]+", command.reveal())
    return [command, *(Secret(word) for word in words if _MAYBE_KEY.match(word))]
