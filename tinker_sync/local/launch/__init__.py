"""The code that runs an embedded server in a process.

    child      the server that another process has started; `tinker_sync.launch` is the other end
    serving    `serve`: a server that a user starts, in this process
    command    `python -m tinker_sync.local`, which calls `serve`
    running    the event loop of either, from the start to the end
    assembly   a store, a host and the application over them
    models     base models by name

Everything runs in the thread that calls it, except that the child watches its owner from a thread of its own.
"""

from __future__ import annotations
