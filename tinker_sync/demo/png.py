"""A picture of the curves, written without any package: lines, axes, and letters of three by five dots."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

WIDTH: Final = 640
HEIGHT: Final = 300
_SCALE: Final = 2
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 40
_INK: Final = (40, 40, 40)
_PALE: Final = (225, 225, 225)
_COLOURS: Final = ((31, 90, 180), (200, 80, 20))

# fmt: off
# Five rows of three dots, from the top, each row an octal digit.
_FONT: Final = {
    "a": "02577", "b": "65656", "c": "34443", "d": "65556", "e": "74647", "f": "74644", "g": "34553",
    "h": "55755", "i": "72227", "j": "11152", "k": "55655", "l": "44447", "m": "57755", "n": "65555",
    "o": "25552", "p": "65644", "q": "25563", "r": "65655", "s": "34216", "t": "72222", "u": "55557",
    "v": "55552", "w": "55775", "x": "55255", "y": "55222", "z": "71247", "0": "75557", "1": "26227",
    "2": "71747", "3": "71317", "4": "55711", "5": "74717", "6": "74757", "7": "71111", "8": "75757",
    "9": "75717", ".": "00002", "-": "00700", ",": "00024", ":": "02020", " ": "00000",
}
# fmt: on

Pixels = npt.NDArray[np.uint8]


class Curve(NamedTuple):
    """Numbers and what they are."""

    title: str
    values: Sequence[float]


def _write(pixels: Pixels, x: int, y: int, text: str) -> None:
    for character in text.lower():
        for row, digit in enumerate(_FONT.get(character, "00000")):
            for column in range(3):
                if int(digit) >> (2 - column) & 1:
                    top, left = y + row * _SCALE, x + column * _SCALE
                    pixels[top : top + _SCALE, left : left + _SCALE] = _INK
        x += 4 * _SCALE


def _line(
    pixels: Pixels, start: tuple[float, float], end: tuple[float, float], colour: Sequence[int]
) -> None:
    steps = int(max(abs(end[0] - start[0]), abs(end[1] - start[1]))) + 1
    for x, y in zip(np.linspace(start[0], end[0], steps), np.linspace(start[1], end[1], steps), strict=True):
        pixels[round(y) - 1 : round(y) + 1, round(x) - 1 : round(x) + 1] = colour


def panel(curve: Curve, colour: Sequence[int]) -> Pixels:
    """One curve with its axes."""
    pixels = np.full((HEIGHT, WIDTH, 3), 255, dtype=np.uint8)
    values = [value if math.isfinite(value) else 0.0 for value in curve.values] or [0.0]
    top, bottom = max([*values, 0.0]), min([*values, 0.0])
    reach = (top - bottom) or 1.0
    wide, high = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM
    for share in (0.0, 0.5, 1.0):
        y = round(_TOP + high * (1 - share))
        pixels[y, _LEFT : WIDTH - _RIGHT] = _PALE
        _write(pixels, 8, y - 5, f"{bottom + share * reach:.2f}")
    pixels[_TOP : HEIGHT - _BOTTOM + 1, _LEFT] = _INK
    pixels[HEIGHT - _BOTTOM, _LEFT : WIDTH - _RIGHT] = _INK
    _write(pixels, _LEFT, 14, curve.title)
    _write(pixels, _LEFT, HEIGHT - 24, "1")
    last = f"step {len(values)}"
    _write(pixels, WIDTH - _RIGHT - len(last) * 4 * _SCALE, HEIGHT - 24, last)
    across = max(len(values) - 1, 1)
    points = [
        (_LEFT + wide * number / across, _TOP + high * (1 - (value - bottom) / reach))
        for number, value in enumerate(values)
    ]
    for one, two in zip(points, points[1:] or points, strict=False):
        _line(pixels, one, two, colour)
    return pixels


def encode(pixels: Pixels) -> bytes:
    """The bytes of a PNG file.

    >>> encode(np.zeros((2, 3, 3), dtype=np.uint8))[:4]
    b'\\x89PNG'
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels.shape
    rows = np.concatenate([np.zeros((height, 1), dtype=np.uint8), pixels.reshape(height, -1)], axis=1)
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(rows.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def write_png(path: str | Path, curves: Sequence[Curve]) -> None:
    """Draw the curves one under another into a file."""
    panels = [panel(curve, _COLOURS[number % len(_COLOURS)]) for number, curve in enumerate(curves)]
    Path(path).write_bytes(encode(np.concatenate(panels)))
