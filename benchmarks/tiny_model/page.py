"""A training document, which records its unpredictable parts."""

from __future__ import annotations

import zlib
from typing import Final

END_OF_TEXT: Final = "<|endoftext|>"
TURN: Final = "<|im_start|>"
END_OF_TURN: Final = "<|im_end|>"

_HELD_OUT_SHARE: Final = 10


def is_held_out(key: str) -> bool:
    """Return True for one problem or story in ten, chosen by checksum: the model is tested on these only.

    >>> [b for b in range(60) if is_held_out(f"Q: 23+{b}=")]
    [10, 34, 54, 56]
    """
    return zlib.crc32(key.encode()) % _HELD_OUT_SHARE == 0


class Page:
    """A document under construction.

    >>> page = Page().write("Q: ").write_random("2+3").write("=5")
    >>> page.text, page.random_spans
    ('Q: 2+3=5', [(3, 6)])
    """

    def __init__(self) -> None:
        self.text = ""
        self.random_spans: list[tuple[int, int]] = []

    def write(self, text: str) -> Page:
        """Append text that the model should learn to predict."""
        self.text += text
        return self

    def write_random(self, text: str) -> Page:
        """Append random text, which the model should not learn to predict."""
        self.random_spans.append((len(self.text), len(self.text) + len(text)))
        self.text += text
        return self

    def turn(self, role: str) -> Page:
        """Begin a turn in a chat."""
        return self.write(f"{TURN}{role}\n")

    def end_turn(self) -> Page:
        """End the turn."""
        return self.write(f"{END_OF_TURN}\n")
