"""Clients count the same tokens as the embedded server bills, in spite of faults on the way.

`USAGE_ROUNDS=200 pytest tests/insight/test_billed.py` runs more fault plans than the default suite.
"""

from __future__ import annotations

import os
import random
from datetime import datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest

import tinker_sync
from tinker_sync.insight import TokenCounts
from tinker_sync.losses import numpy_loss
from tinker_sync.testing import FaultPlan, LocalServer, faults
from tinker_sync.types import Datum, ModelInput, SamplingParams

MODEL = "tinker-sync/random"
ROUNDS = int(os.environ.get("USAGE_ROUNDS", "3"))
SUBMITS = ("forward_backward", "asample", "optim_step", "save_weights_for_sampler", "create_model")
# With these faults the server never repeats finished work and never loses a result.
WRONG = (
    faults.too_many_requests(),
    faults.too_many_requests(retry_after=0.1, form="milliseconds"),
    faults.status(503),
    faults.status(500),
    faults.reset(),
    faults.reset(after_work=True),
    faults.hang_up(after_work=True),
    faults.lost_answer(),
    faults.truncated(0.4),
)
WAITING = (*WRONG, faults.queue_paused())


def wrong_plan(draw: random.Random) -> FaultPlan:
    plan = FaultPlan().on("asample", draw.choice(WRONG), nth=1)
    for _ in range(draw.randint(5, 25)):
        endpoint = draw.choice((*SUBMITS, "retrieve_future", "retrieve_futures"))
        kinds = WAITING if endpoint.startswith("retrieve") else WRONG
        plan = plan.on(endpoint, draw.choice(kinds), nth=draw.randint(1, 12))
    return plan


def datum(length: int) -> Datum:
    tokens = np.arange(length) % 200 + 1
    return Datum(ModelInput.from_ints(tokens), {"target_tokens": tokens, "weights": np.ones(length)})


@numpy_loss
def own_loss(data: Any, logprobs: Any) -> Any:
    return -sum(float(one.sum()) for one in logprobs), {}, [-np.ones_like(one) for one in logprobs]


def work(service: tinker_sync.ServiceClient, draw: random.Random) -> TokenCounts:
    """Train and sample with random data. Return the token counts that are known in advance."""
    training = service.create_lora_training_client(MODEL, rank=2).result()
    lengths = [[draw.randint(1, 20) for _ in range(draw.randint(1, 8))] for _ in range(4)]
    pending: list[Any] = [
        training.forward_backward([datum(n) for n in batch], "cross_entropy") for batch in lengths
    ]
    pending.append(training.forward([datum(9)], "cross_entropy"))
    pending.append(training.forward_backward_custom([datum(5), datum(6)], own_loss))
    pending.append(training.optim_step(tinker_sync.AdamParams(learning_rate=1e-3)))
    sampling = training.save_weights_and_get_sampling_client().result()
    prompts = [[draw.randint(1, 200) for _ in range(draw.randint(1, 40))] for _ in range(4)]
    for number in range(12):
        params = SamplingParams(max_tokens=draw.randint(1, 12), stop=[7, 8, 9], seed=number)
        # Prompts repeat, so the server finds some of their tokens in its cache.
        prompt = ModelInput.from_ints(prompts[number % len(prompts)])
        pending.append(sampling.sample(prompt, draw.randint(1, 3), params))
    pending.append(sampling.compute_logprobs(ModelInput.from_ints(prompts[0])))
    base = service.create_sampling_client(base_model=MODEL).result()
    pending.append(base.sample(ModelInput.from_ints(prompts[1]), 2, SamplingParams(max_tokens=3)))
    for future in pending:
        future.result(120)
    # A custom loss takes a forward and a backward pass.
    return TokenCounts(trained=sum(sum(batch) for batch in lengths) + 9 + 2 * 11)


def billed(service: tinker_sync.ServiceClient) -> TokenCounts:
    """Return the tokens that the server bills for the session of a client."""
    now = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    admin = tinker_sync.AdminClient(service.holder)
    bill = admin.get_billing_usage(now - timedelta(hours=2), now + timedelta(hours=2)).result(120)
    found = TokenCounts()
    for event in bill.data:
        if event.session_id == service.holder.get_session_id():
            info = event.event_info
            kind = {"training": "trained", "sampling_sample": "sampled"}.get(info.type)
            kind = kind or ("cached" if info.cached else "prompt")
            found += TokenCounts(**{kind: info.token_count})
    return found


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_counted_tokens_equal_billed_tokens(seed: int) -> None:
    draw = random.Random(seed)
    settings = {"fwdbwd_max_chunk_len": 3, "sample_use_retrieve_futures": draw.random() < 0.5}
    # The first round has no faults.
    plan = wrong_plan(draw) if seed else FaultPlan()
    with LocalServer(plan, model=MODEL, **settings) as server, server.service() as service:
        known = work(service, draw)
        usage = service.usage()
        bill = billed(service)
        struck = len(plan.rules) - len(server.pending_faults)
    assert bill == usage.tokens, f"{plan}"
    assert usage.tokens.trained == known.trained
    assert usage.tokens.sampled > 20
    assert [(row.base_model, row.cost_usd) for row in usage.rows] == [(MODEL, 0.0)]
    assert not seed or struck


def test_lost_result_is_a_difference() -> None:
    """The server computes and bills a sample twice, because one result is lost. The client counts one."""
    plan = FaultPlan().on("retrieve_future", faults.status(410), nth=1)
    with (
        LocalServer(plan, model=MODEL, sample_use_retrieve_futures=False) as server,
        server.service() as service,
    ):
        sampling = service.create_sampling_client(base_model=MODEL).result()
        prompt = ModelInput.from_ints([1, 2, 3])
        sampled = sampling.sample(prompt, 1, SamplingParams(max_tokens=4, seed=1)).result(120)
        counted, bill = service.usage().tokens, billed(service)
    length = len(sampled.sequences[0].tokens)
    assert counted.sampled == length
    assert bill.sampled == 2 * length
    assert bill.prompt + bill.cached == 2 * (counted.prompt + counted.cached) == 6
