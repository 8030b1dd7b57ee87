"""What a process does that trains until it is killed. It tells of losses and checkpoint in lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TextIO

from tinker_sync.clients.service import ServiceClient
from tinker_sync.demo.student import Student


def train(told: Mapping[str, Any], out: TextIO) -> None:
    """Learn to sort, save once on the way, and go on to the end, if there is one."""

    def tell(**words: Any) -> None:
        out.write(json.dumps(words) + "\n")
        out.flush()

    with ServiceClient(base_url=told["base_url"]) as service:
        training = service.create_lora_training_client(told["model"], rank=told["rank"], seed=told["seed"])
        student = Student(training, told["seed"], in_turn=True)
        for step, rate in enumerate(told["rates"]):
            if step == told["save_after"]:
                tell(checkpoint=training.save_state("sorting").result().path)
            tell(loss=student.learn_sorting(step, rate))
