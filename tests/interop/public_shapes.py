"""Seven small scripts in the styles that users write for the reference client.

    python public_shapes.py URL KEY [NAME...]

It prints the numbers of each script, or of those that are named, as JSON. Only the import below differs
between the clients. An empty URL and key stand for those of the environment.
"""

import asyncio
import concurrent.futures
import json
import sys
import threading
import warnings

import tinker

types = tinker.types
BASE = "tinker-sync/tiny"
TOKENS = [40, 41, 42, 43, 44, 45]
STEP = types.AdamParams(learning_rate=1e-2)
WAIT_S = 120


def example(tokens, weights=None):
    targets = tokens[1:]
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens=tokens[:-1]),
        loss_fn_inputs={"target_tokens": targets, "weights": weights or [1.0] * len(targets)},
    )


BATCH = [example(TOKENS), example([50, *TOKENS])]


def nll(output):
    """Return the loss, computed from the log-probabilities of the outputs as in many scripts."""
    return -sum(sum(record["logprobs"].tolist()) for record in output.loss_fn_outputs)


def new_client(service, rank=4):
    return service.create_lora_training_client(base_model=BASE, rank=rank, seed=1)


# ------------------------------------------------------------------------------------------- the scripts


def pipelined(service):
    """Submit the pass and the step, then wait for both, one batch after the other."""
    client, losses = new_client(service), []
    for _ in range(3):
        passed = client.forward_backward(BATCH, "cross_entropy")
        stepped = client.optim_step(STEP)
        losses.append(passed.result().metrics["loss:sum"])
        stepped.result()
    return losses


def thread_pool(service):
    """Sample in a pool of threads, each of which waits for its result."""
    sampler = service.create_sampling_client(base_model=BASE)
    params = types.SamplingParams(max_tokens=4, temperature=0.0)

    def sample(first):
        prompt = types.ModelInput.from_ints([first, 41])
        return (
            sampler.sample(prompt=prompt, sampling_params=params, num_samples=1).result().sequences[0].tokens
        )

    with concurrent.futures.ThreadPoolExecutor(max_workers=4) as pool:
        return [list(tokens) for tokens in pool.map(sample, range(60, 68))]


def timeouts(service):
    """Wait for results with a timeout, and wait again when the timeout has passed."""
    client = new_client(service)
    passed = client.forward_backward(BATCH, "cross_entropy")
    while True:
        try:
            return passed.result(timeout=0.05).metrics["loss:sum"]
        except (TimeoutError, concurrent.futures.TimeoutError):
            continue


def client_in_each_thread(service):
    """Train two models of different ranks, each in its own thread."""
    clients = [new_client(service, rank) for rank in (2, 4)]
    found = [None] * len(clients)

    def train(place):
        clients[place].forward_backward(BATCH, "cross_entropy").result(timeout=WAIT_S)
        clients[place].optim_step(STEP).result(timeout=WAIT_S)
        found[place] = nll(clients[place].forward(BATCH, "cross_entropy").result(timeout=WAIT_S))

    threads = [threading.Thread(target=train, args=(place,)) for place in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def clients_as_futures(service):
    """Wait for clients with `result()` if they have it, else use them at once."""

    def ready(client):
        return client.result() if hasattr(client, "result") else client

    client = ready(new_client(service))
    client.forward_backward(BATCH, "cross_entropy").result()
    client.optim_step(STEP).result()
    sampler = ready(client.save_weights_and_get_sampling_client())
    scores = sampler.compute_logprobs(types.ModelInput.from_ints(TOKENS)).result()
    return [None if score is None else round(score, 4) for score in scores]


def subclassed(service):
    """Use a subclass of the service client with overridden methods."""

    class Counting(tinker.ServiceClient):
        made = 0

        def create_lora_training_client(self, *args, **kwargs):
            type(self).made += 1
            return super().create_lora_training_client(*args, **kwargs)

    mine = Counting(base_url=OPTIONS["base_url"], api_key=OPTIONS["api_key"])
    loss = nll(new_client(mine).forward(BATCH, "cross_entropy").result())
    return [Counting.made, isinstance(mine, tinker.ServiceClient), loss]


def async_loop(service):
    """Train in an event loop: await a future after the next call is submitted, and gather samples."""

    async def main():
        client = await service.create_lora_training_client_async(base_model=BASE, rank=4, seed=1)
        losses = []
        for _ in range(2):
            passed = await client.forward_backward_async(BATCH, "cross_entropy")
            stepped = await client.optim_step_async(STEP)
            losses.append((await passed).metrics["loss:sum"])
            await stepped
        sampler = await client.save_weights_and_get_sampling_client_async()
        params = types.SamplingParams(max_tokens=3, temperature=0.0)
        prompts = [types.ModelInput.from_ints([first, 41]) for first in (40, 50, 60)]
        sampled = await asyncio.gather(*(sampler.sample_async(each, 1, params) for each in prompts))
        return [losses, [list(each.sequences[0].tokens) for each in sampled]]

    return asyncio.run(main())


SHAPES = (
    pipelined, thread_pool, timeouts, client_in_each_thread, clients_as_futures, subclassed, async_loop,
)  # fmt: skip

if __name__ == "__main__":
    warnings.simplefilter("ignore" if tinker.__name__ == "tinker" else "error")
    URL, KEY, *NAMES = sys.argv[1:]
    OPTIONS = {"base_url": URL or None, "api_key": KEY or None}
    numbers = {}
    for shape in SHAPES:
        if NAMES and shape.__name__ not in NAMES:
            continue
        try:
            numbers[shape.__name__] = shape(tinker.ServiceClient(**OPTIONS))
        except ImportError as missing:
            numbers[shape.__name__] = f"skipped: {missing.name}"
    sys.stdout.write(json.dumps(numbers))
