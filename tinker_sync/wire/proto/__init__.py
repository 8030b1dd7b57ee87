"""Codecs for the protobuf messages of package `tinker_public`, without the protobuf library.

    tables, _fields            the messages, field by field
    _reader, _writer           between bytes and dicts of any message, driven by the tables
    requests, outputs, samples an encoder and a decoder for each message that has a type of this package
    _tensors                   between numpy arrays and `bytes` fields; it alone needs numpy
    _scalars, _varint, _fault  the kinds of proto3, and what is wrong with a field

Import what is needed from its module: a program that samples loads no codec of training. Decoders raise
`WireError`, encoders `InvalidInputError`. Pure functions; any thread may use them.
"""
