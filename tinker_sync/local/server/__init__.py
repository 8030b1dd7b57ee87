"""The embedded server over HTTP: every call of the protocol, on one event loop.

    http          HTTP/1.1 connections as calls of an application, framed by `wire.http1`; start and stop
    app           finds the call of a request, checks the key, turns errors into responses
    calls         the request and the response of a handler, and failures
    state         what the handlers share: settings, keys, models, samplers, sessions in memory
    promises      results that clients wait for, and the calls that wait
    lanes         the requests of one model, in the order of their numbers
    training, sampling, checkpoints, account     the handlers, by subject

`tinker_sync.local.engine.host` computes, and `tinker_sync.local.store` keeps data that lasts. Handlers run on
the thread of the event loop. Work that blocks runs on other threads, and handlers await it. The handler of a
call that takes long begins the work and returns a promise, the id under which the client later asks for the
result.
"""

from __future__ import annotations
