"""One program for both clients, behind a proxy that damages what passes. It prints what became of each call.

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


def main(package: str, url: str, key: str, seed: int) -> None:
    logging.disable()
    tinker = importlib.import_module(package)
    types = importlib.import_module(f"{package}.types")
    chance = random.Random(f"program {seed}")
    give_up_at = time.monotonic() + WAIT_S
    asked: list[tuple[str, list[Any], Any]] = []

    def say(kind: str, marks: list[Any], state: str, value: Any = None) -> None:
        sys.stdout.write(json.dumps([kind, marks, state, value]) + "\n")
        sys.stdout.flush()

    def end() -> None:
        say("end", [], "ok")
        sys.stdout.flush()
        os._exit(0)  # how each client leaves is not the subject

    try:
        service = tinker.ServiceClient(base_url=url, api_key=key)
        training = service.create_lora_training_client(MODEL, rank=4, seed=1)
        sampler = service.create_sampling_client(base_model=MODEL)
        for client in (training, sampler):
            if hasattr(type(client), "result"):
                client.result(timeout=WAIT_S)
    except Exception as error:  # noqa: BLE001  # any failure is a finding
        say("create", [], type(error).__name__, str(error)[:200])
        end()
        raise
    params = types.SamplingParams(max_tokens=4, temperature=0.0, seed=1)
    mark = 1 + 1000 * seed  # no two runs share a mark
    for _ in range(CALLS):
        kind = chance.choice(("pass", "pass", "step", "step", "save", "sample", "sample"))
        count = chance.randint(1, 5) if kind == "pass" else 1
        marks: list[Any] = list(range(mark, mark + count))
        mark += count
        try:
            if kind == "pass":
                data = [datum_of(types, each) for each in marks]
                future = training.forward_backward(data, "cross_entropy")
            elif kind == "step":
                future = training.optim_step(types.AdamParams(learning_rate=1e-3 + marks[0] * 1e-9))
            elif kind == "save":
                marks = [f"s{marks[0]}"]
                future = training.save_state(marks[0])
            else:
                marks = [marks[0] % 8]
                prompt = types.ModelInput.from_ints([7 * marks[0] % 256, marks[0], 3])
                future = sampler.sample(prompt=prompt, num_samples=2, sampling_params=params)
        except Exception as error:  # noqa: BLE001  # any failure is a finding
            say(kind, marks, type(error).__name__, str(error)[:200])
        else:
            asked.append((kind, marks, future))
    for kind, marks, future in asked:
        try:
            result = future.result(timeout=max(give_up_at - time.monotonic(), 0.1))
        except (TimeoutError, FutureTimeoutError):
            say(kind, marks, "hung")
        except Exception as error:  # noqa: BLE001  # any failure is a finding
            say(kind, marks, type(error).__name__, str(error)[:200])
        else:
            say(kind, marks, "ok", described(kind, result))
    end()


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
