"""What the built-in model reads: documents, and which parts of them nobody could foresee."""

from __future__ import annotations

import zlib
from typing import Final

END_OF_TEXT: Final = "<|endoftext|>"
TURN: Final = "<|im_start|>"
END_OF_TURN: Final = "<|im_end|>"

_HELD_OUT_SHARE: Final = 10


def held_out(key: str) -> bool:
    """Whether a problem or story is kept from training, to be asked later: one in ten, by a checksum.

    >>> [b for b in range(60) if held_out(f"Q: 23+{b}=")]
    [10, 34, 54, 56]
    """
    return zlib.crc32(key.encode()) % _HELD_OUT_SHARE == 0


class Page:
    """A document being written.

    >>> page = Page().say("Q: ").given("2+3").say("=5")
    >>> page.text, page.dull
    ('Q: 2+3=5', [(3, 6)])
    """

    def __init__(self) -> None:
        self.text = ""
        self.dull: list[tuple[int, int]] = []

    def say(self, text: str) -> Page:
        """Go on with something that follows from what was said, or that is worth learning to say."""
        self.text += text
        return self

    def given(self, text: str) -> Page:
        """Go on with something drawn at random: learning to foresee it would be wasted effort."""
        self.dull.append((len(self.text), len(self.text) + len(text)))
        self.text += text
        return self

    def turn(self, role: str) -> Page:
        """Begin a turn of a chat."""
        return self.say(f"{TURN}{role}\n")

    def end_turn(self) -> Page:
        """End it."""
        return self.say(f"{END_OF_TURN}\n")
