"""Measure the CPU and the peak memory of the protobuf codecs, beside the reference client's.

    python benchmarks/bench_wire.py [--rounds N]        (needs the `interop` extra)

The measured work is that of a training step between the user's arrays and the bytes of a body, and back:

  encode   1024 data of 2048 tokens with target_tokens (int64), weights, logprobs and advantages (float32), 50
           MB, in chunks of at most 5,000,000 estimated bytes. Each chunk is encoded, joined and dropped
           before the next. The reference builds its object tree and serializes it.
  decode   one answer with 1024 arrays of 2048 float32, 8 MB.

The reference takes tokens only as lists. For "from numpy" its chunks are made without validation, so that
both sides start from the same arrays. "from token lists" starts from data whose tokens are lists, as in every
script for the reference. "from lists, built too" also counts the making of the data, from lists alone.

The floor is one copy of the same bytes, which no codec avoids: for encode, into bodies of the same chunks;
for decode, into an array for each datum. CPU is process time, the median over rounds in which all take turns.
Peak memory is measured twice, each time in fresh interpreters: as the growth of the allocations of Python and
numpy (tracemalloc), and as the growth of the resident set. The object tree of the reference is in the memory
of its library, so only the resident set includes it.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
if importlib.util.find_spec("tinker_sync") is None:
    sys.path.insert(0, str(ROOT))

DATA = 1024
TOKENS = 2048
CHUNK_BYTES = 5_000_000
INPUTS = {"target_tokens": "int64", "weights": "float32", "logprobs": "float32", "advantages": "float32"}
DATUM_BYTES = TOKENS * (4 + 8 + 4 + 4 + 4)
CHUNK_DATA = CHUNK_BYTES // DATUM_BYTES
MEGABYTE = 1e6

Raw = list[tuple[Any, dict[str, Any]]]


# ------------------------------------------------------------------------------------------ content


def raw_arrays() -> Raw:
    """Return the tokens and the inputs of every datum, as arrays that share no memory."""
    rng = np.random.default_rng(1)
    return [(rng.integers(0, 150_000, TOKENS, dtype=np.int32), _inputs(rng)) for _ in range(DATA)]


def _inputs(rng: np.random.Generator) -> dict[str, Any]:
    whole = {name: rng.integers(0, 150_000, TOKENS) for name, dtype in INPUTS.items() if dtype == "int64"}
    return {name: whole.get(name, rng.standard_normal(TOKENS, dtype=np.float32)) for name in INPUTS}


def listed(raw: Raw, inputs_too: bool) -> Raw:
    """Return the same data with lists in place of the token arrays, or of all arrays."""
    return [
        (tokens.tolist(), {name: array.tolist() if inputs_too else array for name, array in inputs.items()})
        for tokens, inputs in raw
    ]


def in_chunks(items: list[Any]) -> Iterator[list[Any]]:
    """Yield the items in chunks, as the client splits them: it estimates 24 bytes for each token."""
    for start in range(0, len(items), CHUNK_DATA):
        yield items[start : start + CHUNK_DATA]


# ------------------------------------------------------------------------------------------ this package


def our_data(raw: Raw) -> list[Any]:
    from tinker_sync.types import Datum, ModelInput

    return [Datum(ModelInput.from_ints(tokens), inputs) for tokens, inputs in raw]


def our_body(data: list[Any]) -> bytes:
    from tinker_sync.types import ForwardBackwardInput, ForwardBackwardRequest
    from tinker_sync.wire.proto.requests import encode_forward_backward_request

    request = ForwardBackwardRequest(ForwardBackwardInput(data, "cross_entropy"), "model-1", 1)
    return encode_forward_backward_request(request).join()


def our_decode(body: bytes) -> Any:
    from tinker_sync.wire.proto.outputs import decode_forward_backward_output

    return decode_forward_backward_output(body)


# ------------------------------------------------------------------------------------- the reference client


def their_data(raw: Raw) -> list[Any]:
    from tinker import types

    def chunk(tokens: Any) -> Any:
        if isinstance(tokens, list):
            return types.EncodedTextChunk(tokens=tokens)
        return types.EncodedTextChunk.model_construct(tokens=tokens, type="encoded_text")

    return [
        types.Datum(model_input=types.ModelInput(chunks=[chunk(tokens)]), loss_fn_inputs=inputs)
        for tokens, inputs in raw
    ]


def their_body(data: list[Any]) -> bytes:
    from tinker import types
    from tinker.proto.request_conv import forward_backward_request_to_proto

    body = types.ForwardBackwardInput(data=data, loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(forward_backward_input=body, model_id="model-1", seq_id=1)
    return bytes(forward_backward_request_to_proto(request).SerializeToString())


def their_decode(body: bytes) -> Any:
    from tinker.proto.response_conv import deserialize_forward_backward_output

    return deserialize_forward_backward_output(body)


# ------------------------------------------------------------------------------------------ floors


def join_body(data: Raw) -> bytes:
    return b"".join(
        memoryview(array).cast("B") for tokens, inputs in data for array in (tokens, *inputs.values())
    )


def copy_each(flat: np.ndarray) -> list[np.ndarray]:
    return [flat[start : start + TOKENS].copy() for start in range(0, flat.size, TOKENS)]


# ------------------------------------------------------------------------------------------ CPU


def send_all(make_body: Callable[[Any], bytes], data: list[Any]) -> None:
    """Make the bodies of all chunks one after the other, and drop each before the next is made."""
    for chunk in in_chunks(data):
        make_body(chunk)


def build_and_send(
    make_data: Callable[[Raw], list[Any]], make_body: Callable[[Any], bytes], raw: Raw
) -> None:
    send_all(make_body, make_data(raw))


def answer() -> bytes:
    """Return the body of an answer from this package's encoder, which the interop tests check."""
    from tinker_sync.types import ForwardBackwardOutput, TensorData
    from tinker_sync.wire.proto.outputs import encode_forward_backward_output

    values = np.random.default_rng(2).standard_normal((DATA, TOKENS), dtype=np.float32)
    records = [{"logprobs": TensorData.from_numpy(row)} for row in values]
    return encode_forward_backward_output(
        ForwardBackwardOutput("m:ArrayRecord", records, {"loss:sum": 1.0})
    ).join()


Cases = dict[str, Callable[[], Any]]


def comparisons() -> dict[str, tuple[float, Cases]]:
    """Return, by the name of a comparison, the limit for our share of their CPU, and the timed functions."""
    raw = raw_arrays()
    token_lists, all_lists = listed(raw, inputs_too=False), listed(raw, inputs_too=True)
    body = answer()
    flat = np.frombuffer(body, np.float32, DATA * TOKENS)
    floor = partial(send_all, join_body, raw)
    return {
        "encode from numpy": (
            0.5,
            {
                "ours": partial(send_all, our_body, our_data(raw)),
                "theirs": partial(send_all, their_body, their_data(raw)),
                "floor": floor,
            },
        ),
        "encode from token lists": (
            0.6,
            {
                "ours": partial(send_all, our_body, our_data(token_lists)),
                "theirs": partial(send_all, their_body, their_data(token_lists)),
                "floor": floor,
            },
        ),
        "encode from lists, built too": (
            0.6,
            {
                "ours": partial(build_and_send, our_data, our_body, all_lists),
                "theirs": partial(build_and_send, their_data, their_body, all_lists),
                "floor": floor,
            },
        ),
        "decode": (
            0.5,
            {
                "ours": partial(our_decode, body),
                "theirs": partial(their_decode, body),
                "floor": partial(copy_each, flat),
            },
        ),
    }


def medians(cases: Cases, rounds: int) -> dict[str, float]:
    """Return the milliseconds of CPU of each case: the median of the rounds after one that warms up."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds + 1):
        for name, run in cases.items():
            gc.collect()
            started = time.process_time()
            run()
            times[name].append((time.process_time() - started) * 1e3)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def print_cpu(rounds: int) -> bool:
    print(f"{'CPU, ms':32}{'ours':>9}{'theirs':>9}{'ratio':>8}{'limit':>7}{'floor':>8}")
    held = True
    for name, (limit, cases) in comparisons().items():
        found = medians(cases, rounds)
        ratio = found["ours"] / found["theirs"]
        held &= ratio <= limit
        print(
            f"{name:32}{found['ours']:9.1f}{found['theirs']:9.1f}{ratio:8.2f}{limit:7.1f}{found['floor']:8.1f}"
        )
    return held


# ------------------------------------------------------------------------------------------ memory

MEMORY_CASES: dict[str, tuple[Callable[[Raw], list[Any]], Callable[[Any], bytes]]] = {
    "ours": (our_data, our_body),
    "theirs": (their_data, their_body),
    "floor": (list, join_body),
}


def measure_memory(case: str, traced: bool) -> int:
    """Return the peak growth of memory, in bytes, while all chunks are encoded. Call it in a new process."""
    make_data, make_body = MEMORY_CASES[case]
    data = make_data(raw_arrays())
    make_body(data[:1])  # so that imports and tables do not count
    gc.collect()
    if traced:
        tracemalloc.start()
        send_all(make_body, data)
        return tracemalloc.get_traced_memory()[1]
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _resident("VmRSS")
    send_all(make_body, data)
    return _resident("VmHWM") - before


def _resident(name: str) -> int:
    """Return the resident set, `VmRSS`, or its peak, `VmHWM`, in bytes. Linux only."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024


def print_memory() -> bool:
    kinds = ("traced", "resident") if sys.platform == "linux" else ("traced",)
    print(f"\n{'peak growth, MB':32}" + "".join(f"{kind:>9}" for kind in kinds))
    found = {}
    for case in MEMORY_CASES:
        found[case] = [_in_fresh_interpreter(case, kind) / MEGABYTE for kind in kinds]
        print(f"encode from numpy, {case:13}" + "".join(f"{grown:9.2f}" for grown in found[case]))
    # The bound has room for one chunk, and for the frames and views from which it is joined.
    return max(found["ours"]) <= 1.2 * CHUNK_BYTES / MEGABYTE


def _in_fresh_interpreter(case: str, kind: str) -> int:
    found = subprocess.run(
        [sys.executable, __file__, "--memory", case, kind], check=True, capture_output=True, text=True
    )
    return int(json.loads(found.stdout))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory:
        case, kind = arguments.memory
        print(json.dumps(measure_memory(case, kind == "traced")))
        return 0
    print(f"Python {sys.version.split()[0]}, numpy {np.__version__}, {arguments.rounds} rounds\n")
    held = [print_cpu(arguments.rounds), print_memory()]
    print("\nall limits hold" if all(held) else "\nA LIMIT DOES NOT HOLD")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
