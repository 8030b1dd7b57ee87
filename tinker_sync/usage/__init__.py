"""Counts of the tokens a run uses, their cost, and limits on both.

    counts.py     token counts by kind
    prices.py     prices of a million tokens, from the user's file
    meter.py      adds up the tokens of each result
    report.py     usage so far, and its comparison with the bill
    estimate.py   usage of planned work
    budget.py     limits on tokens or dollars

Nothing here sends a request. Clients report each result, on the thread that decodes it.
"""

from __future__ import annotations

from tinker_sync.usage.budget import Budget
from tinker_sync.usage.counts import TokenCounts
from tinker_sync.usage.estimate import Estimate, estimate, estimate_samples
from tinker_sync.usage.prices import Price, PriceTable
from tinker_sync.usage.report import Difference, Reconciliation, Usage, UsageRow, reconcile

__all__ = [
    "Budget",
    "Difference",
    "Estimate",
    "Price",
    "PriceTable",
    "Reconciliation",
    "TokenCounts",
    "Usage",
    "UsageRow",
    "estimate",
    "estimate_samples",
    "reconcile",
]
