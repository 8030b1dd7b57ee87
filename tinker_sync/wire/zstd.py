"""Bodies compressed with Zstandard: by Python itself from 3.14 on, by the package zstandard before.

Any thread may call these functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

from tinker_sync.wire.http1.framing import MalformedMessage, MessageTooLarge

# The window that RFC 9659 allows for a zstd body in HTTP. A larger one would make the reader allocate more
# memory at the writer's wish.
_WINDOW_LOG: Final = 23
# The package takes no output limit: 4 bytes of input may give 128 KiB, so one step gives at most 16 MiB.
_STEP_BYTES: Final = 512


@lru_cache(maxsize=1)
def _module() -> Any | None:
    # A Python that was built without the library can use the package too.
    for name in ("compression.zstd", "zstandard"):
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def is_available() -> bool:
    """Return True if this installation can compress and decompress.

    >>> is_available() in (True, False)
    True
    """
    # Most programs never use the package, which takes ten milliseconds to import; that of Python takes one.
    return _module() is not None if sys.version_info >= (3, 14) else find_spec("zstandard") is not None


def load() -> None:
    """Load the library now, which takes ten milliseconds. Use it only if `is_available()`.

    >>> if is_available():
    ...     load()
    """
    _module()


def compress(pieces: Iterable[Any], size: int) -> bytes:
    """Compress pieces of `size` bytes in all into one frame. Use it only if `is_available()`.

    >>> if is_available():
    ...     assert decompress(compress([b"tokens: ", b"1234"], 12), limit=12) == b"tokens: 1234"
    """
    module: Any = _module()
    if module.__name__ == "zstandard":
        compressor = module.ZstdCompressor().compressobj(size=size)
    else:
        compressor = module.ZstdCompressor()
        compressor.set_pledged_input_size(size)
    return b"".join([*map(compressor.compress, pieces), compressor.flush()])


def decompressor() -> Any:
    """Return an object that decompresses one frame, as `zlib.decompressobj` does, but without a limit.

    Use it only if `is_available()`.

    >>> if is_available():
    ...     assert decompressor().decompress(compress([b"tokens"], 6)) == b"tokens"
    """
    module: Any = _module()
    if module.__name__ == "zstandard":
        return module.ZstdDecompressor(max_window_size=1 << _WINDOW_LOG).decompressobj()
    return module.ZstdDecompressor(options={module.DecompressionParameter.window_log_max: _WINDOW_LOG})


def decompress(body: bytes, *, limit: int) -> bytes:
    """Return the content of the frames of a body. Use it only if `is_available()`.

    Raises:
        MalformedMessage: the body is damaged or ends too early.
        MessageTooLarge: the content exceeds `limit` bytes.
    """
    module: Any = _module()
    bounded = module.__name__ != "zstandard"
    frame = decompressor()
    pieces: list[bytes] = []
    room = limit
    at = 0
    try:
        while at < len(body):
            if frame.eof:
                frame = decompressor()
            step = body[at : at + _STEP_BYTES]
            pieces.append(frame.decompress(step, room + 1) if bounded else frame.decompress(step))
            at += len(step) - (len(frame.unused_data) if frame.eof else 0)
            room -= len(pieces[-1])
            if room < 0:
                raise MessageTooLarge(f"the compressed body unfolds to more than the limit of {limit} bytes")
    except module.ZstdError as error:
        raise MalformedMessage(f"the compressed body is damaged: {error}") from error
    if not frame.eof:
        raise MalformedMessage("the compressed body ends too early")
    return b"".join(pieces)
