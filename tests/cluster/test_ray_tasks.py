"""Tasks of Ray that sample: refusals hold for the cluster, usage adds up, and a lost board is made again."""

from __future__ import annotations

import os
import time
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


def service_of(stub: Any) -> tinker_sync.ServiceClient:
    return tinker_sync.ServiceClient(base_url=stub.url, api_key=KEY)


def sampler(service: tinker_sync.ServiceClient, model: str = MODEL) -> tinker_sync.SamplingClient:
    return service.create_sampling_client(base_model=model).result()


def spread(cluster: Any, sampling: tinker_sync.SamplingClient, count: int, in_flight: int = 64) -> int:
    """Sample `count` prompts of three tokens in several tasks; return the number of responses."""

    def sample_part(sampling: tinker_sync.SamplingClient, part: range) -> int:
        from tinker_sync.ray import share_limits

        shared = share_limits(sampling)
        prompts = [[1 + number % 97, 1 + number // 97, 3] for number in part]
        items = sampling.map(prompts, PARAMS, max_in_flight=in_flight, progress=False)
        good = sum(item.ok for item in items)
        shared.report_usage()
        return good

    # A task on each processor, so that none shares a process with another one.
    task = cluster.remote(num_cpus=4 // WORKERS)(sample_part)
    parts = [range(at, count, WORKERS) for at in range(WORKERS)]
    return sum(cluster.get([task.remote(sampling, part) for part in parts]))


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


def test_the_names_of_earlier_versions_say_what_to_use() -> None:
    from tinker_sync import ray

    for name in ("map", "SamplerPool"):
        with pytest.raises(AttributeError, match=r"tinker_sync\.ray\.Sampler samples a data set"):
            getattr(ray, name)


def test_usage_of_all_processes_adds_up_also_when_the_board_is_lost(cluster: Any) -> None:
    from tinker_sync.ray import NAME, NAMESPACE, cluster_usage, share_limits

    with StubServer() as stub, service_of(stub) as service:
        sampling = sampler(service, "stub/model")
        assert spread(cluster, sampling, 50) == 50
        cluster.kill(cluster.get_actor(NAME, namespace=NAMESPACE))
        assert spread(cluster, sampling, 50) == 50
        answered = TokenCounts(prompt=3 * 100, sampled=2 * 100)
        until(lambda: cluster_usage(sampling) == {"stub/model": answered})
        share_limits(sampling).stop()


def test_a_refusal_holds_for_all_processes(cluster: Any) -> None:
    from tinker_sync.ray import cluster_usage, share_limits

    count = max(150, PROMPTS)
    # A refusal of this length also refuses the first samples after the pause.
    answer_s, lasts_s = (0.5, 1.0) if PROMPTS < 1000 else (1.0, Storm.PAUSE_S + 1)
    storm = Storm(lasts_s, answer_s)
    with StubServer() as stub, service_of(stub) as service:
        stub.script("/asample", *[storm] * (2 * count))
        sampling = sampler(service, "stub/model")
        assert spread(cluster, sampling, count, in_flight=32) == count
        answered = TokenCounts(prompt=3 * count, sampled=2 * count)
        until(lambda: cluster_usage(sampling) == {"stub/model": answered})  # a report may be on its way
        share_limits(sampling).stop()
    arrivals = storm.arrivals
    # On a busy machine, a process may still send before it learns of the refusal, so the common pause is
    # shorter.
    pauses = [after for before, after in pairwise(arrivals) if after - before > Storm.PAUSE_S / 2]
    assert pauses, "the processes went on while the server refused one of them"
    for reopened_s in pauses:
        # The rate of all processes together begins with this one, and no more than doubles in a second.
        first = [at_s for at_s in arrivals if reopened_s <= at_s < reopened_s + answer_s]
        assert 1 <= len(first) <= 2 * FIRST_RATE * answer_s
    assert pauses[-1] > arrivals[60] + lasts_s


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


def test_without_a_key_the_error_names_the_variable(cluster: Any) -> None:
    def sample(sampling: tinker_sync.SamplingClient) -> str:
        try:
            sampling.sample(tinker_sync.ModelInput.from_ints([1]), 1, PARAMS).result()
        except tinker_sync.TinkerError as error:
            return str(error)
        return "sampled"

    with LocalServer(model=MODEL, key="tml-another") as server, server.service() as service:
        task = cluster.remote(sample)
        assert "TINKER_API_KEY" in cluster.get(task.remote(sampler(service)))


def test_reinforcement_learning_with_rollouts_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tinker_sync.examples.cluster import ray_rollouts

    monkeypatch.setattr(ray_rollouts, "STEPS", 1)
    monkeypatch.setattr(ray_rollouts, "ANIMALS", ("owl", "frog"))
    ray_rollouts.main()
    assert capsys.readouterr().out.count("mean reward") == 1
