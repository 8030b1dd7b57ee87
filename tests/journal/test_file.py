"""Lines that are kept, incomplete lines, and files that are not a journal."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tinker_sync.errors import JournalError
from tinker_sync.journal.file import JournalFile


def lines_of(path: Path) -> list[dict[str, object]]:
    file = JournalFile(path)
    file.close()
    return file.lines


def test_lines_come_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    file = JournalFile(path)
    file.append({"a": 1})
    file.append({"b": "ü"}, sync=True)
    file.close()
    file.close()
    assert lines_of(path) == [{"a": 1}, {"b": "ü"}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("kept", range(1, len('{"b":2}\n')))
def test_a_line_that_was_cut_short_is_forgotten(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "run.journal"
    path.write_bytes(b'{"journal":1}\n{"a":1}\n' + b'{"b":2}\n'[:kept])
    assert lines_of(path) == [{"a": 1}]
    file = JournalFile(path)
    file.append({"c": 3})
    file.close()
    assert path.read_bytes() == b'{"journal":1}\n{"a":1}\n{"c":3}\n'


@pytest.mark.parametrize("torn", [b"", b"{", b'{"journal":1}'])
def test_a_journal_that_was_cut_short_at_its_beginning_is_begun_again(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "run.journal"
    path.write_bytes(torn)
    assert lines_of(path) == []
    assert path.read_bytes() == b'{"journal":1}\n'


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"my thesis", "no journal"),
        (b'{"title": "my thesis"}\n', "no journal"),
        (b'{"journal":2}\n', "newer version"),
        (b'{"journal":1}\n{"a":\n{"b":2}\n', "line 2 .* is damaged"),
        (b'{"journal":1}\n[1]\n', "line 2 .* is damaged"),
    ],
)
def test_other_files_are_left_alone(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "run.journal"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=words):
        JournalFile(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"a":' * 100_000, b"7", b"[]"])
def test_a_line_that_is_no_record_is_damaged(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "run.journal"
    path.write_bytes(b'{"journal":1}\n' + line + b"\n")
    with pytest.raises(JournalError, match=r"line 2 of the journal .* is damaged"):
        JournalFile(path)


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted")
def test_a_journal_that_is_deleted_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run.journal"
    file = JournalFile(path)
    file.append({"a": 1})
    assert caplog.messages == []
    path.unlink()
    file.append({"b": 2})
    file.append({"c": 3})
    file.close()
    (said,) = caplog.messages
    assert f"the journal {path} was deleted" in said


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be opened"):
        JournalFile(tmp_path / "no" / "run.journal")


def test_one_process_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "run.journal"
    file = JournalFile(path)
    other = f"from tinker_sync.journal.file import *\nJournalFile(Path({str(path)!r}))"
    ended = subprocess.run([sys.executable, "-c", other], capture_output=True, text=True, check=False)
    file.close()
    assert "another process uses the journal" in ended.stderr
    assert lines_of(path) == []


def test_a_forked_copy_does_not_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.journal"
    file = JournalFile(path)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with pytest.raises(JournalError, match="forked"):
        file.append({"a": 1})
    file.close()


def test_a_device_is_no_journal() -> None:
    with pytest.raises(JournalError, match="no file"):
        JournalFile(Path(os.devnull))


@pytest.mark.parametrize("written", [3, None])
def test_a_full_disk_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int | None
) -> None:
    file = JournalFile(tmp_path / "run.journal")

    def write(descriptor: int, octets: bytes) -> int:
        if written is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", write)
        with pytest.raises(JournalError, match="cannot be written"):
            file.append({"a": 1})
    file.close()


def test_a_line_that_a_full_disk_cut_short_does_not_damage_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.journal"
    file, write, truncate = JournalFile(path), os.write, os.ftruncate

    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "write", lambda descriptor, octets: write(descriptor, octets[:4]))
    with pytest.raises(JournalError, match="the disk is full"):
        file.append({"a": 1}, sync=True)
    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(JournalError, match="cannot be written"):
        file.append({"b": 2})
    monkeypatch.setattr(os, "ftruncate", truncate)
    file.append({"c": 3})
    file.close()
    assert lines_of(path) == [{"c": 3}]
