"""Counts of the tokens that a client uses, their cost, and limits on both.

    prices.py     prices of a million tokens, from the user's file, and estimates of planned work
    meter.py      token counts by kind, and the sum over the results of a client
    report.py     usage so far, and its comparison with the bill
    budget.py     limits on tokens or dollars

A client reports each result to its meter, on the thread that decodes the result. This package sends no
request itself; a meter or a budget may call a function of the client that asks for the name of a model.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync.usage.budget": "Budget",
    "tinker_sync.usage.meter": "TokenCounts",
    "tinker_sync.usage.prices": "Estimate Price PriceTable estimate estimate_samples",
    "tinker_sync.usage.report": "Difference Reconciliation Usage UsageRow reconcile",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
