"""A training script that dies at any moment, for tests of its checkpoints.

`python -m support.mortal_runs URL KEY` reads orders, one JSON object a line, and forks a child for each. The
child runs the script, and kills itself with SIGKILL when its threads have begun the ordered number of
function calls. The answer to an order is one line of JSON: that the child was killed, or else the path of its
final checkpoint, its error, and the number of its function calls.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import pkgutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from support.hasty import quick_service
from support.orders import OrderedProcess, answer, fork

import tinker_sync
from tinker_sync import types

MODEL = "tinker-sync/random"
STEPS = 5
PATIENCE_S = 120.0


def batch(step: int) -> list[types.Datum]:
    """Return the data of a step, which the client sends in two requests."""
    return [
        types.Datum(
            types.ModelInput.from_ints([step + 1, 2, 3 + number]),
            {"target_tokens": [4, step + 5, number], "weights": [1.0, 1.0, 0.5]},
        )
        for number in range(3)
    ]


def train(url: str, key: str, directory: Path) -> str:
    """Train from the last save on, and return the path of the final checkpoint.

    Args:
        url: the address of the server.
        key: its key.
        directory: the directory of `ServiceClient.checkpoints`.
    """
    with quick_service(base_url=url, api_key=key) as service:
        saves = service.checkpoints(directory, every=2)
        resumed = saves.resume()
        training, first = resumed or (service.create_lora_training_client(MODEL, rank=4, seed=1), 0)
        for step in range(first, STEPS):
            passed = training.forward_backward(batch(step), "cross_entropy")
            stepped = training.optim_step(types.AdamParams(learning_rate=1e-2))
            if step % 3 == 0:  # after other steps, the script goes on without waiting
                passed.result(PATIENCE_S)
                stepped.result(PATIENCE_S)
            saves.after_step(training, step)
        return training.save_state("final").result(PATIENCE_S).path


class Zygote(OrderedProcess):
    """The process that forks a child for each run of the training script. Not thread-safe.

    Args:
        url: the address of the server.
        key: its key.
    """

    def __init__(self, url: str, key: str) -> None:
        super().__init__("support.mortal_runs", url, key)

    def run(self, directory: Path, *, die_at: int | None = None) -> dict[str, Any]:
        """Run the script once, and return the answer to this order.

        Args:
            directory: as for `train`.
            die_at: the number of the function call at which the child kills itself; None for never.
        """
        return self.ask(directory=str(directory), die_at=die_at)


def _die_at(moment: int | None) -> list[int]:
    """Count the function calls of all threads from now on, and kill the process at call `moment`."""
    begun = [0]

    def note(_frame: object, event: str, _argument: object) -> None:
        if event == "call":
            begun[0] += 1
            if begun[0] == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    threading.setprofile(note)
    sys.setprofile(note)
    return begun


def _live(url: str, key: str, orders: dict[str, Any], tell: int) -> None:
    begun = _die_at(orders["die_at"])
    try:
        path: str | None = train(url, key, Path(orders["directory"]))
        words = ""
    except BaseException as error:  # noqa: BLE001  # the test is told of it
        path, words = None, repr(error)
    sys.setprofile(None)
    os.write(tell, json.dumps({"path": path, "error": words, "calls": begun[0]}).encode())


def main() -> None:
    logging.disable(logging.CRITICAL)
    url, key = sys.argv[1:]
    for room in ("types", "wire", "transport", "runtime", "clients", "loop"):  # once for all children
        for module in pkgutil.walk_packages([f"{tinker_sync.__path__[0]}/{room}"], f"tinker_sync.{room}."):
            importlib.import_module(module.name)
    for line in sys.stdin:
        pid, words = fork(partial(_live, url, key, json.loads(line)))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        answer(words or json.dumps({"killed": code == -signal.SIGKILL}))


if __name__ == "__main__":
    main()
