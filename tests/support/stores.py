"""Stores and checkpoints for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.clock import FakeClock

from tinker_sync._base.clock import Clock
from tinker_sync.local.engine.lora import LoraSettings
from tinker_sync.local.store import Store, StoreError

START = 1_770_000_000.0 - 1_770_000_000.0 % 3600
"""A full hour."""


def store_with_run(directory: Path, clock: Clock | None = None) -> Store:
    """Return a store with session `s-1` and run `r-1`."""
    store = Store(directory, clock=clock or FakeClock(time_s=START))
    store.add_session("s-1", project_id="p-1")
    add_run(store, "r-1")
    return store


def add_run(store: Store, run_id: str, *, session_id: str = "s-1", project_id: str | None = "p-1") -> None:
    store.add_run(
        run_id,
        session_id=session_id,
        model_seq_id=0,
        base_model="org/base",
        lora=LoraSettings(rank=2, seed=5),
        project_id=project_id,
    )


def adapter(seed: int = 0, rows: int = 6) -> dict[str, Any]:
    """Return the arrays of a small adapter."""
    rng = np.random.default_rng(seed)
    return {
        "m.q_proj.lora_A": rng.standard_normal((2, 4)).astype(np.float32),
        "m.q_proj.lora_B": rng.standard_normal((rows, 2)).astype(np.float32),
    }


def with_optimizer(seed: int = 0, rows: int = 6) -> dict[str, Any]:
    """Return the arrays of a small adapter and of its optimizer."""
    rng = np.random.default_rng(seed + 1000)
    moments = {f"optimizer.{name}": rng.standard_normal(8 + 2 * rows) for name in ("first", "second")}
    return {**adapter(seed, rows), **moments, "optimizer.steps": np.array(seed)}


def failure_of(call: Callable[..., object], *arguments: Any, **named: Any) -> str:
    """Make a call that must raise StoreError, and return the kind of the error."""
    try:
        call(*arguments, **named)
    except StoreError as failure:
        return failure.kind
    raise AssertionError("the call did not fail")


def same(one: dict[str, Any], two: dict[str, Any]) -> bool:
    """Return True if two mappings of arrays have the same names and bits."""
    return set(one) == set(two) and all(
        (one[name].dtype, one[name].shape, one[name].tobytes())
        == (two[name].dtype, two[name].shape, two[name].tobytes())
        for name in one
    )
