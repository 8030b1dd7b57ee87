"""The encodings of requests and answers, and the dialects of servers. Pure: no threads, sockets or clock.

    endpoints              one row for each call: path, types, credential, whether it may be repeated
    dialect                the calls, fields and encodings of one server, decided from its answers
    adapt                  changes requests to fit a dialect, or refuses features that the server would drop;
                           finds the features that a response to a sample lacks
    json/                  the converter (cattrs) and its hooks for arrays
    proto/                 tables of fields, a reader and a writer for protobuf
    paths                  paths and queries, encoded
    http1/                 the framing of HTTP/1.1, for clients and servers

The embedded server uses the same rows and codecs; the recorded bytes in `tests/wire/golden` test both.
"""
