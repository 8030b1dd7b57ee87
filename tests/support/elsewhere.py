"""Functions that tests run in other processes, in a module that pickle can import. Each takes a client."""

from __future__ import annotations

import os
from typing import Any

from tinker_sync import types


def sample_twice(client: Any) -> tuple[int, list[list[int]]]:
    """Take two samples with a client. Return the id of this process, and the tokens of each sample."""
    prompt, params = types.ModelInput.from_ints([1, 2, 3]), types.SamplingParams(max_tokens=2)
    futures = [client.sample(prompt, 1, params) for _ in range(2)]
    sampled = [list(future.result(120).sequences[0].tokens) for future in futures]
    return os.getpid(), sampled
