"""The section about many processes: the capacity of one process, reasons to use more, and shared limits."""

from __future__ import annotations

from typing import Final, NamedTuple

from tinker_sync.docs.markup import inline, table, to_html

ANCHOR: Final = "processes"
TITLE: Final = "One process, and many"


class Rate(NamedTuple):
    """One result of `python benchmarks/bench_cluster.py scale`: the rate of a number of processes."""

    processes: int
    samples_s: float
    cpu_ms: float
    """The CPU time of a sample in the process of the client."""


# The conditions: two slow cores, which the stub server shares; a sample takes a second at the server; each
# process has 256 samples in flight.
LATENCY_S: Final = 1.0
WINDOW: Final = 256
CORES: Final = 2
MEASURED: Final = (Rate(1, 217, 0.71), Rate(2, 410, 0.72), Rate(4, 706, 0.75), Rate(8, 1048, 0.82))

ONE: Final = """
A sample is two requests. Their CPU does not depend on how many samples are in flight, and the threads of
one process share an interpreter lock. So one process ends at the smaller of two rates:

    samples a second  <=  1 / (CPU of a sample)
    samples a second  <=  samples in flight / seconds that a sample takes

Most programs meet the second one first. 256 samples in flight that take 10 s each are 26 samples a second.
2,000 of them, the default of the service for one process, are 200. So raise `max_in_flight` first.

Use more processes

- when rewards, environments or tokenizers need the CPU; this is the most frequent reason;
- when one process uses a whole core for its samples;
- when the data or the environments are on several machines.

Keep a training client in one process. Its passes are few and large, and their order is fixed, so more
processes do not make them faster. Workers get new weights as a sampling client, an argument of two
kilobytes.
"""

LIMITS: Final = """
The service limits the requests of a key, not those of a process. Where processes share limits
(`tinker_sync.ray.share_limits`; the pool and the map stage do so), a refusal of one process (429) pauses
all of them, and they begin again with ten requests together. Without Ray each process has its own limiter,
and begins again with ten. The limits of samples and bytes in flight are those of a process: a hundred
processes may have a hundred times as many in flight, and the service refuses what is too much.

A budget (`ServiceClient.budget`) holds for the calls of its process, and for the workers of its pools
(`tinker_sync.ray.SamplerPool` and `map`). `tinker_sync.ray.cluster_usage` adds up the tokens of all.
"""

ASSUMPTIONS: Final = """
The projection assumes that a machine has a core for each of its processes, that the CPU of a sample stays
as measured, that the service answers in the same time however many ask, and that it refuses none. It has no
network between machines, because each process has its own connections to the service. Ray adds to each
machine its own processes; the actor with the shared limit gets two small messages from each process every
ten seconds. `SamplerPool` and `map` also send every prompt and every response through the process of the
caller, which costs that one about a seventh of the CPU of a sample; use the map stage of Ray Data or tasks of
your own for more than five workers that are busy all the time.
"""

SUPPORT_HEADS: Final = ("what", "embedded server", "hosted service", "SkyRL")
SUPPORT: Final = (
    ("address", "`local`, or that of `tinker-sync serve`", "the default", "its URL"),
    ("key", "one", "one or several", "none"),
    ("samples of one sampler from many processes", "yes", "yes", "yes"),
    ("numbers of copies", "from the server", "from the server, where its settings name it", "drawn"),
    ("one poll for all samples of a sampler", "off unless set", "where its settings name it", "no"),
    ("weights for samplers by path", "yes", "yes", "yes"),
    ("a pass that arrives twice is done once", "yes", "yes", "newer versions"),
    ("losses of `forward_backward`", "all but `stable_reinforce`", "all", "three; newer versions five"),
    ("a training client from a checkpoint", "yes", "yes", "yes"),
    ("refusals (429)", "none, unless a test plans them", "yes", "none"),
    ("usage that the server bills", "yes", "yes", "no"),
)


def section() -> str:
    """Return the section about many processes as HTML.

    >>> html = section()
    >>> 'id="processes"' in html, "<svg" in html
    (True, True)
    """
    rates = [
        (
            f"{each.processes}",
            f"{each.samples_s:,.0f}",
            f"{each.cpu_ms:.2f} ms",
            f"{_ceiling(each.processes):,.0f}",
        )
        for each in MEASURED
    ]
    heads = ("processes", "samples a second", "CPU of a sample", "in flight / time of a sample")
    return (
        f'<h2 id="{ANCHOR}">{TITLE}</h2>{to_html(ONE)}{to_html(LIMITS)}'
        f"<h3>Measured: 1 to 8 processes on {CORES} cores</h3>"
        f"<p>{inline(_CONDITIONS)}</p>{_figure()}{table(heads, rates)}"
        "<h3>Projected: 100 processes on 10 machines</h3>"
        f"<p>{inline(_projection())}</p>{to_html(ASSUMPTIONS)}"
        f"<h3>The same script on three servers</h3>{table(SUPPORT_HEADS, SUPPORT)}"
    )


def project(processes: int, cpu_ms: float, in_flight: int, latency_s: float) -> float:
    """Return the highest number of samples a second of some processes, each with its own core.

    Args:
        processes: the number of processes.
        cpu_ms: the CPU time of a sample.
        in_flight: the number of samples that each process has in flight.
        latency_s: the duration of a sample.

    >>> project(100, cpu_ms=1.0, in_flight=256, latency_s=1.0), project(100, 1.0, 2000, 1.0)
    (25600.0, 100000.0)
    """
    return processes * min(in_flight / latency_s, 1e3 / cpu_ms)


_CONDITIONS: Final = (
    f"Each worker of Ray has {WINDOW} samples in flight. A sample takes {LATENCY_S:g} s at a stub server, "
    f"which shares the {CORES} cores with the workers. The outlines show the last column. More processes are "
    "faster until the cores are busy; then the CPU of a sample decides. Other programs used the cores during "
    "these runs, so the rates are lower bounds."
)


def _ceiling(processes: int) -> float:
    return processes * WINDOW / LATENCY_S


def _projection() -> str:
    cpu_ms = max(each.cpu_ms for each in MEASURED)
    few, many = (project(100, cpu_ms, WINDOW, latency_s) for latency_s in (10.0, 1.0))
    return (
        f"With {WINDOW} samples in flight in each process: {few:,.0f} samples a second that take 10 s each, "
        f"{many:,.0f} that take 1 s each. With {cpu_ms:.2f} ms of CPU a sample, as on this slow machine, "
        f"{project(100, cpu_ms, 10**9, 1.0):,.0f} is the most."
    )


def _figure() -> str:
    """Return an SVG with bars of the measured rates, and the highest possible rates as outlines."""
    full, left, row = 460, 110, 26
    most = max(_ceiling(each.processes) for each in MEASURED)
    scale = full / most
    bars = "".join(
        f'<text x="{left - 8}" y="{place * row + 16}" text-anchor="end">{each.processes} process'
        f"{'es' if each.processes > 1 else ''}</text>"
        f'<rect x="{left}" y="{place * row + 3}" height="18" width="{_ceiling(each.processes) * scale:.1f}" '
        'fill="none" stroke="currentColor" stroke-opacity="0.35"/>'
        f'<rect x="{left}" y="{place * row + 3}" height="18" width="{each.samples_s * scale:.1f}" '
        'fill="var(--link)"/>'
        for place, each in enumerate(MEASURED)
    )
    return (
        f'<svg role="img" aria-label="samples a second by processes" viewBox="0 0 {left + full + 10} '
        f'{len(MEASURED) * row + 6}" font-size="13" fill="currentColor" style="max-width:40rem;width:100%">'
        f"{bars}</svg>"
    )
