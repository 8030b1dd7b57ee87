"""The embedded server over HTTP: every call of the protocol, on one event loop.

    http1            bytes of connections to ASGI and back, framed by `wire.http1`
    serving          the life of a server: in a thread, or as long as a process
    app              which call a request is, who may ask, what becomes of errors
    flags            what kind of server this is
    calls, service   what handlers are given; what they share
    promises, lanes  results that are waited for; the numbered order of one model
    adapters         which adapters samplers hold in memory, and which wait on disk
    account … files  one module a noun: what each call does

It computes through `tinker_sync.local.host` and keeps through `tinker_sync.local.store`. Everything here
runs on the loop's thread; what blocks runs elsewhere and is awaited.
"""

from __future__ import annotations
