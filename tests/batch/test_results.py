"""`ResultsFile`: incomplete lines, files of other batches, and threads that add while the file closes."""

from __future__ import annotations

import io
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tinker_sync import InvalidInputError, SampledSequence, SampleResponse
from tinker_sync.batch.results import ResultsFile

KEY = "0123456789abcdef"


def response(value: float) -> SampleResponse:
    logprobs = np.array([value, np.nan], dtype=np.float32)
    return SampleResponse([SampledSequence("stop", "s", np.array([1, 2], np.int32), logprobs)])


def written(path: Path, *indexes: int) -> bytes:
    results = ResultsFile(path)
    for index in indexes:
        results.hold()
        results.add(index, KEY, response(index / 3), {})
    results.close()
    return path.read_bytes()


def test_numbers_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(path, 1, 0, 7)
    results = ResultsFile(path)
    assert len(results) == 3
    for index in (0, 1, 7):
        found = results.find(index, KEY)
        expected = response(index / 3).sequences[0].logprobs_np
        np.testing.assert_array_equal(found.sequences[0].logprobs_np, expected)
    assert results.find(2, KEY) is None
    results.close()


def test_torn_lines_are_removed_and_the_rest_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, 0, 1)
    second = whole.index(b"\n") + 1
    for cut in range(second + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            ResultsFile(path).close()
        assert path.read_bytes() == whole[:second]
        assert "cut short" in caplog.text


def test_zeros_that_a_power_cut_left_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, 0)
    path.write_bytes(whole + b"\0" * 100)
    ResultsFile(path).close()
    assert path.read_bytes() == whole


def test_a_whole_line_that_lacks_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = written(path, 0, 1)
    path.write_bytes(whole[:-1])
    results = ResultsFile(path)
    assert len(results) == 2
    results.close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"my notes\n", "line 1 of .*out.jsonl is not a result of map; give another file"),
        (b"my notes", "the last line of .*out.jsonl is not a result"),
        (b'{"index": "a"}\n', "line 1 of"),
        (b'{"name": "x", "indexes": [', "the last line of"),
    ],
)
def test_a_foreign_file_is_refused_and_left_alone(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidInputError, match=complaint):
        ResultsFile(path)
    assert path.read_bytes() == content


def test_the_last_response_closes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    results = ResultsFile(path)
    for _ in range(8):
        results.hold()
    adding = [
        threading.Thread(target=results.add, args=(n, KEY, response(n), {"texts": ["x" * 500]}))
        for n in range(8)
    ]
    for thread in adding[:4]:
        thread.start()
    results.close()
    for thread in adding[4:]:
        thread.start()
    for thread in adding:
        thread.join()
    again = ResultsFile(path)  # the file is closed, so nothing locks it
    assert len(again) == 8
    again.close()


def test_a_line_that_a_full_disk_cut_short_does_not_damage_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, room = tmp_path / "out.jsonl", [60]

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(data[: room.pop()] if room else data)

    monkeypatch.setattr("tinker_sync.batch.results.io.FileIO", FullDisk)
    results = ResultsFile(path)
    for _ in range(2):
        results.hold()
    with pytest.raises(OSError, match="wrote 60 bytes"):
        results.add(0, KEY, response(0), {})
    results.add(1, KEY, response(1), {})
    results.close()
    again = ResultsFile(path)
    assert (again.find(0, KEY), again.find(1, KEY) is not None) == (None, True)
    again.close()
