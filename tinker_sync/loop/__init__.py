"""What a training loop writes down, and pictures of it.

    recorder    `StepRecorder`, behind `ServiceClient.recorder`: a line of JSON for each step
    plot        `read_run` and `draw`: curves of one or more runs, as PNG or as a page of HTML

Threads: a recorder belongs to the loop; one thread at a time may log. Nothing here sends a request.
"""

from __future__ import annotations
