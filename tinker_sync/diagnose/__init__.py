"""Reports about a server and about the connection to it.

    probe.py    the calls and features that a server has; harmless to run anywhere
    doctor.py   checks of the key, the address, the proxy, the clocks and the versions

Both return values and print nothing. One thread runs a report.
"""

from __future__ import annotations

from tinker_sync.diagnose.doctor import Finding, examine
from tinker_sync.diagnose.probe import CallFound, FeatureFound, ProbeReport, probe

__all__ = ["CallFound", "FeatureFound", "Finding", "ProbeReport", "examine", "probe"]
