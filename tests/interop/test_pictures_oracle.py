"""This package recognises the formats and sizes of images that Pillow has written."""

from __future__ import annotations

import io

import pytest

pillow = pytest.importorskip("PIL.Image")

from tinker_sync import ImageChunk  # noqa: E402  # after the check that there is something to compare with

MODES = ["1", "L", "LA", "I", "I;16", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "HSV", "F", "PA"]


@pytest.mark.parametrize("form", ["png", "jpeg"])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_is_stored_so_that_pillow_reads_it(mode: str, form: str) -> None:
    image = pillow.new(mode, (31, 17))
    chunk = ImageChunk.from_image(image, format=form)
    again = pillow.open(io.BytesIO(chunk.data))
    again.load()
    assert again.format == form.upper()
    assert chunk.size == again.size == (31, 17)
    assert ImageChunk.from_bytes(chunk.data) == chunk


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"quality": 5, "optimize": True}, {"exif": b"Exif\0\0"}]
)
def test_jpeg_files_of_other_kinds(options: dict[str, object]) -> None:
    file = io.BytesIO()
    pillow.new("RGB", (100, 3)).save(file, "JPEG", **options)
    assert ImageChunk.from_bytes(file.getvalue()).size == (100, 3)


@pytest.mark.parametrize("options", [{"interlace": 1}, {"compress_level": 0}, {"dpi": (1, 2)}])
def test_png_files_of_other_kinds(options: dict[str, object]) -> None:
    file = io.BytesIO()
    pillow.new("RGBA", (100, 3)).save(file, "PNG", **options)
    assert ImageChunk.from_bytes(file.getvalue()).size == (100, 3)
