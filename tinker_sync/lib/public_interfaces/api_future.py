"""`APIFuture`, which is both of the kinds of futures that scripts know."""

from __future__ import annotations

from tinker_sync.runtime.futures import APIFuture

__all__ = ["APIFuture", "AwaitableConcurrentFuture"]

AwaitableConcurrentFuture = APIFuture
