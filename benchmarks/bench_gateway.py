"""Measure what a gateway adds to a sample: CPU of its process beside that of `sampling.sample`.

    python benchmarks/bench_gateway.py               1, 8 and 100 agents
    python benchmarks/bench_gateway.py --count       byte code instead of CPU, with one agent

The agents and the stub server run in processes of their own. A round runs the same prompts through `sample`
and through the gateway, so differences within a round mean more than the figures. --count traces all threads
and counts instructions of Python, which no load of the machine disturbs; --top N names the functions.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from _processes import stub_server

import tinker_sync
from tinker_sync import ModelInput, SamplingParams
from tinker_sync.gateway import Gateway

KEY = "tml-benchmark"
# What the package `openai` sends.
HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "gzip, deflate",
    "Connection": "keep-alive",
    "Content-Type": "application/json",
    "User-Agent": "OpenAI/Python 2.0.0",
    "X-Stainless-Lang": "python",
    "X-Stainless-Package-Version": "2.0.0",
    "X-Stainless-OS": "Linux",
    "X-Stainless-Arch": "x64",
    "X-Stainless-Runtime": "CPython",
    "X-Stainless-Runtime-Version": "3.11.7",
    "Authorization": "Bearer any",
    "X-Stainless-Async": "false",
    "x-stainless-retry-count": "0",
    "x-stainless-read-timeout": "600",
}


def question(agent: int, number: int) -> dict[str, str]:
    return {"role": "user", "content": f"What is {number}+{agent}?"}


def together(count: int, work: Callable[[int], None]) -> None:
    """Call `work` with each number below `count`, each on a thread of its own."""
    threads = [threading.Thread(target=work, args=[number]) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def be_agents(port: int, agents: int, turns: int) -> None:
    """Ask the gateway from as many connections as there are agents, once for each line of the input."""

    def ask(agent: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        for number in range(turns):
            body = {"model": "any", "messages": [question(agent, number)], "max_tokens": 4, "temperature": 1}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), HEADERS)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()

    for _ in sys.stdin:
        together(agents, ask)
        print("done", flush=True)


class Sampler:
    """A client of the stub server, with the tokenizer of the built-in model."""

    def __init__(self, sampling: tinker_sync.SamplingClient) -> None:
        self.sample = sampling.sample

    def get_tokenizer(self) -> Any:
        return tinker_sync.get_tokenizer("tinker-sync/tiny")

    def get_base_model(self) -> str:
        return "stub/model"


class Pair:
    """The two ways of a sample, for a number of agents."""

    def __init__(self, sampling: Sampler, gateway: Gateway, agents: int, turns: int) -> None:
        self._sampling, self._gateway, self._agents, self._turns = sampling, gateway, agents, turns
        tokenizer = sampling.get_tokenizer()
        self._params = SamplingParams(max_tokens=4, temperature=1.0, stop=[2])
        self._prompts = [
            [
                ModelInput.from_ints(
                    tokenizer.apply_chat_template(
                        [question(agent, number)], add_generation_prompt=True, return_dict=False
                    )
                )
                for number in range(turns)
            ]
            for agent in range(agents)
        ]
        port = gateway.url.rpartition(":")[2]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--be-agents", port, str(agents), str(turns)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def plain(self) -> None:
        def ask(agent: int) -> None:
            for prompt in self._prompts[agent]:
                self._sampling.sample(prompt, 1, self._params).result()

        together(self._agents, ask)

    def through(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("go", file=self._process.stdin, flush=True)
        assert self._process.stdout.readline() == "done\n"
        self._gateway.clear()

    def ways(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Return both ways, after a run of each that warms up."""
        self.plain()
        self.through()
        return self.plain, self.through

    def close(self) -> None:
        self._process.communicate()


def measure_cpu(pair: Pair, samples: int, rounds: int) -> list[tuple[float, float]]:
    """Return the milliseconds of CPU of a plain sample and of one through the gateway, for each round."""
    ways, found = pair.ways(), []
    for _ in range(rounds):
        spent = []
        for way in ways:
            before_s = time.process_time()
            way()
            spent.append((time.process_time() - before_s) / samples * 1e3)
        found.append((spent[0], spent[1]))
    return found


def count_instructions(pair: Pair, samples: int, top: int) -> None:
    """Print the instructions of both ways, and the functions in which they differ most."""
    counts = [Counter[Any](), Counter[Any]()]
    for way, count in zip(pair.ways(), counts, strict=True):
        COUNTED.append(count)
        way()
        COUNTED.clear()
    plain, through = counts
    print(f"sample {plain.total() / samples:,.0f}, through the gateway {through.total() / samples:,.0f}")
    through.subtract(plain)
    for code, count in through.most_common(top):
        print(f"  {count / samples:8.1f}  {Path(code.co_filename).name}  {code.co_qualname}")


COUNTED: list[Counter[Any]] = []


def trace(frame: Any, event: str, _: Any) -> Any:
    """Count the instructions of all threads that begin after `threading.settrace`."""
    if event == "call":
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
    elif event == "opcode":
        for count in COUNTED:
            count[frame.f_code] += 1
    return trace


def main() -> None:
    """Run the measurement that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--agents", type=int, nargs="+", default=[1, 8, 100])
    parser.add_argument("--samples", type=int, default=1600, help="samples of a run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--count", action="store_true", help="count byte code instead, with one agent")
    parser.add_argument("--top", type=int, default=0, help="with --count: the functions to name")
    parser.add_argument("--be-agents", type=int, nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be_agents:
        be_agents(*options.be_agents)
        return
    os.environ["TINKER_TELEMETRY"] = "0"
    if options.count:
        threading.settrace(trace)
    with (
        stub_server(0.0, {}) as server,
        tinker_sync.ServiceClient(base_url=server.url, api_key=KEY) as service,
    ):
        sampling = Sampler(service.create_sampling_client(base_model="stub/model"))
        gateway = Gateway(sampling)
        for agents in [1] if options.count else options.agents:
            turns = max(options.samples // (8 if options.count else 1) // agents, 1)
            pair = Pair(sampling, gateway, agents, turns)
            if options.count:
                count_instructions(pair, turns, options.top)
            else:
                found = measure_cpu(pair, agents * turns, options.rounds)
                plain, through = (statistics.median(column) for column in zip(*found, strict=True))
                added = sorted(second - first for first, second in found)
                print(
                    f"{agents:4} agents: sample {plain:.3f} ms, through the gateway {through:.3f}, "
                    f"added {statistics.median(added):.3f} ({added[0]:.3f} - {added[-1]:.3f})",
                    flush=True,
                )
            pair.close()
        gateway.close()


if __name__ == "__main__":
    main()
