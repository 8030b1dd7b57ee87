"""Training in a process of its own, which is killed without warning some steps after its checkpoint.

A client object that is merely dropped would still close its session and finish what is queued. A process that
is killed says nothing to anybody: what is left is what the server has acknowledged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any, Final, NamedTuple

from tinker_sync.errors import TinkerError

STEPS_LOST: Final = 3


class Wreck(NamedTuple):
    """What is known of the training that was cut short."""

    losses: list[float]
    """Of the steps up to the checkpoint."""
    lost: list[float]
    """Of those after it."""
    checkpoint: str
    exit_code: int


def train_and_kill(told: dict[str, Any], progress: Callable[[float], None]) -> Wreck:
    """Have a process train, and kill it `STEPS_LOST` steps after it has saved its state.

    Args:
        told: what it shall do, see `doomed`.
        progress: is called with the loss of each step.

    Raises:
        TinkerError: it ended before it was to be killed.
    """
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(  # noqa: S603  # our own interpreter and code
            [sys.executable, "-c", _BOOT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
        )
        try:
            assert process.stdin is not None  # noqa: S101  # they were asked for
            assert process.stdout is not None  # noqa: S101
            process.stdin.write(json.dumps({**told, "path": sys.path}) + "\n")
            process.stdin.flush()
            losses, lost, checkpoint = _watch(process.stdout, progress)
        finally:
            process.kill()
            exit_code = process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if checkpoint is None or len(lost) < STEPS_LOST:
            words.seek(0)
            said = words.read().decode(errors="replace").strip()
            raise TinkerError(f"the process that trained ended by itself ({exit_code}): {said[-2000:]}")
        return Wreck(losses, lost, checkpoint, exit_code)


# It finds its modules where this process does.
_BOOT: Final = (
    "import json, sys; told = json.loads(sys.stdin.readline()); sys.path[:] = told.pop('path'); "
    "from tinker_sync.demo.doomed import train; train(told, sys.stdout)"
)


def _watch(lines: IO[str], progress: Callable[[float], None]) -> tuple[list[float], list[float], str | None]:
    losses: list[float] = []
    lost: list[float] = []
    checkpoint: str | None = None
    while len(lost) < STEPS_LOST and (line := lines.readline()):
        words = json.loads(line)
        checkpoint = words.get("checkpoint", checkpoint)
        if "loss" in words:
            (losses if checkpoint is None else lost).append(words["loss"])
            progress(words["loss"])
    return losses, lost, checkpoint
