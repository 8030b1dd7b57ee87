"""A training process that is killed some steps after its checkpoint.

A client that is only dropped would still close its session and finish its queue. A killed process does
neither: only the state that the server has saved remains. `main` runs in the child process and reports losses
and the checkpoint as lines of JSON; `train_and_kill` reads them in the parent.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import IO, Any, Final, NamedTuple

from tinker_sync.errors import TinkerError
from tinker_sync.local.process.server_process import encode_orders, interpreter_command

STEPS_LOST: Final = 3


class InterruptedTraining(NamedTuple):
    """The results of a training that was killed."""

    losses: list[float]
    """The losses up to the checkpoint."""
    lost: list[float]
    """The losses after the checkpoint."""
    checkpoint: str
    exit_code: int


def train_and_kill(orders: dict[str, Any], progress: Callable[[float], None]) -> InterruptedTraining:
    """Train in a child process, and kill it `STEPS_LOST` steps after it has saved its state.

    Args:
        orders: the arguments of `main`.
        progress: called with the loss of each step.

    Raises:
        TinkerError: the process ended before it was killed.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(  # noqa: S603  # this interpreter, with code of this package
            interpreter_command(__name__), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        try:
            assert process.stdin is not None  # noqa: S101  # opened above
            assert process.stdout is not None  # noqa: S101
            process.stdin.write(encode_orders(orders))
            process.stdin.flush()
            losses, lost, checkpoint = _read_reports(process.stdout, progress)
        finally:
            process.kill()
            exit_code = process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        if checkpoint is None or len(lost) < STEPS_LOST:
            errors.seek(0)
            text = errors.read().decode(errors="replace").strip()
            raise TinkerError(f"the training process ended by itself ({exit_code}): {text[-2000:]}")
        return InterruptedTraining(losses, lost, checkpoint, exit_code)


def _read_reports(
    lines: IO[bytes], progress: Callable[[float], None]
) -> tuple[list[float], list[float], str | None]:
    losses: list[float] = []
    lost: list[float] = []
    checkpoint: str | None = None
    while len(lost) < STEPS_LOST and (line := lines.readline()):
        report = json.loads(line)
        checkpoint = report.get("checkpoint", checkpoint)
        if "loss" in report:
            (losses if checkpoint is None else lost).append(report["loss"])
            progress(report["loss"])
    return losses, lost, checkpoint


def main(orders: dict[str, Any]) -> None:
    """Learn to sort, save once on the way, and report each step, until the process is killed.

    Args:
        orders: "base_url", "model", "rank", "seed", "examples" (problems in a step), "rates" (a learning rate
            for each step) and "save_after" (the number of steps before the checkpoint).
    """
    from tinker_sync.clients.service import ServiceClient
    from tinker_sync.demo.student import Student

    def report(**values: Any) -> None:
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()

    with ServiceClient(base_url=orders["base_url"]) as service:
        training = service.create_lora_training_client(
            orders["model"], rank=orders["rank"], seed=orders["seed"]
        )
        student = Student(training, orders["seed"], examples=orders["examples"], in_turn=True)
        for step, rate in enumerate(orders["rates"]):
            if step == orders["save_after"]:
                report(checkpoint=training.save_state("sorting").result().path)
            report(loss=student.learn_sorting(step, rate))
