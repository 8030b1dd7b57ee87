"""What a training loop writes down, and pictures of it.

    checkpoints `LoopCheckpoints`, behind `ServiceClient.checkpoints`: saves, and the way back
    recorder    `StepRecorder`, behind `ServiceClient.recorder`: a line of JSON for each step
    plot        `read_run` and `draw`: curves of one or more runs, as PNG or as a page of HTML

Threads: all of it belongs to the thread of the loop.
"""

from __future__ import annotations
