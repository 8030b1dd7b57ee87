"""A program from its start in a fresh interpreter to its first result. It prints its costs until then.

    python _start.py sample|pass|nothing PACKAGE URL

Before the measurement it imports only `sys` and `time`, so that the imports of a client count in full. CPU
counts from the start of the process. torch, an extra of both clients, is hidden from them, because the
reference imports it if it is installed.
"""

import sys
import time

BEGAN_S = time.perf_counter()
KEY = "tml-benchmark"


def sample(tinker, service):
    client = service.create_sampling_client(base_model="stub/model")
    if hasattr(client, "result"):
        client = client.result()
    prompt = tinker.types.ModelInput.from_ints(list(range(20)))
    result = client.sample(prompt, 1, tinker.types.SamplingParams(max_tokens=8)).result()
    assert len(result.sequences[0].tokens) == 8


def train(tinker, service):
    trainer = service.create_lora_training_client(base_model="stub/model", rank=8)
    data = made_data(tinker, 1024, 2048)
    assert len(trainer.forward_backward(data, "cross_entropy").result().loss_fn_outputs) == 1024


def made_data(tinker, count, length):
    import numpy as np

    types = tinker.types
    tokens, targets = np.arange(length, dtype="int32"), np.arange(length)
    floats = {name: np.ones(length, dtype="float32") for name in ("weights", "logprobs", "advantages")}
    if tinker.__name__ == "tinker":  # its constructor takes only lists of tokens, and checks each token
        chunk = types.EncodedTextChunk.model_construct(tokens=tokens, type="encoded_text")
    else:
        chunk = types.EncodedTextChunk(tokens=tokens)
    prompt = types.ModelInput(chunks=[chunk])
    inputs = {**floats, "target_tokens": targets}
    return [types.Datum(model_input=prompt, loss_fn_inputs=inputs) for _ in range(count)]


def main(case, package, url):
    sys.modules["torch"] = None
    if case != "nothing":
        tinker = __import__(package)
        service = tinker.ServiceClient(base_url=url, api_key=KEY)
        (sample if case == "sample" else train)(tinker, service)
    wall_s, cpu_s = time.perf_counter() - BEGAN_S, time.process_time()
    modules = len(sys.modules)
    import json
    import os

    try:
        with open("/proc/self/status") as status:
            peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    except OSError:
        peak_kib = 0
    figures = {"wall_ms": wall_s * 1e3, "cpu_ms": cpu_s * 1e3, "peak_mb": peak_kib * 1024 / 1e6}
    print(json.dumps({**figures, "modules": modules, "numpy": "numpy" in sys.modules}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
