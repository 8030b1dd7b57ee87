"""One training and sampling script in four styles. It prints the numbers of each style as JSON.

    python styles_script.py tinker|tinker_sync URL KEY STYLE...

`values` uses the returned value as a client at once. `results` waits for each client with `result()`.
`awaits` awaits clients and results. `threads` makes and trains each client in its own thread.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import threading
import warnings
from typing import Any

BASE = "tinker-sync/tiny"
RANKS = (4, 8)
WAIT_S = 60.0


class Script:
    """The parts that all styles share: the package, its data, and the results of a run."""

    def __init__(self, package: str, url: str, key: str) -> None:
        self.tinker = importlib.import_module(package)
        self.types = importlib.import_module(f"{package}.types")
        self.options = {"base_url": url, "api_key": key}
        self.step = self.types.AdamParams(learning_rate=1e-2)
        self.data = [
            self.types.Datum(
                model_input=self.types.ModelInput.from_ints([first, 2, 3]),
                loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
            )
            for first in range(1, 4)
        ]
        self.prompt = self.types.ModelInput.from_ints([1, 2])
        self.params = self.types.SamplingParams(max_tokens=5, seed=3, temperature=0.7)

    def numbers(self, passed: list[Any], sampled: Any, scored: Any) -> dict[str, Any]:
        return {
            "losses": [each.metrics["loss:sum"] for each in passed],
            "tokens": list(sampled.sequences[0].tokens),
            "logprobs": list(scored),
        }

    def trained(self, trainer: Any, ready: Any) -> dict[str, Any]:
        """Train and sample, and return the numbers.

        `ready` turns the returned value of the call that makes a sampling client into that client.
        """
        passed = []
        for _ in range(2):
            passed.append(trainer.forward_backward(self.data, "cross_entropy"))
            trainer.optim_step(self.step)
        sampler = ready(trainer.save_weights_and_get_sampling_client())
        sampled = sampler.sample(self.prompt, 1, self.params)
        scored = sampler.compute_logprobs(self.prompt)
        results = [each.result(timeout=WAIT_S) for each in passed]
        return self.numbers(results, sampled.result(timeout=WAIT_S), scored.result(timeout=WAIT_S))

    # ------------------------------------------------------------------------------------ the styles

    def values(self) -> list[dict[str, Any]]:
        service = self.tinker.ServiceClient(**self.options)
        trainers = [service.create_lora_training_client(BASE, rank=rank, seed=1) for rank in RANKS]
        return [self.trained(trainer, lambda client: client) for trainer in trainers]

    def results(self) -> list[dict[str, Any]]:
        service = self.tinker.ServiceClient(**self.options)
        made = [service.create_lora_training_client(BASE, rank=rank, seed=1) for rank in RANKS]
        return [self.trained(_result(client), _result) for client in made]

    def awaits(self) -> list[dict[str, Any]]:
        return asyncio.run(self._awaits())

    async def _awaits(self) -> list[dict[str, Any]]:
        service = self.tinker.ServiceClient(**self.options)
        # The clients are made one after the other, because the numbers of the models follow the order of the
        # calls.
        trainers = [
            await service.create_lora_training_client_async(BASE, rank=rank, seed=1) for rank in RANKS
        ]
        return list(await asyncio.gather(*[self._trained_async(trainer) for trainer in trainers]))

    async def _trained_async(self, trainer: Any) -> dict[str, Any]:
        passed = []
        for _ in range(2):
            passed.append(await trainer.forward_backward_async(self.data, "cross_entropy"))
            await trainer.optim_step_async(self.step)
        sampler = await trainer.save_weights_and_get_sampling_client_async()
        sampled = await sampler.sample_async(self.prompt, 1, self.params)
        scored = await sampler.compute_logprobs_async(self.prompt)
        return self.numbers([await each for each in passed], sampled, scored)

    def threads(self) -> list[dict[str, Any]]:
        service = self.tinker.ServiceClient(**self.options)
        service.get_server_capabilities()
        found: dict[int, dict[str, Any]] = {}

        def run(rank: int) -> None:
            trainer = service.create_lora_training_client(BASE, rank=rank, seed=1)
            found[rank] = self.trained(trainer, lambda client: client)

        crowd = [threading.Thread(target=run, args=(rank,)) for rank in RANKS]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join(WAIT_S)
        return [found[rank] for rank in RANKS]


def _result(client: Any) -> Any:
    """Return a client; if it is a future, return its result."""
    return client.result(timeout=WAIT_S) if hasattr(client, "result") else client


def main() -> None:
    package, url, key, *styles = sys.argv[1:]
    if package == "tinker":
        warnings.simplefilter("ignore")
    else:
        warnings.simplefilter("error")
    script = Script(package, url, key)
    json.dump({style: getattr(script, style)() for style in styles}, sys.stdout)


if __name__ == "__main__":
    main()
