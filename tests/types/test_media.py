"""Images come from bytes, files and Pillow. Damaged and unknown files are refused, as is damaged audio."""

from __future__ import annotations

import base64
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest

from tinker_sync import ImageChunk, InvalidInputError
from tinker_sync.types import DmelChunk, ModelInput


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int) -> bytes:
    head = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    rows = zlib.compress(b"".join(b"\0" * (width + 1) for _ in range(height)))
    return b"\x89PNG\r\n\x1a\n" + head + png_chunk(b"IDAT", rows) + png_chunk(b"IEND", b"")


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", len(content) + 2) + content


def jpeg(
    width: int, height: int, *, frame: int = 0xC0, before: bytes = b"", end: bytes = b"\xff\xd9"
) -> bytes:
    tables = (
        segment(0xE0, b"JFIF\0\1\1\0\0\1\0\1\0\0") + segment(0xC4, b"\0" * 17) + segment(0xDB, b"\0" * 65)
    )
    size = segment(frame, b"\x08" + struct.pack(">HH", height, width) + b"\1\1\x11\0")
    return b"\xff\xd8" + before + tables + size + segment(0xDA, b"\1\1\0\0\x3f\0") + b"\x12\xff\x00\x34" + end


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(3, 2), ("png", (3, 2))),
        (png(1, 70000), ("png", (1, 70000))),
        (jpeg(640, 480), ("jpeg", (640, 480))),
        (jpeg(5, 7, frame=0xC2), ("jpeg", (5, 7))),  # progressive
        (jpeg(5, 7, before=b"\xff\xff\xff\xe1\0\4ab"), ("jpeg", (5, 7))),  # padding before a segment
        (jpeg(65535, 1) + b"trailing", ("jpeg", (65535, 1))),
        (png(3, 2) + b"trailing", ("png", (3, 2))),
    ],
)
def test_format_and_size_come_from_the_header(data: bytes, expected: Any, tmp_path: Path) -> None:
    chunk = ImageChunk.from_bytes(data, expected_tokens=9)
    assert (chunk.format, chunk.size) == expected
    assert (chunk.data, chunk.length) == (data, 9)
    path = tmp_path / "misnamed.gif"
    path.write_bytes(data)
    assert ImageChunk.from_file(path, expected_tokens=9) == chunk
    assert ImageChunk.from_file(str(path)).expected_tokens is None
    assert ImageChunk.from_bytes(memoryview(bytearray(data)), expected_tokens=9) == chunk


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "got nothing"),
        (b"hello", "got something else"),
        (b"GIF89a...", "got GIF"),
        (b"RIFF....WEBP", "got WebP"),
        (b"BM......", "got BMP"),
        (b"II*\0", "got TIFF"),
        (png(0, 5), "0 x 5 pixels"),
        (jpeg(5, 0), "5 x 0 pixels"),
        (png(3, 2)[:-5], "cut short"),
        (png(3, 2)[:20], "cut short"),
        (png(3, 2).replace(b"IHDR", b"IDAT"), "damaged"),
        (jpeg(3, 2, end=b""), "cut short"),
        (jpeg(3, 2)[:30], "cut short"),
        (b"\xff\xd8\xff\xd9", "damaged"),
        (jpeg(3, 2, frame=0xC8), "damaged"),
    ],
)
def test_incomplete_images_are_refused_with_their_path(data: bytes, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=words):
        ImageChunk.from_bytes(data)
    path = tmp_path / "picture"
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match=f"picture: .*{words}"):
        ImageChunk.from_file(path)


class Pillow:
    """A stand-in for an image of Pillow."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    def convert(self, mode: str) -> Pillow:
        return Pillow(mode)

    def save(self, file: Any, format: str) -> None:  # noqa: A002
        assert self.mode in {"PNG": ("RGB", "RGBA", "P"), "JPEG": ("RGB", "L")}[format]
        file.write(png(4, 3) if format == "PNG" else jpeg(4, 3))


@pytest.mark.parametrize(
    ("mode", "form"),
    [("RGBA", "png"), ("CMYK", "png"), ("F", "png"), ("RGBA", "jpeg"), ("P", "jpeg"), ("L", "jpeg")],
)
def test_images_of_pillow_are_converted_to_a_mode_of_the_format(mode: str, form: Any) -> None:
    chunk = ImageChunk.from_image(Pillow(mode), format=form, expected_tokens=5)
    assert (chunk.format, chunk.size, chunk.length) == (form, (4, 3), 5)


def test_other_objects_are_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"image: .*str"):
        ImageChunk.from_image("cat.png")
    with pytest.raises(InvalidInputError, match=r"format: .*'gif'"):
        ImageChunk.from_image(Pillow("RGB"), format="gif")  # type: ignore[arg-type]


def test_the_size_of_a_damaged_chunk_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"ImageChunk\.data: .*PNG"):
        ImageChunk(data=b"...", format="png").size  # noqa: B018  # the access is the test


# ------------------------------------------------------------------------------------------------ audio
@pytest.mark.parametrize(
    ("dmel", "length"),
    [
        (bytes([0, 1, 12]), 12),
        (bytes([7, 2, 3, 80]), 3),
        (bytes([254, 0, 1, 5]), 5),
        (bytes([0, 1, 0]), 0),
        (bytes([0, 1, 0x80, 0x01]), 128),
        (bytes([0, 1, *[0xFF] * 8, 0x7F]), 2**63 - 1),
        (bytes([0, 1, 12]) + b"payload", 12),
        (bytes([0, 1, 0x85, *[0x80] * 8, 0x00]), 5),
    ],
)
def test_the_header_of_audio_gives_its_length(dmel: bytes, length: int) -> None:
    chunk = DmelChunk(dmel=dmel)
    assert chunk.length == length
    assert DmelChunk(dmel=base64.b64encode(dmel).decode()) == chunk
    assert ModelInput(chunks=[chunk]).append_int(1).length == length + 1


@pytest.mark.parametrize(
    "dmel",
    [
        b"",
        bytes([0]),
        bytes([0, 1]),
        bytes([0, 0]),
        bytes([0, 2, 3]),
        bytes([8, 1, 12]),
        bytes([255, 1, 12]),
        bytes([254]),
        bytes([254, 254, 1, 12]),
        bytes([0, 1, 0x80]),
        bytes([0, 1, *[0xFF] * 9, 0x01]),
        bytes([0, 1, *[0x80] * 9, 0x01, 0x00]),
        bytes([0, 1, 0x85, *[0x80] * 9, 0x00]),
        bytes([0, 1, *[0x80] * 30]),
        bytes([0, *[0xFF] * 8, 0x7F]),
    ],
    ids=lambda dmel: dmel.hex(),
)
def test_a_damaged_header_of_audio_is_refused(dmel: bytes) -> None:
    with pytest.raises(InvalidInputError, match=r"^DmelChunk\.dmel: "):
        DmelChunk(dmel=dmel).length  # noqa: B018  # the access is the test
