"""A real server on this machine for tests of programs that train, with faults on demand.

    LocalServer   the server; it records the calls it receives
    FaultPlan     the faults of one test, as one readable value
    faults        the kinds of faults
    check         try everything once at any server, within a budget, and clean up
    record        keep the answers of any server in a file, for `replay`
    fixtures      `tinker_server` and `tinker_service`, which pytest finds where the package is installed

Calls arrive on the server's own thread; tests read them from any thread. Every name loads its module on
first use.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync.testing": "faults",
    "tinker_sync.testing.calls": "RecordedCall",
    "tinker_sync.testing.faults": "Fault",
    "tinker_sync.testing.plan": "FaultPlan",
    "tinker_sync.testing.first_contact": "CheckReport CheckRow check",
    "tinker_sync.testing.tapes": "record replay",
    "tinker_sync.testing.server": "LocalServer",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
