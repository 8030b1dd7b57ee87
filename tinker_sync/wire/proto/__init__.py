"""Codecs for the protobuf messages of package `tinker_public`, without the protobuf library.

    codec                      conversion between the bytes of any message and a dict, by its table
    tables                     the messages, field by field
    requests, outputs, samples an encoder and a decoder for each message that has a type of this package
    _tensors                   conversion between numpy arrays and `bytes` fields; it imports numpy

Import each name from its own module, so that a program that samples loads no codec of training. Decoders
raise `WireError`, encoders `InvalidInputError`. Pure functions; any thread may use them.
"""
