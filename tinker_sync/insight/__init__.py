"""What a client used, what took its time, what is wrong with its server, and how values look in a notebook.

    meter       token counts by kind, and the sum over the results of a client
    prices      prices of a million tokens, from the user's file, and estimates of planned work
    usage       usage so far, by model
    budget      limits on tokens or dollars
    recording   `Recording`: collects the events of requests and futures, from its start to its end
    report      `explain`: totals by method, retries, idle time, and advice;
                `trace_events`: the same data as a timeline for trace viewers
    doctor      `examine`: checks of the key, the address, the proxy, the clocks and the versions
    probing     `probe`: the calls and features that a server has; harmless to run anywhere
    displays    values as HTML for notebooks, and as rows for pandas
    page        escaped HTML in the look that all displays share

A client reports each result to its meter, on the thread that decodes the result, and to its recordings, which
any thread may extend. Only `doctor` and `probing` send requests; a meter or a budget may call a function of
the client that asks for the name of a model.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync.insight.budget": "Budget",
    "tinker_sync.insight.displays": "shade",
    "tinker_sync.insight.doctor": "Finding examine",
    "tinker_sync.insight.meter": "TokenCounts",
    "tinker_sync.insight.prices": "Estimate Price PriceTable estimate estimate_samples",
    "tinker_sync.insight.probing": "CallFound FeatureFound ProbeReport probe",
    "tinker_sync.insight.usage": "Usage UsageRow",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
