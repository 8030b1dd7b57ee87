"""Bytes to types and back, and what servers speak. Pure: no threads, sockets or clock.

    endpoints              one row for each call: path, types, credential, whether it may be repeated
    dialect                what one server speaks, decided from its answers
    adapt                  bends requests to a dialect, and refuses what the server would drop
    json/                  the converter (cattrs) and its hooks for arrays
    proto/                 tables of fields, a reader and a writer for protobuf
    paths                  paths and queries, encoded
    http1/                 the framing of HTTP/1.1, for clients and servers

The embedded server uses the same rows and codecs; golden bytes in `tests/wire/golden` judge both.
"""
