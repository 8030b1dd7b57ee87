"""What a client used, what took its time, what is wrong with its server, and how values look in a notebook.

    meter       token counts by kind, and the sum over the results of a client
    prices      prices of a million tokens, from the user's file, and estimates of planned work
    usage       usage so far, by model
    budget      limits on tokens or dollars
    recording   `Recording`: collects the events of requests and futures, from its start to its end
    metrics     `Metrics`: counters and percentiles of calls, in little memory, for as long as a client lives
    following   the requests of calls, from the call to the end; recordings, metrics and spans are built on it
    spans       `Spans`: an OpenTelemetry span for each call
    report      `explain`: totals by method, retries, idle time, and advice;
                `trace_events`: the same data as a timeline for trace viewers
    displays    values as HTML for notebooks, and as rows for pandas
    page        escaped HTML in the look that all displays share

A client reports each result to its meter, on the thread that decodes the result, and to its recordings, which
any thread may extend. A meter or a budget may ask the client for the name of a model. `examine` and `probe`
are in `clients`, because they take apart the way to a server.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync.insight.budget": "Budget",
    "tinker_sync.insight.displays": "shade",
    "tinker_sync.clients.doctor": "Finding State examine",
    "tinker_sync.insight.meter": "TokenCounts",
    "tinker_sync.insight.metrics": "Metrics Times",
    "tinker_sync.insight.prices": "Estimate Price PriceTable estimate estimate_samples",
    "tinker_sync.clients.probing": "CallFound FeatureFound ProbeReport probe",
    "tinker_sync.insight.usage": "Usage UsageRow",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
