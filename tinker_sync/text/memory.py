"""Giving memory back that reading a large vocabulary has used and freed.

The parsed file is several times as large as the vocabulary it becomes, and the C library keeps what was freed
for later use: about as much again as is in use. Linux with glibc only; elsewhere nothing happens.
"""

from __future__ import annotations

import sys
from typing import Final

WORTH_IT_BYTES: Final = 1_000_000
"""Files of less leave too little behind."""


def give_back() -> bool:
    """Have the C library return freed memory to the system; whether it did."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes  # on first use: small tokenizers do without

    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return False
    return bool(trim(0))
