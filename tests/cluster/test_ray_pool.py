"""A pool of samplers: every prompt gets one result, refusals hold for the cluster, usage adds up."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from cluster.conftest import KEY, WORKERS
from support.crowd import until
from support.tinker_stub import Answer, Asked, StubServer

import tinker_sync
from tinker_sync.insight.meter import TokenCounts
from tinker_sync.runtime.rate_limiter import FIRST_RATE
from tinker_sync.testing import LocalServer
from tinker_sync.types import SamplingParams

# CLUSTER_PROMPTS=5000 runs the long version.
PROMPTS = int(os.environ.get("CLUSTER_PROMPTS", "300"))
MODEL = "tinker-sync/random"
PARAMS = SamplingParams(max_tokens=2, seed=7)

pytestmark = pytest.mark.usefixtures("cluster")


def prompts(count: int = PROMPTS) -> Iterator[list[int]]:
    """Yield `count` prompts, no two of which are equal."""
    return ([1 + number % 97, 1 + number // 97, 3] for number in range(count))


def service_of(stub: Any) -> tinker_sync.ServiceClient:
    return tinker_sync.ServiceClient(base_url=stub.url, api_key=KEY)


class Storm:
    """A script of answers: the server accepts 60 samples, refuses all for `lasts_s`, and then accepts again.

    It answers the first 300 accepted samples after `answer_s`.
    """

    PAUSE_S = 8.0

    def __init__(self, lasts_s: float, answer_s: float) -> None:
        self.arrivals: list[float] = []
        self.refused = 0
        self._lasts_s = lasts_s
        self._late = Answer(usual=True, delay_s=answer_s)

    def __call__(self, _: Asked) -> Answer:
        self.arrivals.append(time.monotonic())
        if len(self.arrivals) > 60 and self.arrivals[-1] < self.arrivals[60] + self._lasts_s:
            self.refused += 1
            return Answer(429, {"detail": "too many"}, {"Retry-After": str(self.PAUSE_S)})
        # After 300 accepted samples, answers come at once.
        return self._late if len(self.arrivals) - self.refused < 300 else Answer(usual=True)


def sampler(service: tinker_sync.ServiceClient) -> tinker_sync.SamplingClient:
    return service.create_sampling_client(base_model=MODEL).result()


def test_every_prompt_has_its_response() -> None:
    from tinker_sync import ray as cluster

    with LocalServer(model=MODEL, key=KEY, process=True) as server, server.service() as service:
        sampling = sampler(service)
        alone = [item.result() for item in sampling.map(prompts(40), PARAMS, progress=False)]
        spread = list(cluster.map(sampling, prompts(40), PARAMS, workers=WORKERS, progress=False))
    assert [item.index for item in spread] == list(range(40))
    assert [item.result().sequences[0].tokens for item in spread] == [
        response.sequences[0].tokens for response in alone
    ]


def _sampled(usage: dict[str, TokenCounts]) -> int:
    return sum(counts.sampled for counts in usage.values())


def test_a_killed_worker_loses_and_doubles_nothing() -> None:
    from tinker_sync.ray import SamplerPool, cluster_usage, share_limits

    under_way = 2 * 64 // WORKERS  # the tokens of the samples that one worker has under way
    with StubServer() as stub, service_of(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model").result()
        with SamplerPool(sampling, workers=WORKERS, max_in_flight=64) as pool:
            items = pool.map(prompts(), PARAMS, progress=False, ordered=False)
            seen = [next(items) for _ in range(PROMPTS // 4)]
            victims = pool.process_ids()
            os.kill(victims[0], signal.SIGKILL)
            seen += list(items)
            assert len(set(pool.process_ids()) - set(victims)) == 1
            served = 2 * len(stub.asked("/asample"))
            # Every result is counted, but its report may arrive later.
            until(lambda: _sampled(cluster_usage(sampling)) >= 2 * PROMPTS)
            # The killed process could not report the samples that it had under way; they were sampled again.
            assert 0 <= served - _sampled(cluster_usage(sampling)) <= under_way
        share_limits(sampling).stop()
    assert sorted(item.index for item in seen) == list(range(PROMPTS))
    assert all(item.ok for item in seen)
    assert served <= 2 * PROMPTS + under_way


def test_a_board_that_is_lost_is_made_again(cluster: Any) -> None:
    from tinker_sync.ray import SamplerPool, cluster_usage, share_limits
    from tinker_sync.ray.sharing import NAME, NAMESPACE

    with StubServer() as stub, service_of(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model").result()
        with SamplerPool(sampling, workers=WORKERS, max_in_flight=16) as pool:
            items = pool.map(prompts(100), PARAMS, progress=False)
            seen = [next(items) for _ in range(50)]
            cluster.kill(cluster.get_actor(NAME, namespace=NAMESPACE))
            seen += list(items)
            answered = TokenCounts(prompt=3 * 100, sampled=2 * 100)
            until(lambda: cluster_usage(sampling) == {"stub/model": answered})
        share_limits(sampling).stop()
    assert all(item.ok for item in seen)


def test_a_refused_prompt_is_an_item() -> None:
    from tinker_sync import ray as cluster

    wrong = [[1, 2], [], [3, -4], [5]]
    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        items = list(cluster.map(sampler(service), wrong, PARAMS, workers=1, progress=False))
    assert [item.ok for item in items] == [True, False, False, True]
    assert isinstance(items[1].error, tinker_sync.errors.TinkerError)


def test_leaving_the_loop_ends_the_workers() -> None:
    from tinker_sync import ray as cluster

    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        sampling = sampler(service)
        items = cluster.map(sampling, prompts(), PARAMS, workers=1, max_in_flight=8, progress=False)
        next(items)
        items.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("tinker-ray")]
        submitted = len(server.calls_to("asample"))
    assert submitted < PROMPTS


class _ClosingLock:
    """The lock of a pool. Its first holder closes the pool after the release, as another thread might."""

    def __init__(self, pool: Any) -> None:
        self._pool, self._real = pool, pool._lock

    def __enter__(self) -> None:
        self._pool._lock = self._real
        self._real.acquire()

    def __exit__(self, *_: object) -> None:
        self._real.release()
        self._pool.close()


def test_a_pool_that_closes_during_a_sample_fails_it_as_closed() -> None:
    from tinker_sync.ray import SamplerPool

    with StubServer() as stub, service_of(stub) as service:
        sampling = service.create_sampling_client(base_model="stub/model").result()
        with SamplerPool(sampling, workers=1) as pool:
            pool._lock = _ClosingLock(pool)
            future = pool.sample(next(prompts(1)), 1, PARAMS)
            with pytest.raises(tinker_sync.ClientClosedError):
                future.result(60)


def test_a_refusal_holds_for_all_processes() -> None:
    from tinker_sync.ray import SamplerPool, cluster_usage, share_limits

    count = max(150, PROMPTS)
    # A refusal of this length also refuses the first samples after the pause.
    answer_s, lasts_s = (0.5, 1.0) if PROMPTS < 1000 else (1.0, Storm.PAUSE_S + 1)
    storm = Storm(lasts_s, answer_s)
    with StubServer() as stub, service_of(stub) as service:
        stub.script("/asample", *[storm] * (2 * count))
        sampling = service.create_sampling_client(base_model="stub/model").result()
        with SamplerPool(sampling, workers=WORKERS, max_in_flight=32 * WORKERS) as pool:
            items = list(pool.map(prompts(count), PARAMS, progress=False))
            answered = TokenCounts(prompt=3 * count, sampled=2 * count)
            until(lambda: cluster_usage(sampling) == {"stub/model": answered})  # a report may be on its way
        share_limits(sampling).stop()
    arrivals = storm.arrivals
    assert all(item.ok for item in items)
    assert len(arrivals) == count + storm.refused
    # On a busy machine, a process may still send before it learns of the refusal, so the common pause is
    # shorter.
    pauses = [after for before, after in pairwise(arrivals) if after - before > Storm.PAUSE_S / 2]
    assert pauses, "the processes went on while the server refused one of them"
    for reopened_s in pauses:
        # The rate of all processes together begins with this one, and no more than doubles in a second.
        first = [at_s for at_s in arrivals if reopened_s <= at_s < reopened_s + answer_s]
        assert 1 <= len(first) <= 2 * FIRST_RATE * answer_s
    assert pauses[-1] > arrivals[60] + lasts_s


def test_usage_of_all_processes_is_what_the_server_bills() -> None:
    from tinker_sync.ray import SamplerPool, cluster_usage, share_limits

    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        shared = share_limits(service)
        sampling = sampler(service)
        sampling.sample(tinker_sync.ModelInput.from_ints([1, 2, 3]), 1, PARAMS).result()
        shared.report_usage()
        with SamplerPool(sampling, workers=WORKERS, max_in_flight=64) as pool:
            assert all(item.ok for item in pool.map(prompts(), PARAMS, progress=False))
            billed = service.reconcile().billed
            until(lambda: cluster_usage(service) == {MODEL: billed})  # a report may be on its way
        shared.stop()


def test_a_client_counts_again_after_the_shared_limits_ended() -> None:
    from tinker_sync.ray import cluster_usage, share_limits

    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        sampling = sampler(service)
        share_limits(sampling).stop()  # the end of Ray does so too
        shared = share_limits(sampling)
        sampling.sample(tinker_sync.ModelInput.from_ints([1, 2, 3]), 1, PARAMS).result()
        shared.report_usage()
        until(lambda: cluster_usage(sampling) == {MODEL: TokenCounts(prompt=3, sampled=2)})
        shared.stop()


def test_tasks_of_one_process_share_a_copy(cluster: Any) -> None:
    from tinker_sync import ray as tinker_ray

    def roll_out(sampling: tinker_sync.SamplingClient, number: int) -> tuple[int, int]:
        tinker_ray.share_limits(sampling)
        prompt = tinker_sync.ModelInput.from_ints([1, 2, number])
        sampling.sample(prompt, 1, PARAMS).result()
        return os.getpid(), id(sampling)

    with LocalServer(model=MODEL, key=KEY) as server, server.service() as service:
        sampling = sampler(service)
        task = cluster.remote(num_cpus=4)(roll_out)  # the tasks run one after the other
        places = cluster.get([task.remote(sampling, number) for number in range(6)])
        asked = len(server.calls_to("get_sampler"))
        sessions = len(server.calls_to("create_session"))
    processes = {process for process, _ in places}
    assert len(set(places)) == len(processes)
    assert (asked, sessions) == (0, 1)


def test_without_a_key_the_error_names_the_variable() -> None:
    from tinker_sync.ray import SamplerPool

    with LocalServer(model=MODEL, key="tml-another") as server, server.service() as service:
        sampling = sampler(service)
        with SamplerPool(sampling, workers=1) as pool:
            future = pool.sample(tinker_sync.ModelInput.from_ints([1]), 1, PARAMS)
            with pytest.raises(tinker_sync.errors.TinkerError, match="TINKER_API_KEY"):
                future.result()


def test_reinforcement_learning_with_rollouts_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinker_sync.examples.cluster import ray_rollouts

    monkeypatch.setattr(ray_rollouts, "STEPS", 1)
    monkeypatch.setattr(ray_rollouts, "ANIMALS", ("owl", "frog"))
    ray_rollouts.main()
    assert capsys.readouterr().out.count("mean reward") == 1
