"""One program for both clients, behind a `FaultProxy`. It prints the outcome of each call.

    python faults_script.py tinker|tinker_sync URL KEY SEED

The marks of the calls are those of `support.engine_ledger`; the server's ledger shows which were applied.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import random
import sys
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

CALLS = 20
WAIT_S = 60.0
MODEL = "tinker-sync/random"
VOCABULARY = 256


def datum_of(types: Any, mark: int) -> Any:
    high, low = divmod(mark, VOCABULARY)
    tokens = [*divmod(high, VOCABULARY), low]
    inputs = {"target_tokens": [(token + mark) % VOCABULARY for token in tokens], "weights": [1.0] * 3}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)


def say(kind: str, marks: list[Any], state: str, value: Any = None) -> None:
    sys.stdout.write(json.dumps([kind, marks, state, value]) + "\n")
    sys.stdout.flush()


class Program:
    """A client that makes random calls, which depend on the seed alone."""

    def __init__(self, package: str, seed: int) -> None:
        self.tinker = importlib.import_module(package)
        self.types = importlib.import_module(f"{package}.types")
        self.params = self.types.SamplingParams(max_tokens=4, temperature=0.0, seed=1)
        self.chance = random.Random(f"program {seed}")
        self.mark = 1 + 1000 * seed  # each run has its own marks
        self.give_up_at = time.monotonic() + WAIT_S
        self.asked: list[tuple[str, list[Any], Any]] = []

    def begin(self, url: str, key: str) -> None:
        service = self.tinker.ServiceClient(base_url=url, api_key=key)
        self.training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        self.sampler = service.create_sampling_client(base_model=MODEL)
        for client in (self.training, self.sampler):
            if hasattr(type(client), "result"):
                client.result(timeout=WAIT_S)

    def ask(self) -> None:
        """Make one call at random."""
        kind = self.chance.choice(("pass", "pass", "step", "step", "save", "sample", "sample"))
        marks: list[Any] = list(
            range(self.mark, self.mark + (self.chance.randint(1, 5) if kind == "pass" else 1))
        )
        self.mark += len(marks)
        if kind == "save":
            marks = [f"s{marks[0]}"]
        elif kind == "sample":
            marks = [marks[0] % 8]
        try:
            future = self.call(kind, marks)
        except Exception as error:  # noqa: BLE001  # any failure is a finding
            say(kind, marks, type(error).__name__, str(error)[:200])
        else:
            self.asked.append((kind, marks, future))

    def call(self, kind: str, marks: list[Any]) -> Any:
        types, mark = self.types, marks[0]
        if kind == "pass":
            return self.training.forward_backward([datum_of(types, each) for each in marks], "cross_entropy")
        if kind == "step":
            return self.training.optim_step(types.AdamParams(learning_rate=1e-3 + mark * 1e-9))
        if kind == "save":
            return self.training.save_state(mark)
        prompt = types.ModelInput.from_ints([7 * mark % 256, mark, 3])
        return self.sampler.sample(prompt=prompt, num_samples=2, sampling_params=self.params)

    def tell(self, kind: str, marks: list[Any], future: Any) -> None:
        """Wait for a call, and print its outcome."""
        try:
            result = future.result(timeout=max(self.give_up_at - time.monotonic(), 0.1))
        except (TimeoutError, FutureTimeoutError):
            say(kind, marks, "hung")
        except Exception as error:  # noqa: BLE001  # any failure is a finding
            say(kind, marks, type(error).__name__, str(error)[:200])
        else:
            say(kind, marks, "ok", described(kind, result))


def main(package: str, url: str, key: str, seed: int) -> None:
    logging.disable()
    program = Program(package, seed)
    try:
        program.begin(url, key)
    except Exception as error:  # noqa: BLE001  # any failure is a finding
        say("create", [], type(error).__name__, str(error)[:200])
    else:
        for _ in range(CALLS):
            program.ask()
        for asked in program.asked:
            program.tell(*asked)
    say("end", [], "ok")
    os._exit(0)  # does not wait for the threads of the client


def described(kind: str, result: Any) -> Any:
    if kind == "pass":
        return [[float(one) for one in row["logprobs"].tolist()] for row in result.loss_fn_outputs]
    if kind == "save":
        return result.path
    if kind == "sample":
        return [list(each.tokens) for each in result.sequences]
    return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
