"""Training on a chat and on samples, with the tokenizer of the embedded server's model."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jinja2")

from tinker_sync import AdamParams, ModelInput, SamplingParams, Tokenizer, data
from tinker_sync.local import tiny
from tinker_sync.testing import LocalServer


def test_chat_training_learns() -> None:
    with LocalServer() as server, server.service() as service:
        training = service.create_lora_training_client(tiny.NAME, rank=4).result()
        tokenizer = training.get_tokenizer()
        assert isinstance(tokenizer, Tokenizer)
        assert tokenizer.name_or_path == str(tiny.directory())

        sampling = service.create_sampling_client(base_model=tiny.NAME).result()
        assert sampling.get_tokenizer() is tokenizer  # loaded once for both clients

        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": "purple"},
        ]
        datum = data.from_chat(chat, tokenizer)
        losses = []
        for _ in range(3):
            passed = training.forward_backward([datum], "cross_entropy")
            training.optim_step(AdamParams(learning_rate=1e-2))
            losses.append(passed.result(120).metrics["loss:sum"])
        assert losses[2] < losses[1] < losses[0]

        ids = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
        prompt = ModelInput.from_ints(ids)
        sampled = sampling.sample(prompt, 2, SamplingParams(max_tokens=4, seed=1)).result(120)
        assert all(tokenizer.decode(sequence.tokens) for sequence in sampled.sequences)
        group = data.from_samples(prompt, sampled, [1.0, -1.0])
        outcome = training.forward_backward(group, "importance_sampling").result(120)
        assert len(outcome.loss_fn_outputs) == 2
