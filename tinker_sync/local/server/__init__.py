"""The embedded server over HTTP: every call of the protocol, on one event loop.

    http1            HTTP/1.1 connections as calls of an ASGI application, framed by `wire.http1`
    serving          start and stop of a server, in a thread or on the event loop of a process
    app              finds the call of a request, checks the key, turns errors into responses
    flags            the settings of a server
    calls, service   the request and response of a handler; the state that handlers share
    promises, lanes  results that clients wait for; the requests of one model, in the order of their numbers
    adapters         the adapters of samplers in memory
    sessions, models, training, weights, ...   the handlers, grouped by subject; `app` lists them

`tinker_sync.local.host` computes, and `tinker_sync.local.store` keeps data that lasts. Handlers run on the
thread of the event loop. Work that blocks runs on other threads, and handlers await it. The handler of a call
that takes long begins the work and returns a promise, the id under which the client later asks for the
result.
"""

from __future__ import annotations
