"""An embedded server that kills itself with SIGKILL at a chosen moment, and starts again at the same port.

`python -m support.mortal_server` reads orders, one JSON object a line, and forks a server for each, so that a
start takes milliseconds. It answers an order when the server listens, or when the server has died before.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from support.orders import OrderedProcess, answer, fork

MODEL = "tinker-sync/random"
KEY = "tml-local-mortal"
_LONGEST_DELAY_S = 0.01


class MortalServer(OrderedProcess):
    """The process that forks the servers, and the server that runs. Only `kill` is thread-safe.

    Args:
        directory: the directory for the state of the servers.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__("support.mortal_server")
        self._directory = directory
        self._port = 0
        self._pid = 0
        self.running = False

    @property
    def url(self) -> str:
        """The address, which is the same for all servers."""
        return f"http://127.0.0.1:{self._port}"

    def start(self, die_at: int | None = None, delay_seed: int | None = None) -> bool:
        """Start a server. Return False if it died before it listened. The caller must `reap` it in any case.

        Args:
            die_at: the number of the function call, of Python or C in any thread, at which the server kills
                itself; None for never.
            delay_seed: the seed of a delay of some milliseconds after that call, so that the server may die
                inside C code. None for no delay.
        """
        assert not self.running
        started = self.ask(
            directory=str(self._directory), port=self._port, die_at=die_at, delay_seed=delay_seed
        )
        self._port = started.get("port", self._port)
        self._pid = int(started["pid"])
        self.running = True
        return "port" in started

    def kill(self) -> None:
        """Kill the server. Any thread may call this, also while another thread waits in `reap`."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def stop(self) -> int:
        """Stop the server with SIGTERM, and return the number of its function calls."""
        os.kill(self._pid, signal.SIGTERM)
        self.reap()
        return int((self._directory / "calls").read_text())

    def reap(self) -> None:
        """Wait until the server process has ended."""
        self.ask(reap=True)
        self.running = False

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.running:
            self.kill()
            self.reap()
        super().__exit__(exc_type, exc_value, traceback)


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _count_calls(die_at: int | None, delay_seed: int | None) -> list[int]:
    """Count the function calls of all threads from now on.

    Kill the process at call `die_at` or soon after.
    """
    begun = [0]
    if die_at is None:
        return begun
    delay_s = None if delay_seed is None else random.Random(delay_seed).uniform(0, _LONGEST_DELAY_S)
    pause, late = threading.Event(), threading.Event()

    def wait_and_die() -> None:
        late.wait()
        pause.wait(delay_s)
        _die()

    threading.Thread(target=wait_and_die, daemon=True).start()

    def note(_frame: object, event: str, _argument: object) -> None:
        if event in ("call", "c_call"):
            begun[0] += 1
            if begun[0] == die_at:
                if delay_s is None:
                    _die()
                sys.setprofile(None)
                late.set()

    threading.setprofile(note)
    sys.setprofile(note)
    return begun


def _serve(order: dict[str, Any], tell: int) -> None:
    from tinker_sync.local.running import assemble
    from tinker_sync.local.server.http import run

    begun = _count_calls(order["die_at"], order["delay_seed"])

    def ready(port: int) -> None:
        os.write(tell, json.dumps({"port": port}).encode())
        os.close(tell)

    directory = Path(order["directory"])
    with assemble(directory, key=KEY, models=[MODEL], flags={"hold_s": 1.0}) as app:
        run(app, host="127.0.0.1", port=order["port"], ready=ready)
    sys.setprofile(None)
    (directory / "calls").write_text(str(begun[0]))


def _wait(pid: int) -> int:
    """Wait for the end of a server. Kill it if the process that gives the orders has ended."""
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if select.select([sys.stdin], [], [], 0.002)[0]:  # end of input: no order comes before the answer
            os.kill(pid, signal.SIGKILL)
            sys.exit()


def main() -> None:
    import tinker_sync.local.engine.host
    import tinker_sync.local.running
    import tinker_sync.local.server.app
    import tinker_sync.local.server.http
    import tinker_sync.local.store  # noqa: F401  # all of these once, for all children

    pid = 0
    for line in sys.stdin:
        order = json.loads(line)
        if "reap" in order:
            found: dict[str, Any] = {"code": _wait(pid)}
        else:
            pid, told = fork(partial(_serve, order))
            found = {**json.loads(told or "{}"), "pid": pid}
        answer(json.dumps(found))


if __name__ == "__main__":
    main()
