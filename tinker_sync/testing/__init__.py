"""For tests of programs that train: a real server on this machine, and everything that can go wrong with it.

    LocalServer   the server; remembers what it was asked
    FaultPlan     what is to go wrong, as one readable value
    faults        what can
    latency       how long things may take
    fixtures      `tinker_server` and `tinker_service`, found by pytest where the package is installed

Every name loads its module on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinker_sync._lazy import lazy_names

if TYPE_CHECKING:
    from tinker_sync.testing import faults, latency
    from tinker_sync.testing.calls import RecordedCall
    from tinker_sync.testing.faults import Fault
    from tinker_sync.testing.plan import FaultPlan
    from tinker_sync.testing.server import LocalServer

_HOMES: dict[str, tuple[str, ...]] = {
    "tinker_sync.testing.calls": ("RecordedCall",),
    "tinker_sync.testing.faults": ("Fault",),
    "tinker_sync.testing.latency": (),
    "tinker_sync.testing.plan": ("FaultPlan",),
    "tinker_sync.testing.server": ("LocalServer",),
}

__all__ = ["Fault", "FaultPlan", "LocalServer", "RecordedCall", "faults", "latency"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
