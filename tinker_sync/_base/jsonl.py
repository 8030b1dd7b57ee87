"""Files of JSON lines that a loop appends to, and that a killed process or a full disk may have cut short."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def append_line(file: io.FileIO, line: Mapping[str, Any]) -> None:
    """Append a line of JSON to a file that is open with the mode "a+b" and without a buffer.

    A last line that was cut short is ended first, so that this line is separate.

    Raises:
        OSError: the line cannot be written, or only its beginning.
    """
    octets = json.dumps(line).encode() + b"\n"
    if file.seek(0, os.SEEK_END) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n":
        file.write(b"\n")
    if (written := file.write(octets)) != len(octets):
        raise OSError(f"{file.name!s}: wrote {written} bytes of {len(octets)}; the disk may be full")


def read_lines(path: Path, start: int = 0) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line, without those that are not JSON, such as one cut short.

    `start` is the byte at which the first line begins.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "a.jsonl")
    >>> _ = path.write_text('{"step": 0}\\n{"st\\n{"step": 1}\\n')
    >>> list(read_lines(path))
    [(1, {'step': 0}), (3, {'step': 1})]
    """
    with path.open("rb") as file:
        file.seek(start)
        octets = file.read()
    for number, text in enumerate(octets.decode(errors="replace").splitlines(), 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            continue
        yield number, line
