"""Recordings of the time that calls take, with an explanation in text and a trace.

    recording   `Recording`: collects the events of requests and futures, from its start to its end
    report      `explain`: totals by method, retries, idle time, and advice;
                `trace_events`: the same data as a timeline for trace viewers

A client without a recording does not use this package. Threads: any thread may add records; the lists grow by
single appends, which need no lock.
"""

from __future__ import annotations
