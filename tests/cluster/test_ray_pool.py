"""A pool of samplers: every prompt gets one result, refusals hold for the cluster, usage adds up."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from cluster.conftest import KEY, WORKERS

import tinker_sync
from tinker_sync.runtime.rate_limiter import FIRST_WINDOW
from tinker_sync.testing import FaultPlan, LocalServer, faults
from tinker_sync.types import SamplingParams

# CLUSTER_PROMPTS=5000 is the long form.
PROMPTS = int(os.environ.get("CLUSTER_PROMPTS", "300"))
MODEL = "tinker-sync/random"
PARAMS = SamplingParams(max_tokens=2, seed=7)

pytestmark = pytest.mark.usefixtures("cluster")


def prompts(count: int = PROMPTS) -> Iterator[list[int]]:
    """Prompts that differ from each other."""
    return ([1 + number % 97, 1 + number // 97, 3] for number in range(count))


def sampler(server: LocalServer, service: tinker_sync.ServiceClient) -> tinker_sync.SamplingClient:
    return service.create_sampling_client(base_model=MODEL).result()


def test_every_prompt_has_its_response() -> None:
    from tinker_sync import ray as cluster

    with LocalServer(model=MODEL, key=KEY, process=True) as server, server.service() as service:
        sampling = sampler(server, service)
        alone = [item.result() for item in sampling.map(prompts(40), PARAMS, progress=False)]
        spread = list(cluster.map(sampling, prompts(40), PARAMS, workers=WORKERS, progress=False))
    assert [item.index for item in spread] == list(range(40))
    assert [item.result().sequences[0].tokens for item in spread] == [
        response.sequences[0].tokens for response in alone
    ]


def test_a_killed_worker_loses_and_doubles_nothing(cluster: Any) -> None:
    from tinker_sync.ray import SamplerPool

    with LocalServer(model=MODEL, key=KEY, process=True) as server, server.service() as service:
        sampling = sampler(server, service)
        with SamplerPool(sampling, workers=WORKERS, max_in_flight=64) as pool:
            items = pool.map(prompts(), PARAMS, progress=False, ordered=False)
            seen = [next(items) for _ in range(PROMPTS // 4)]
            victims = pool.process_ids()
            os.kill(victims[0], signal.SIGKILL)
            seen += list(items)
            assert len(set(pool.process_ids()) - set(victims)) == 1
    assert sorted(item.index for item in seen) == list(range(PROMPTS))
    assert all(item.ok for item in seen)


def test_a_refused_prompt_is_an_item() -> None:
    from tinker_sync import ray as cluster

    wrong = [[1, 2], [], [3, -4], [5]]
    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        items = list(cluster.map(sampler(server, service), wrong, PARAMS, workers=1, progress=False))
    assert [item.ok for item in items] == [True, False, False, True]
    assert isinstance(items[1].error, tinker_sync.errors.TinkerError)


def test_leaving_the_loop_ends_the_workers() -> None:
    from tinker_sync import ray as cluster

    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        sampling = sampler(server, service)
        items = cluster.map(sampling, prompts(), PARAMS, workers=1, max_in_flight=8, progress=False)
        next(items)
        items.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tinker-ray")]
        submitted = len(server.calls_to("asample"))
    assert submitted < PROMPTS


def test_a_refusal_holds_for_all_processes() -> None:
    from tinker_sync.ray import SamplerPool

    pause_s, answer_s = 3.0, 0.5
    plan = (
        FaultPlan()
        .latency("asample", answer_s)
        .on("asample", faults.too_many_requests(retry_after=pause_s), nth=range(60, 65))
    )
    with LocalServer(plan, model=MODEL, key=KEY, pace=1.0) as server, server.service() as service:
        sampling = sampler(server, service)
        with SamplerPool(sampling, workers=WORKERS, max_in_flight=32) as pool:
            items = list(pool.map(prompts(150), PARAMS, progress=False))
        arrivals = [(call.at_s, call.status) for call in server.calls_to("asample")]
    assert all(item.ok for item in items)
    arrivals.sort()
    last_refused_s = max(at_s for at_s, status in arrivals if status == 429)
    gap_s, reopened_s = max((after - before, after) for (before, _), (after, _) in pairwise(arrivals))
    assert gap_s > pause_s / 3, "the processes went on while the server refused one of them"
    assert reopened_s > last_refused_s
    # Answers take `answer_s`, so these are sent before the first success widens a window.
    first = [at_s for at_s, _ in arrivals if reopened_s <= at_s < reopened_s + answer_s]
    assert 1 <= len(first) <= FIRST_WINDOW


def test_usage_of_all_processes_is_what_the_server_bills() -> None:
    from tinker_sync.ray import SamplerPool, cluster_usage, share_limits

    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        shared = share_limits(service)
        sampling = sampler(server, service)
        sampling.sample(tinker_sync.ModelInput.from_ints([1, 2, 3]), 1, PARAMS).result()
        shared.report_usage()
        with SamplerPool(sampling, workers=WORKERS, max_in_flight=16) as pool:
            assert all(item.ok for item in pool.map(prompts(60), PARAMS, progress=False))
        [(model, used)] = cluster_usage(service).items()
        billed = service.reconcile().billed
        shared.stop()
    assert (model, used) == (MODEL, billed)


def test_without_a_key_the_error_names_the_variable() -> None:
    from tinker_sync.ray import SamplerPool

    with LocalServer(model=MODEL, key="tml-another") as server, server.service() as service:
        sampling = sampler(server, service)
        with SamplerPool(sampling, workers=1) as pool:
            future = pool.sample(tinker_sync.ModelInput.from_ints([1]), 1, PARAMS)
            with pytest.raises(tinker_sync.errors.TinkerError, match="TINKER_API_KEY"):
                future.result()


@pytest.mark.parametrize("ahead", [0, 1])
def test_reinforcement_learning_with_rollouts_elsewhere(ahead: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from tinker_sync.examples.cluster import ray_rollouts

    with LocalServer(key=KEY, process=True) as server:
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        rewards = ray_rollouts.main(["--steps", "2", "--base-url", server.url], ahead=ahead)
    assert len(rewards) == 2
