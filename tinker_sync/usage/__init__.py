"""What a run uses, in tokens and in money, counted as results arrive.

    counts.py     token counts by kind
    prices.py     what a million tokens cost, from a file of the user; a price nobody gave is unknown
    meter.py      hears of each result and adds it up
    report.py     what was used so far, and how it compares with the bill
    estimate.py   what a run would use
    budget.py     refuses what would cost more than was allowed

Nothing here sends anything; clients tell it what happened and it is asked what that amounts to.
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
