"""HTTP/1.1 as bytes, for clients and servers: heads, lengths and chunks (RFC 9112).

    client    `request_head` writes the head of a request, `ReplyParser` reads an answer piece by piece
    server    `RequestParser` reads the requests of a connection piece by piece
    framing   `ChunkedBody`, limits and errors, for both

Pure: no socket, no thread, no clock. So one reactor can hold thousands of incomplete answers, and a blocking
reader, the embedded server and the servers of `tinker_sync.testing` can use the same code.

Guarantees: for any bytes, the parsers raise only `MalformedMessage` or `MessageTooLarge`, and they refuse a
head or a body beyond the limits. A parser belongs to one thread at a time.
"""

from __future__ import annotations
