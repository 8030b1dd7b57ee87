"""Checkpoints, metrics and plots of training loops.

    checkpoints `LoopCheckpoints`, returned by `ServiceClient.checkpoints`: saves a loop and resumes it
    recorder    `StepRecorder`, returned by `ServiceClient.recorder`: writes a line of JSON for each step
    plot        `read_run` and `draw`: curves of one or more runs, as PNG or HTML

Threads: the thread of the loop uses these objects.
"""

from __future__ import annotations
