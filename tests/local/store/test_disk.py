"""Full disks, missing rights, damaged files and second servers raise clear errors and lose no data."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from support.stores import adapter, same, store_with_run, with_optimizer

import tinker_sync
from tinker_sync.local.store import Store, StoreError

ROOT = Path(tinker_sync.__file__).parents[1]
FIRST_SCHEMA = Path(__file__).with_name("schema-1.sql")


def in_process(code: str, *arguments: object) -> str:
    """Run a program in its own process, so that its limits do not affect the suite. Return its output."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 1 MB for the test, and yield its directory."""
    place = tmp_path / "small"
    place.mkdir()
    mount = shutil.which("mount")
    tried = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True, check=False
    )
    if not tried or tried.returncode:
        pytest.skip("mounting a small file system needs rights that are not here")
    try:
        yield place
    finally:  # lazily, because a failed test may leave files open
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_full_disk_is_reported_and_keeps_its_checkpoints(small_disk: Path) -> None:
    store = store_with_run(small_disk / "data")
    big = with_optimizer(1, rows=10_000)  # about 0.4 MB
    store.save_checkpoint("r-1", "training", "fits", big, {"n": 1})
    before = sorted(small_disk.rglob("*"))
    with pytest.raises(StoreError, match=r"^more could not be saved: the disk is full") as caught:
        store.save_checkpoint("r-1", "training", "more", with_optimizer(2, rows=20_000), {})
    assert caught.value.kind == "full"
    assert sorted(small_disk.rglob("*")) == before  # no partial files
    with pytest.raises(StoreError, match="disk is full"):  # the old checkpoint stays
        store.save_checkpoint("r-1", "training", "fits", with_optimizer(2, rows=20_000), {}, overwrite=True)
    assert same(store.load_checkpoint("r-1", "training", "fits")[1], big)
    store.save_checkpoint("r-1", "training", "small", adapter(), {})
    store.delete_checkpoint("r-1", "training", "fits")
    store.save_checkpoint("r-1", "training", "again", big, {})
    store.close()
    with Store(small_disk / "data") as store:
        assert [row.checkpoint_id for row in store.list_checkpoints("r-1")] == [
            "weights/again",
            "weights/small",
        ]
        assert same(store.load_checkpoint("r-1", "training", "again")[1], big)


@pytest.mark.skipif(sys.platform == "win32", reason="has other rights")
def test_missing_rights_are_reported(tmp_path: Path) -> None:
    """A directory without write permission is an error.

    The program drops its rights first if it runs as root.
    """
    with store_with_run(tmp_path / "data") as store:
        store.save_checkpoint("r-1", "training", "kept", adapter(1), {})
    printed = in_process(
        """
        import os, sys
        from pathlib import Path
        from tinker_sync.local.store import Store, StoreError

        place = Path(sys.argv[1])
        place.chmod(0o555)
        if os.geteuid() == 0:
            for path in (place.parents[0], place.parents[1], place.parents[2]):
                path.chmod(path.stat().st_mode | 0o055)
            os.setgroups([]); os.setgid(65534); os.setuid(65534)
        for path in (place / "new", place / "data"):
            try:
                Store(path).close()
            except StoreError as problem:
                print(problem.kind, problem)
        """,
        tmp_path,
    ).splitlines()
    tmp_path.chmod(0o755)
    assert len(printed) == 1 if os.geteuid() else 2
    for line in printed:
        assert line.startswith("unwritable")
        assert "Permission denied" in line
    with Store(tmp_path / "data") as store:
        assert same(store.load_checkpoint("r-1", "training", "kept")[1], adapter(1))


@pytest.mark.parametrize("content", [b"", b"not a database" * 100, b"SQLite format 3\0" + bytes(4000)])
def test_a_damaged_database_is_reported_and_left_unchanged(tmp_path: Path, content: bytes) -> None:
    Store(tmp_path).close()
    path = tmp_path / "state.sqlite"
    path.write_bytes(content)
    if not content:
        Store(tmp_path).close()  # an empty file is a new database
        return
    with pytest.raises(StoreError, match=r"state\.sqlite could not be opened") as caught:
        Store(tmp_path)
    assert caught.value.kind == "damaged"
    assert path.read_bytes() == content
    path.unlink()
    Store(tmp_path).close()  # the failed attempt released the lock


def test_a_database_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "state.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="newer version") as caught:
        Store(tmp_path)
    assert caught.value.kind == "too_new"


def test_a_database_of_the_first_schema_opens_with_all_that_is_in_it(tmp_path: Path) -> None:
    """The file is as versions up to 0.2 wrote it, with tables for storage hours, usage and the audit log."""
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "a", with_optimizer(1), {"n": 1})
        before = (store.session("s-1"), store.run("r-1"), store.list_checkpoints("r-1"))
    path = tmp_path / "state.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        rows = list(connection.iterdump())
        path.unlink()
    inserts = "".join(row for row in rows if row.startswith("INSERT") and "sqlite_sequence" not in row)
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(FIRST_SCHEMA.read_text())
        connection.executescript(inserts)
        connection.execute("INSERT INTO audit (at, event, detail) VALUES (1, 'checkpoint_read', '{}')")
        connection.execute("INSERT INTO stored VALUES (1, 'p-1', 10, 1, NULL)")
        connection.execute("INSERT INTO usage VALUES (1, 's-1', 'r-1', 'org/base', 'training', 7)")
        connection.commit()
    for _ in range(2):
        with Store(tmp_path) as store:
            assert (store.session("s-1"), store.run("r-1"), store.list_checkpoints("r-1")) == before
            assert same(store.load_checkpoint("r-1", "training", "a")[1], with_optimizer(1))
            store.save_checkpoint("r-1", "training", "b", adapter(), {}, overwrite=True)
            store.delete_checkpoint("r-1", "training", "b")
            before = (before[0], store.run("r-1"), before[2])
    with closing(sqlite3.connect(path)) as connection:
        tables = {
            name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        }
    assert not tables & {"audit", "stored", "usage"}


def test_opening_removes_leftover_folders_only(tmp_path: Path) -> None:
    with store_with_run(tmp_path) as store:
        store.save_checkpoint("r-1", "training", "kept", adapter(1), {})
    for leftover in (tmp_path / "staging" / uuid4().hex, tmp_path / "checkpoints" / uuid4().hex):
        leftover.mkdir()
        (leftover / "adapter_model.safetensors").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("mine")
    with Store(tmp_path) as store:
        assert list((tmp_path / "staging").iterdir()) == []
        assert len(list((tmp_path / "checkpoints").iterdir())) == 1
        assert same(store.load_checkpoint("r-1", "training", "kept")[1], adapter(1))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_opening_keeps_folders_of_the_user(tmp_path: Path) -> None:
    """Opening a store keeps the user's own folders `checkpoints` and `staging` in the data directory."""
    for place in ("checkpoints/best", "staging/site"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "model.bin").write_bytes(b"mine")
    for _ in range(2):
        Store(tmp_path).close()
    assert (tmp_path / "checkpoints/best/model.bin").read_bytes() == b"mine"
    assert (tmp_path / "staging/site/model.bin").read_bytes() == b"mine"


@pytest.mark.skipif(sys.platform == "win32", reason="knows no such modes")
def test_the_directory_is_private_to_its_owner(tmp_path: Path) -> None:
    Store(tmp_path / "data").close()
    assert (tmp_path / "data").stat().st_mode & 0o077 == 0
