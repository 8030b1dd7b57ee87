"""Checkpoints, metrics and plots of training loops, and the verification of checkpoints.

    checkpoints `LoopCheckpoints`, returned by `ServiceClient.checkpoints`: saves a loop and resumes it
    restarts    `attempts`: the loop again, from its last save, after the loss of session or model
    recorder    `StepRecorder`, returned by `ServiceClient.recorder`: writes a line of JSON for each step
    verify      `verify_checkpoint`: whether a checkpoint restores what was saved
    plot        `read_run` and `draw`: curves of one or more runs, as PNG or HTML

Threads: the thread of the loop uses these objects.
"""

from __future__ import annotations

from tinker_sync.loop.checkpoints import CorruptedRunError
from tinker_sync.loop.restarts import attempts
from tinker_sync.loop.verify import verify_checkpoint

__all__ = ["CorruptedRunError", "attempts", "verify_checkpoint"]
