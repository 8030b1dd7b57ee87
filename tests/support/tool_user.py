"""A small model that has learned to call a tool: it asks `add` for each sum, and repeats the result."""

from __future__ import annotations

import random
from typing import Any

from support.chat_templates import ADD, TAGGED

from tinker_sync import AdamParams, SamplingClient, ServiceClient, data

STEPS, BATCH = 36, 8


def lesson(rng: random.Random) -> list[dict[str, Any]]:
    first, second = rng.randrange(10), rng.randrange(10)
    function = {"name": "add", "arguments": {"a": first, "b": second}}
    call = {"id": "c", "type": "function", "function": function}
    return [
        {"role": "user", "content": f"What is {first}+{second}?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(first + second)},
        {"role": "assistant", "content": f"{first + second}"},
    ]


def train_tool_user(service: ServiceClient) -> SamplingClient:
    """Return a client of the trained weights; the lessons have the template `TAGGED` and the tool `ADD`."""
    rng = random.Random(0)
    training = service.create_lora_training_client("tinker-sync/tiny", rank=16, seed=1)
    tokenizer = training.get_tokenizer()
    options = {"tools": [ADD], "chat_template": TAGGED}
    for _ in range(STEPS):
        batch = [data.from_chat(lesson(rng), tokenizer, **options) for _ in range(BATCH)]
        training.forward_backward(batch, "cross_entropy")
        training.optim_step(AdamParams(learning_rate=1e-2))
    return training.save_weights_and_get_sampling_client()
