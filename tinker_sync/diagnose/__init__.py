"""What a server can do, and what is wrong between here and there.

    probe.py    asks a server what it speaks; harmless to run anywhere
    doctor.py   looks at the key, the address, the proxy, the clocks and the versions

Both ask and report; printing is for others.
"""

from __future__ import annotations

from tinker_sync.diagnose.doctor import Finding, examine
from tinker_sync.diagnose.probe import CallFound, FeatureFound, ProbeReport, probe

__all__ = ["CallFound", "FeatureFound", "Finding", "ProbeReport", "examine", "probe"]
