"""The code that does what the demo shows, to take home. A test runs it as it is printed."""

from __future__ import annotations

from typing import Final

RECIPE: Final = """\
import random
import numpy as np
import tinker_sync as tinker
from tinker_sync.data import from_completion, from_samples

with tinker.ServiceClient(base_url="local") as service:
    training = service.create_lora_training_client("tinker-sync/tiny", rank=16)
    tokenizer = training.get_tokenizer()
    for step in range(80):  # supervised: this is how it should have gone on
        numbers = [f"{random.randrange(100000):05}" for _ in range(64)]
        data = [from_completion(f"sort: {n} ->", f" {''.join(sorted(n))}\\n", tokenizer) for n in numbers]
        training.forward_backward(data, "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    path = training.save_state("sorted").result().path  # what any process can go on from

    training = service.create_training_client_from_state_with_optimizer(path)
    prompt = tinker.ModelInput.from_ints(tokenizer.encode("It was a sunny day."))
    for step in range(20):  # reinforcement: this is how good it was
        sampling = training.save_weights_and_get_sampling_client()
        sampled = sampling.sample(prompt, 32, tinker.SamplingParams(max_tokens=48)).result()
        rewards = np.array(["owl" in tokenizer.decode(one.tokens) for one in sampled.sequences], float)
        data = from_samples(prompt, sampled, rewards - rewards.mean())
        training.forward_backward(data, "importance_sampling")
        training.optim_step(tinker.AdamParams(learning_rate=2e-3)).result()
        print(step, rewards.mean())
"""

HOSTED: Final = """\
The same on the hosted service: put your key into TINKER_API_KEY, write ServiceClient() without base_url, and
name a model that it offers (tinker-sync model list) with a learning rate that suits it, such as 1e-4.\
"""
