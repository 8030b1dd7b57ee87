"""The encodings of requests and answers, and the dialects of servers. No threads, sockets or clock.

    endpoints              one row for each call: path, types, credential, whether it may be repeated
    dialect                the calls, fields and encodings of one server, decided from its answers
    adapt                  changes requests to fit a dialect, or refuses features that the server would drop;
                           checks that the response to a sample request has all that was requested
    json/                  the converter (cattrs) and its hooks for arrays
    proto/                 tables of fields, a reader and a writer for protobuf
    published              the routes and fields that an open server publishes of itself
    paths                  the encoding of paths and queries
    http1/                 the framing of HTTP/1.1, for clients and servers

The embedded server uses the same rows and codecs; the recorded bytes in `tests/wire/golden` test both.
"""
