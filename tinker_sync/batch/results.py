"""`ResultsFile`: the responses of a batch as JSON lines, appended as they arrive and read by a later run.

A line begins with the position of its prompt and a key, a hash of the prompt and the parameters. Each line is
one `write` under a lock, so lines of several threads do not mix. A killed process or a full disk leaves at
most one incomplete line, the last; the next line or the next run removes it. On systems with file locks, only
one `ResultsFile` at a time can have the file open for writing.

Threads: one thread opens, reads and closes; any thread may add. The descriptor stays open until `close`, and
until each response that `hold` has announced is added or released.
"""

from __future__ import annotations

import hashlib
import io
import json
import operator
import os
import re
import threading
import weakref
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tinker_sync._base.files import try_lock
from tinker_sync._base.log import Log
from tinker_sync._base.numpy import np
from tinker_sync.errors import InvalidInputError, TinkerError, WireError
from tinker_sync.types import SampleRequest, SampleResponse
from tinker_sync.wire import json as wire_json

_HEAD: Final = re.compile(rb'\{"index": ?(\d{1,18}), ?"key": ?"([0-9a-f]{16})", ?.*\}\s*\Z', re.DOTALL)
_BEGINNING: Final = b'{"index":'
MODEL: Final = "model"
"""The field of a line for the path of the weights or the base model; lines without a known one lack it."""

_log = Log("tinker_sync.batch")


def key_of(request: SampleRequest) -> str:
    """Return a hash of the prompt and parameters of a request, without its model, session and number.

    >>> from tinker_sync.types import ModelInput, SamplingParams
    >>> prompt, params = ModelInput.from_ints([1, 2]), SamplingParams(max_tokens=4)
    >>> first = key_of(SampleRequest(prompt=prompt, sampling_params=params, sampling_session_id="a"))
    >>> first == key_of(SampleRequest(prompt=prompt, sampling_params=params, sampling_session_id="b"))
    True
    >>> first == key_of(SampleRequest(prompt=prompt.append_int(3), sampling_params=params))
    False
    """
    asked = request.model_dump(
        mode="json",
        exclude={"sampling_session_id", "seq_id", "model_path", "base_model", "record_stability_info"},
        # A field that a later version adds does not change the keys of requests without that field.
        exclude_none=True,
        exclude_defaults=True,
    )
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Windows would translate the ends of lines without O_BINARY.
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


class ForeignResultError(InvalidInputError):
    """The error for a file of another batch: it has another prompt, parameters or model at a position."""


class ResultsFile:
    """A file of responses. Any thread may add one: `hold` announces a response, and `add` appends it.

    The file stays open until `close`, and until each announced response is added or released.

    Args:
        path: the file. Its directory is created if missing; so is the file, if it is writable.
        writable: False only reads an existing file, which another process may be writing.

    Raises:
        InvalidInputError: the file is not a file of results; it is not changed.
        TinkerError: the file is already open for writing, here or in another process.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> results = ResultsFile(f"{folder.name}/out.jsonl")
    >>> results.hold(); results.add(7, "00" * 8, SampleResponse([]), {}); results.close()
    >>> again = ResultsFile(f"{folder.name}/out.jsonl")
    >>> again.find(7, "00" * 8), again.find(8, "00" * 8)
    (SampleResponse(sequences=[], ...), None)
    >>> again.close(); folder.cleanup()
    """

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = True) -> None:
        self._writable = writable
        self.path = os.fspath(path)
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise InvalidInputError(f"save_to: {self.path} is not a file")
        Path(self.path).parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._holders = 1  # guarded by _lock: this object, and each pending response
        self._torn = 0  # guarded by _lock: the bytes of an incomplete line at the end of the file
        descriptor = os.open(self.path, _FLAGS if writable else _FLAGS & ~(os.O_RDWR | os.O_CREAT), 0o666)
        # Responses may be pending when the process ends. The file then stays open, without a warning.
        self._file = io.FileIO(descriptor, "a+" if writable else "r", closefd=False)
        self._close_file = weakref.finalize(self, os.close, descriptor)
        self._close_file.atexit = False
        if writable and not try_lock(self._file):
            self._close_file()
            raise TinkerError(f"save_to: another map writes {self.path}; wait for it, or give another file")
        try:
            # Sorted by position, 16 bytes for each line.
            self._positions, self._offsets = self._read()
        except BaseException:
            self._close_file()
            raise

    def __len__(self) -> int:
        """Return the number of responses from earlier runs."""
        return len(self._positions)

    def find(self, index: int, key: str, model: str | None = None) -> SampleResponse | None:
        """Return the response that an earlier run saved for a prompt, or None.

        Args:
            index: the position of the prompt.
            key: the hash of the request, from `key_of`.
            model: the name of the model, compared with that in the line if both are known.

        Raises:
            ForeignResultError: the file holds another prompt, parameters or model at this position.
        """
        place = bisect_left(self._positions, index)
        if place == len(self._positions) or self._positions[place] != index:
            return None
        with open(self.path, "rb") as file:
            file.seek(self._offsets[place])
            tree = wire_json.loads(file.readline())
        if tree["key"] != key:
            raise ForeignResultError(
                f"save_to: {self.path} holds another prompt, or other parameters, for prompts[{index}]; "
                "give the same prompts in the same order, or another file"
            )
        saved = tree.get(MODEL)
        if model is not None and saved is not None and saved != model:
            raise ForeignResultError(
                f"save_to: {self.path} holds the response of {saved} for prompts[{index}], not of {model}; "
                "give each model and each checkpoint a file of its own"
            )
        return wire_json.from_plain(tree, SampleResponse)

    def hold(self) -> None:
        """Register a pending response: the file stays open until its `add` or `release`."""
        with self._lock:
            self._holders += 1

    def add(self, index: int, key: str, response: SampleResponse, more: Mapping[str, Any]) -> None:
        """Append a response that `hold` has announced, then `release`, even if the append fails.

        Args:
            index: the position of the prompt.
            key: the hash of the request, from `key_of`.
            response: the response.
            more: further fields of the line.

        Raises:
            OSError: the line cannot be written.
        """
        try:
            tree = {"index": index, "key": key, **more, **wire_json.to_plain(response)}
            line = wire_json.dumps(tree) + b"\n"
            with self._lock:
                if self._torn:
                    self._file.truncate(self._file.seek(0, os.SEEK_END) - self._torn)
                    self._torn = 0
                written = self._file.write(line)
                self._torn = written if written < len(line) else 0
            if written != len(line):
                raise OSError(f"{self.path}: wrote {written} bytes of {len(line)}; the disk may be full")
        finally:
            self.release()

    def release(self) -> None:
        """Drop one reference to the file, of a pending response or of the object; the last closes it."""
        with self._lock:
            self._holders -= 1
            last = self._holders == 0
        if last:
            self._close_file()

    def close(self) -> None:
        """Close the file; if responses are pending, the last of them closes it. Call this method once."""
        self.release()

    # -------------------------------------------------------------------------------------- the earlier runs

    def _read(self) -> tuple[array[int], array[int]]:
        """Return the sorted positions of the prompts in the file, and the offset of the line of each."""
        positions, offsets = array("q"), array("q")
        for offset, index in self._read_lines():
            positions.append(index)
            offsets.append(offset)
        if all(map(operator.le, positions, positions[1:])):
            return positions, offsets
        order = np.argsort(positions, kind="stable")
        first, second = (array("q", np.asarray(each)[order].tobytes()) for each in (positions, offsets))
        return first, second

    def _read_lines(self) -> Iterator[tuple[int, int]]:
        offset = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                matched = _HEAD.match(line)
                last = not line.endswith(b"\n")
                if last and not (self._writable and self._repair_end(offset, line)):
                    return
                if matched is None:
                    raise InvalidInputError(
                        f"save_to: line {number} of {self.path} is not a result of map; give another file"
                    )
                yield offset, int(matched[1])
                if last:
                    return  # the next line would be the newline that was just added
                offset += len(line)

    def _repair_end(self, offset: int, line: bytes) -> bool:
        """Repair the last line of the file, which has no newline, and return True if the line stays.

        A complete result gets its newline. The beginning of a result is removed.

        Args:
            offset: the offset of the line in the file.
            line: its bytes.

        Raises:
            InvalidInputError: the line is not a result of `map`, so the file is left alone.
        """
        with suppress(WireError):
            wire_json.loads(line)
            if _HEAD.match(line):
                self._file.write(b"\n")
                return True
        text = line.rstrip(b"\0")
        if text[: len(_BEGINNING)] != _BEGINNING[: len(text)]:
            raise InvalidInputError(
                f"save_to: the last line of {self.path} is not a result of map; give another file"
            )
        self._file.truncate(offset)
        _log.warning("%s: removed the last line, which was cut short; its prompt is sampled again", self.path)
        return False
