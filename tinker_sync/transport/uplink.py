"""`Uplink`: how fast a server takes large bodies, and whether it pays to compress them.

The settings of a server say whether it takes compressed bodies, not whether they arrive sooner: on a fast
line the compressor is slower than the line. So both are measured, by the requests of the client:

- The rate of the line is that of the octets that the server has accepted, over the time in which at least one
  body was under way. It includes the time that the server takes to read them.
- The compressor's gain is the octets by which bodies become shorter in a second of its CPU. Its wall time
  would say less, because it works while other bodies are on the line.

A body is compressed if the CPU is less than half of the time that it saves on the line. The first bodies are
compressed, and later one in `LOOK_EVERY` even if it does not pay, because the line and the data may change.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from tinker_sync.transport.body import PiecedBody
from tinker_sync.wire import zstd

LOOK_EVERY: Final = 64
# The CPU belongs to the user's program too.
_WORTH: Final = 2.0
# The work on a smaller body is that of the calls, and the time of a small one that of the round trip.
_LARGE_BYTES: Final = 256 * 1024
_SMALL_BYTES: Final = 32 * 1024
# So much lies behind the rate of the line; what came before counts half.
_WINDOW_BYTES: Final = 50_000_000


class Uplink:
    """The way of large bodies to one server that takes them compressed.

    Any thread may call the methods. There is no lock, because a lost measure changes little.

    >>> line = Uplink()
    >>> if zstd.is_available():
    ...     assert len(line.compressed(bytes(1_000_000)) or b"") < 1000
    >>> line.note(1_000_000, 10.0, 10.001)  # a gigabyte a second
    >>> line
    <Uplink 1000.0 MB/s, ...>

    Args:
        cpu: returns the seconds of CPU that this thread has used.
    """

    def __init__(self, cpu: Callable[[], float] = time.thread_time) -> None:
        self._cpu = cpu
        self._bodies = 0
        self._saved = 0.0  # octets that the compressor has saved
        self._work_s = 0.0
        self._octets = 0.0  # that the line has taken
        self._busy_s = 0.0
        self._until_s = -math.inf  # the end of the last body
        self._round_trip_s = math.inf

    def compressed(self, body: bytes | PiecedBody) -> bytes | None:
        """Return the compressed body, or None if the body is to be sent as it is. This may take long.

        Use it only if `zstd.is_available()`.
        """
        size, self._bodies = len(body), self._bodies + 1
        if _WORTH * self._rate() > self._gain() and self._bodies % LOOK_EVERY:
            return None
        zstd.load()
        began_s = self._cpu()
        packed = zstd.compress(body if isinstance(body, PiecedBody) else [body], size)
        if size >= _LARGE_BYTES:
            self._saved = self._saved / 2 + size - len(packed)
            self._work_s = self._work_s / 2 + max(self._cpu() - began_s, 1e-6)
        return packed if len(packed) < size else None

    def note(self, octets: int, began_s: float, ended_s: float) -> None:
        """Note that the server has accepted a request whose body has so many octets.

        Args:
            octets: the length of the body as it was sent.
            began_s: the time of the clock when it began to be sent.
            ended_s: the time of the clock when its answer came.
        """
        if octets < _SMALL_BYTES:
            self._round_trip_s = min(self._round_trip_s, ended_s - began_s)
        else:
            if self._octets > _WINDOW_BYTES:
                self._octets, self._busy_s = self._octets / 2, self._busy_s / 2
            busy_s = ended_s - max(began_s, self._until_s)
            if began_s >= self._until_s and self._round_trip_s < math.inf:
                busy_s -= self._round_trip_s
            self._until_s = ended_s
            self._octets, self._busy_s = self._octets + octets, self._busy_s + max(busy_s, 0.0)

    def _gain(self) -> float:
        """Return the octets that the compressor saves in a second; infinite as long as that is not known."""
        return self._saved / self._work_s if self._work_s else math.inf

    def _rate(self) -> float:
        """Return the octets that the line takes in a second; 0 as long as that is not known."""
        return self._octets / max(self._busy_s, 1e-6)

    def __repr__(self) -> str:
        return f"<Uplink {self._rate() / 1e6:.1f} MB/s, compression saves {self._gain() / 1e6:.1f} MB/s>"
