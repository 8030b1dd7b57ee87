"""A demo in one command: a model learns by examples and by reward, in under a minute.

    course     `run` and `main`: both lessons from beginning to end
    lessons    the problems, prompts and rewards, from seeds, and a similar program for users
    student    one training step by examples or by reward, through the clients
    crash      a training process that is killed on the way
    result     the outcome, and the checks that it must pass
    screen     headings, progress, curves and tables

The thread of the caller does everything except for the work of the clients and of the process that is killed.
Every name loads its module on first use.
"""

from __future__ import annotations

from tinker_sync._base.lazy import lazy_names

_HOMES = {
    "tinker_sync.demo.course": "main run",
    "tinker_sync.demo.lessons": "RECIPE",
    "tinker_sync.demo.result": "DemoResult Steps",
}

__getattr__, __dir__, __all__ = lazy_names(__name__, _HOMES)
