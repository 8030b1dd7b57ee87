"""The process of an embedded server: the code of its owner, which starts it, and the code that runs in it.

The code of the owner, which imports no computing code:

    server           `EmbeddedServer`: its address and key, and its process from the first request on
    server_process   `ServerProcess`: start the child process, wait for its report, end it
    key_files        key files, by which other processes of the same user find the key of a server

The code that serves:

    child            the server that another process has started
    serving          `serve`: a server that a user starts, in this process
    command          `python -m tinker_sync.local`, which calls `serve`
    running          the event loop of a child or of `serve`, from its start to its end
    assembly         a store, a host and the application over them
    models           base models by name

The servers of `tinker_sync.testing`:

    backends         a server in this process or in a child process
    forward          the application that forwards requests to the child process

Clients with `base_url="local"` and pickled clients use this package by way of `tinker_sync._embedded`. Any
thread may call the functions of the owner. The serving code runs in the thread that calls it, except that the
child watches its owner from a thread of its own.
"""

from __future__ import annotations
