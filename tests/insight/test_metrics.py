"""Counters and percentiles of real calls, of calls that fail, and of calls from many threads."""

from __future__ import annotations

import json
import math
import os
import re
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinker_sync import RequestFailedError, types
from tinker_sync._base.events import CallMade, ReplyReceived, RequestEncoded, RequestLost
from tinker_sync.clients.service import ServiceClient
from tinker_sync.insight.metrics import RELATIVE_ERROR, Quantiles
from tinker_sync.testing import FaultPlan, LocalServer, faults

MODEL = "tinker-sync/random"
PROMPT = types.ModelInput.from_ints([1, 2])
DATUM = types.Datum(types.ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})
SHORT = types.SamplingParams(max_tokens=2)
ADAM = types.AdamParams(learning_rate=1e-3)
SAMPLE = "SamplingClient.sample"


def sample(service: ServiceClient, times: int = 1) -> None:
    sampling = service.create_sampling_client(base_model=MODEL).result()
    for future in [sampling.sample(PROMPT, 1, SHORT) for _ in range(times)]:
        future.result()


@given(st.lists(st.floats(1e-6, 1e7), min_size=1, max_size=200), st.sampled_from([0.5, 0.95, 0.99, 1.0]))
def test_a_percentile_is_as_exact_as_promised(durations: list[float], share: float) -> None:
    taken = Quantiles()
    for each in durations:
        taken.add(each)
    exact = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert taken.quantile(share) == pytest.approx(exact, rel=RELATIVE_ERROR * 1.001)
    assert taken.longest_s == max(durations)
    assert taken.count == len(durations)


def test_the_memory_of_a_distribution_is_bounded() -> None:
    taken = Quantiles()
    for power in range(-400, 400):
        for digit in range(1, 100):
            taken.add(digit * 10 ** (power / 4))
    taken.add(0.0)
    taken.add(math.inf)
    assert len(taken._buckets) <= 749
    assert math.isnan(Quantiles().quantile(0.5))


def test_every_phase_of_every_call_is_measured() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        training = service.create_lora_training_client(MODEL, rank=2).result()
        metrics = service.metrics()
        for _ in range(3):
            training.forward_backward([DATUM], "cross_entropy").result()
            training.optim_step(ADAM).result()
        sample(service, 5)
        times, calls = metrics.times, metrics.calls
    assert calls == {
        SAMPLE: {"ok": 5},
        "TrainingClient.forward_backward": {"ok": 3},
        "TrainingClient.optim_step": {"ok": 3},
    }
    phases = ["encode", "queue", "upload", "server", "decode", "total"]
    assert list(times[SAMPLE]) == list(times["TrainingClient.forward_backward"]) == phases
    for method, each in times.items():
        for figures in each.values():
            assert figures.count == sum(calls[method].values())
            assert 0 <= figures.p50_s <= figures.p95_s <= figures.p99_s <= figures.max_s
            assert 0 <= figures.mean_s <= figures.max_s
        parts = sum(figures.mean_s for phase, figures in each.items() if phase not in ("encode", "total"))
        assert parts == pytest.approx(each["total"].mean_s)


def test_failures_retries_and_pauses_are_counted() -> None:
    plan = FaultPlan().on("asample", faults.status(503), nth=(1, 2)).on("asample", faults.status(429), nth=3)
    plan = plan.on("retrieve_future", faults.queue_paused(reason="all machines are busy"), nth=1)
    plan = plan.on("optim_step", faults.lost_answer(), nth=(1, 2))  # the first costs no attempt
    with LocalServer(model=MODEL) as server, server.service() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result()
        training = service.create_lora_training_client(MODEL, rank=2).result()
        server.plan = plan
        metrics = service.metrics()
        assert set(metrics.counters.values()) == {0}
        sampling.sample(PROMPT, 1, SHORT).result()
        with pytest.raises(RequestFailedError):
            sampling.sample(types.ModelInput.from_ints([10**6]), 1, SHORT).result()
        training.optim_step(ADAM).result()
        counters, calls, times = metrics.counters, metrics.calls, metrics.times
    assert calls[SAMPLE] == {"ok": 1, "RequestFailedError": 1}
    assert calls["TrainingClient.optim_step"] == {"ok": 1}
    assert times[SAMPLE]["total"].count == 1  # the refused one took no time at the server
    assert counters["retries"] == 4
    assert counters["throttled"] == 1
    assert counters["lost"] == 1
    assert counters["errors"] == 3  # and the answer to the poll of the refused sample
    assert counters["pauses"] == 1
    assert counters["polls"] >= 4
    assert counters["attempts"] >= 7


def test_a_cancelled_call_is_counted_as_such() -> None:
    plan = FaultPlan().on("retrieve_future", faults.queue_paused(reason="busy"))
    with LocalServer(plan, model=MODEL) as server, server.service() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result()
        metrics = service.metrics()
        future = sampling.sample(PROMPT, 1, SHORT)
        assert future.cancel()
        with pytest.raises(CancelledError):
            future.result()
        assert metrics.calls == {SAMPLE: {"cancelled": 1}}
        assert metrics.times.get(SAMPLE, {}).keys() <= {"encode"}


def test_a_client_without_metrics_makes_no_events_for_them() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        sample(service)
        events = service.holder.connection.events
        kinds = (CallMade, RequestEncoded, ReplyReceived, RequestLost)
        assert not any(events.wants(kind) for kind in kinds)
        metrics = service.metrics()
        assert all(events.wants(kind) for kind in kinds)
        assert metrics.calls == {}


def test_threads_share_one_object_whose_counts_are_complete_after_the_results() -> None:
    threads, each = 8, 20
    together = threading.Barrier(threads)
    with LocalServer(model=MODEL) as server, server.service() as service:
        sampling = service.create_sampling_client(base_model=MODEL).result()

        def work(_: int) -> tuple[int, int]:
            together.wait()
            metrics = service.metrics()
            least = 0
            for done in range(1, each + 1):
                sampling.sample(PROMPT, 1, SHORT).result()
                if metrics.calls[SAMPLE]["ok"] >= done:
                    least = done
            return id(metrics), least

        with ThreadPoolExecutor(threads) as pool:
            seen = list(pool.map(work, range(threads)))
        metrics = service.metrics()
        assert seen == [(id(metrics), each)] * threads
        assert metrics.calls == {SAMPLE: {"ok": threads * each}}
        assert metrics.times[SAMPLE]["total"].count == threads * each


def test_the_figures_outlive_the_client() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        metrics = service.metrics()
        sample(service, 2)
    assert metrics.calls == {SAMPLE: {"ok": 2}}
    assert repr(metrics) == "<Metrics of 2 calls>"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_begins_at_zero() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        metrics = service.metrics()
        sample(service, 2)
        child = os.fork()
        if child == 0:
            os._exit(0 if metrics.calls == {} and not any(metrics.counters.values()) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert metrics.calls == {SAMPLE: {"ok": 2}}


def test_the_figures_as_text_and_as_data() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        metrics = service.metrics()
        assert str(metrics).startswith("0 attempts, ")
        sample(service, 3)
    shown = str(metrics)
    assert re.search(rf"^{SAMPLE} +total +3( +[\d,.]+){{5}}$", shown, re.MULTILINE)
    assert f"\n{SAMPLE}: 3 ok\n" in shown
    html = metrics._repr_html_()
    assert html is not None
    assert f"{SAMPLE}: 3 ok" in html
    data = json.loads(json.dumps(metrics.to_dict()))
    assert data["calls"] == {SAMPLE: {"ok": 3}}
    assert data["times"][SAMPLE]["server"]["count"] == 3


def test_the_page_for_prometheus_is_well_formed() -> None:
    with LocalServer(model=MODEL) as server, server.service() as service:
        metrics = service.metrics()
        sample(service, 3)
    lines = metrics.to_prometheus().splitlines()
    comment = re.compile(r"# (HELP \w+ .+|TYPE \w+ (counter|summary))")
    figure = re.compile(r'(\w+)((?:\{\w+="[\w.]+"(?:,\w+="[\w.]+")*\})?) ([0-9.e+-]+)')
    kinds, values = {}, {}
    for line in lines:
        if line.startswith("#"):
            assert comment.fullmatch(line)
            if line.startswith("# TYPE"):
                kinds[line.split()[2]] = line.split()[3]
        else:
            found = figure.fullmatch(line)
            assert found, line
            name, labels, value = found.groups()
            assert re.sub("_(sum|count)$", "", name) in kinds
            assert (name, labels) not in values
            values[name, labels] = float(value)
    total = f'{{call="{SAMPLE}",phase="total"}}'
    assert values["tinker_sync_phase_seconds_count", total] == 3
    assert values["tinker_sync_calls_total", f'{{call="{SAMPLE}",outcome="ok"}}'] == 3
    sum_s = values["tinker_sync_phase_seconds_sum", total]
    assert sum_s == pytest.approx(3 * metrics.times[SAMPLE]["total"].mean_s, abs=1e-6)
