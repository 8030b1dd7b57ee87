"""The process of an embedded server, and the code of its owner, which is the process that starts it.

The code of the owner, which imports no computing code:

    server           `EmbeddedServer`: its address and key, and its process from the first request on
    server_process   `ServerProcess`: start the child process, wait for its report, end it
    key_files        key files, by which other processes of the same user find the key of a server

The code that serves:

    child            the server that another process has started
    serving          `serve`: a server that a user starts, in this process
    command          `python -m tinker_sync.local`, which calls `serve`
    running          the event loop of a child or of `serve`, from its start to its end
    assembly         a store, a host and the application that uses them
    models           base models by name

The servers of `tinker_sync.testing`:

    backends         a server in this process or in a child process
    forward          the application that forwards requests to the child process

Clients with `base_url="local"` and pickled clients use this package by way of `tinker_sync._embedded`. Any
thread may call `server` and `key_files`; one thread at a time may use a `ServerProcess`. The event loop of a
server runs in the thread that calls `serve` or the `main` of a child; a child also has a thread that watches
its owner.
"""

from __future__ import annotations
