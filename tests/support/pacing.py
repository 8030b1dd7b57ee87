"""Clients whose pauses before another try are short."""

from __future__ import annotations

from typing import Any

from tinker_sync._base.clock import paced
from tinker_sync.clients.service import ServiceClient


def quick_service(pace: float = 0.01, **options: Any) -> ServiceClient:
    """Return a service client that multiplies its pauses by `pace`."""
    with paced(pace):
        return ServiceClient(**options)
