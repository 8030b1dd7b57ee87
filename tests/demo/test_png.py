"""The picture is a valid PNG with the curve where its values are."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from tinker_sync.demo import png
from tinker_sync.demo.png import Curve

INK = (31, 90, 180)


def decoded(data: bytes) -> np.ndarray:
    """Pixels of a PNG file, by the rules of the format."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    place, body, size = 8, b"", (0, 0)
    kinds = []
    while place < len(data):
        (length,) = struct.unpack(">I", data[place : place + 4])
        kind, content = data[place + 4 : place + 8], data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + content)
        kinds.append(kind)
        if kind == b"IHDR":
            width, height, depth, colour, *rest = struct.unpack(">IIBBBBB", content)
            assert (depth, colour, rest) == (8, 2, [0, 0, 0])
            size = (height, width)
        if kind == b"IDAT":
            body += content
        place += 12 + length
    assert kinds == [b"IHDR", b"IDAT", b"IEND"]
    rows = np.frombuffer(zlib.decompress(body), dtype=np.uint8).reshape(size[0], -1)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(*size, 3)


def where(pixels: np.ndarray, colour: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    return np.nonzero((pixels == colour).all(axis=2))


def test_curves_are_drawn_one_under_another(tmp_path: Path) -> None:
    path = tmp_path / "curves.png"
    png.write_png(path, [Curve("loss", [3.0, 1.0]), Curve("reward", [0.0, 1.0])])
    pixels = decoded(path.read_bytes())
    assert pixels.shape == (2 * png.HEIGHT, png.WIDTH, 3)
    ys, xs = where(pixels, INK)
    assert ys.max() < png.HEIGHT
    assert ys[xs == xs.min()].mean() < ys[xs == xs.max()].mean() - 100  # falling: further down
    ys, xs = where(pixels, (200, 80, 20))
    assert ys.min() > png.HEIGHT
    assert ys[xs == xs.min()].mean() > ys[xs == xs.max()].mean() + 200  # rising


def test_letters_are_as_wide_as_they_should_be() -> None:
    blank = np.zeros((20, 40, 3), dtype=np.uint8)
    png._write(blank, 0, 0, "L?")
    drawn = blank.any(axis=2)
    assert drawn[:10, :2].all()  # its stem
    assert drawn[8:10, :6].all()  # its foot
    assert drawn.sum() == 7 * 4  # and nothing for what has no shape


@pytest.mark.parametrize("values", [[], [1.0], [0.0, 0.0], [float("inf"), -1.0]])
def test_odd_curves_are_drawn(values: list[float]) -> None:
    assert png.panel(Curve("odd", values), INK).shape == (png.HEIGHT, png.WIDTH, 3)
