"""Where the time of a program goes: calls recorded while they run, explained in words, and as a trace.

    recording   `Recording`: collects what requests and futures do, from its start to its end
    report      `explain`: totals by method, retries, idle time, and what to change
    perfetto    `trace_events`: the same as a timeline that trace viewers draw

Nothing of this room runs in a client without a recording. Any thread may enter; the lists grow by single
appends, which need no lock.
"""

from __future__ import annotations
