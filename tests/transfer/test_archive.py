"""Good archives unpack completely; hostile and broken ones leave no file behind."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from support.file_server import Tar
from support.tars import END, member, pax, write

from tinker_sync.errors import TransferError, UnsafeArchiveError
from tinker_sync.transport.files.archive import ArchiveLimits, unpack

FINE = member("adapter_config.json", b"{}")
SMALL = ArchiveLimits(entries=100, ratio=20, allowance_bytes=100_000)
ZEROS = b"\0" * 1_000_000

HOSTILE: dict[str, list[bytes]] = {
    "upwards": [member("../outside", b"x")],
    "upwards in the middle": [member("a/../../outside", b"x")],
    "upwards by a prefix": [member("outside", b"x", prefix=b"..")],
    "upwards by an extended header": [pax({"path": "../outside"}), member("fine", b"x")],
    "upwards by a long name": [member("././@LongLink", b"../outside\0", kind=b"L"), member("fine", b"x")],
    "upwards as a directory": [member("../outside/", kind=b"5")],
    "upwards from the root": [member("/../outside/", kind=b"5")],
    "the root as a file with content": [member("/", b"x")],
    "the root as a link": [member("/", kind=b"2", link="..")],
    "a directory at the root": [member("/outside/", kind=b"5")],
    "absolute": [member("/tmp/outside", b"x")],
    "absolute by an extended header": [pax({"path": "/outside"}), member("fine", b"x")],
    "a drive": [member("C:/outside", b"x")],
    "backslashes": [member("..\\outside", b"x")],
    "a share": [member("\\\\host\\share\\outside", b"x")],
    "a stream of a file": [member("adapter.bin:hidden", b"x")],
    "a soft link outside": [member("link", kind=b"2", link="../outside")],
    "a soft link outside, to the name of a file inside": [
        member("d/link", kind=b"2", link="../../adapter_config.json")
    ],
    "a soft link to the root": [member("link", kind=b"2", link="/etc/passwd")],
    "a soft link outside, then through it": [
        member("link", kind=b"2", link=".."),
        member("link/outside", b"x"),
    ],
    "links that only together lead outside": [
        member("dir/", kind=b"5"),
        member("b", kind=b"2", link="."),
        member("a", kind=b"2", link="b/b/../../outside"),
    ],
    "a link by an extended header": [pax({"linkpath": "../../outside"}), member("link", kind=b"2", link="a")],
    "a soft link to a directory": [member("d/f", b"x"), member("link", kind=b"2", link="d")],
    "a link to itself": [member("link", kind=b"2", link="link")],
    "links in a circle": [member(f"l{n}", kind=b"2", link=f"l{(n + 1) % 3}") for n in range(3)],
    "a link to a circle": [
        member("a", kind=b"2", link="b"),
        member("b", kind=b"2", link="c"),
        member("c", kind=b"2", link="b"),
    ],
    "a deep link": [member("link", kind=b"2", link="a/" * 40)],
    "a hard link outside": [member("link", kind=b"1", link="../outside")],
    "a hard link to the root": [member("link", kind=b"1", link="/etc/passwd")],
    "a hard link with content": [member("f", b"x"), member("link", b"y", kind=b"1", link="f")],
    "a hard link to nothing": [member("link", kind=b"1", link="nothing")],
    "a character device": [member("null", kind=b"3")],
    "a block device": [member("disk", kind=b"4")],
    "a pipe": [member("pipe", kind=b"6")],
    "an unknown kind": [member("what", kind=b"Z")],
    "a sparse file": [member("sparse", b"x" * 512, kind=b"S")],
    "a sparse file by an extended header": [
        pax({"GNU.sparse.realsize": "999999999999"}),
        member("sparse", b"x"),
    ],
    "a name for all": [pax({"path": "../outside"}, kind=b"g"), member("fine", b"x")],
    "the same twice": [member("f", b"x"), member("f", b"y")],
    "the same by other ways": [member("d/f", b"x"), member("./d//f", b"y")],
    "the same but for case": [member("Model.bin", b"x"), member("model.BIN", b"y")],
    "the same but for accents": [member("caf\u00e9", b"x"), member("cafe\u0301", b"y")],
    "directories but for case": [member("Dir/a", b"x"), member("dir/b", b"y")],
    "a link in the way of a file": [member("f", kind=b"2", link="adapter_config.json"), member("F", b"y")],
    "a file in the way of a directory": [member("f", b"x"), member("f/g", b"y")],
    "a directory in the way of a file": [member("f/g", b"x"), member("f", b"y")],
    "devices of Windows": [member("aux.json", b"x")],
    "a name that ends with a dot": [member("adapter_config.json.", b"x")],
    "a line break": [member("a\nb", b"x")],
    "no text": [member(b"\xff\xfe", b"x")],
    "no text at first": [member(b"\xff\xfe", b"x")],
    "no name": [member("", b"x")],
    "deep": [pax({"path": "/".join("d" * 40)}), member("fine", b"x")],
    "long": [pax({"path": "x" * 300}), member("fine", b"x")],
    "a bomb": [member("zeros", ZEROS * 4)],
    "a bomb of many": [member(f"z{number}", ZEROS) for number in range(10)],
    "a bomb behind the end": [END, ZEROS * 4],
    "a bomb that only claims": [member("huge", b"", size=1 << 60)],
    "a bomb of entries": [member(f"f{number}", b"") for number in range(101)],
    "directories without number": [member(f"{number}/" + "d/" * 20, kind=b"5") for number in range(10)],
    "an endless header": [member("pax", ZEROS, kind=b"x"), member("fine", b"x")],
    "an endless header at first": [member("pax", ZEROS, kind=b"x"), member("fine", b"x")],
    "an endless long name": [member("long", ZEROS, kind=b"L"), member("fine", b"x")],
    "headers without end": [pax({"comment": "x"})] * 200 + [member("fine", b"x")],
    "the map of a sparse file without end": [
        pax({"GNU.sparse.major": "1", "GNU.sparse.minor": "0"}),
        member("sparse", b"1000000\n" + b"1\n" * 500_000),
    ],
}


@pytest.mark.parametrize("compress", [True, False], ids=["gzip", "plain"])
@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_archive_leaves_nothing(tmp_path: Path, what: str, compress: bool) -> None:
    if not compress and "bomb" in what and "entries" not in what and "claims" not in what:
        pytest.skip("without compression it is not a bomb")
    (tmp_path / "outside").write_bytes(b"untouched")
    first = [] if "first" in what else [FINE]
    archive = write(tmp_path / "a.tar.gz", *first, *HOSTILE[what], compress=compress)
    before = everything_below(tmp_path)
    with pytest.raises(UnsafeArchiveError) as caught:
        unpack(archive, tmp_path / "in" / "to", limits=SMALL)
    (tmp_path / "in").rmdir()  # raises unless it is empty
    assert everything_below(tmp_path) == before
    assert "not unpacked" in str(caught.value)


BROKEN: dict[str, tuple[list[bytes], bytes]] = {
    "without an end": ([member("f", b"x")], b""),
    "cut in a file": ([member("f", b"x" * 5000)[:2000]], b""),
    "cut in a header": ([FINE[:300]], b""),
    "nothing": ([], b""),
    "no header": ([b"this is no archive".ljust(1024)], END),
    "a wrong checksum": ([member("f", b"x", checksum=5)], END),
    "a size of letters": ([member("f", b"x", raw_size=b"zzzzzzzzzzz\0")], END),
    "a size below zero": ([member("f", b"x", raw_size=b"\xff" * 12)], END),
    "an extended size of letters": ([pax({"size": "many"}), member("f", b"x")], END),
    "a wrong checksum behind a file": ([FINE, member("f", b"x", checksum=5)], END),
    "a size of letters behind a file": ([FINE, member("f", b"x", raw_size=b"zzzzzzzzzzz\0"), FINE], END),
    "an extended size below zero": ([FINE, pax({"size": "-512"}), member("f", b"x")], END),
    "an extended header at the end": ([pax({"path": "x"})], END),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_archive_leaves_nothing(tmp_path: Path, what: str) -> None:
    members, end = BROKEN[what]
    archive = write(tmp_path / "a.tar.gz", *members, end=end)
    with pytest.raises(TransferError):
        unpack(archive, tmp_path / "to")
    assert os.listdir(tmp_path) == ["a.tar.gz"]


@pytest.mark.parametrize("body", [b"99 path=x\n", b"nothing", b"8 a=\0b\n"])
def test_a_malformed_extended_header_is_refused_or_ignored(tmp_path: Path, body: bytes) -> None:
    """The versions of `tarfile` differ here; no file is lost in silence, and none is put elsewhere."""
    archive = write(tmp_path / "a.tar.gz", pax(body), member("f", b"x"))
    try:
        found = unpack(archive, tmp_path / "to")
    except TransferError:
        assert not (tmp_path / "to").exists()
    else:
        assert list(found.values()) == [1]
        assert [path.name for path in (tmp_path / "to").iterdir()] == list(found)


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-20], lambda b: b[:-8] + bytes(8), lambda b: b[:50] + b"?" * 9]
)
def test_broken_compression_leaves_nothing(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    archive = write(tmp_path / "a.tar.gz", FINE, member("f", random.Random(1).randbytes(5000)))
    archive.write_bytes(damage(archive.read_bytes()))
    with pytest.raises(TransferError, match="broken"):
        unpack(archive, tmp_path / "to")
    assert os.listdir(tmp_path) == ["a.tar.gz"]


@pytest.mark.parametrize("style", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_archives_unpack_completely(tmp_path: Path, style: int, mode: Any) -> None:
    draw = random.Random(style)
    contents = {
        "adapter_model.safetensors": draw.randbytes(3_000_000),
        "adapter_config.json": b"{}",
        "empty": b"",
        "deep/er/block": b"x" * 512,
        "deep/" + "long-" * 15 + "name": b"y" * 513,
        "deep/caf\u00e9": b"z",
    }
    with tarfile.open(tmp_path / "a.tar", mode, format=style) as tar:
        root = tarfile.TarInfo("./")
        root.type = tarfile.DIRTYPE
        tar.addfile(root)
        for name, content in contents.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size, info.mode, info.mtime = len(content), 0o4777, 1.5 if style == tarfile.PAX_FORMAT else 1
            tar.addfile(info, io.BytesIO(content))
        for name, kind, target in (
            ("deep/hard", tarfile.LNKTYPE, "./adapter_config.json"),
            ("deep/er/soft", tarfile.SYMTYPE, "../../empty"),
            ("chain", tarfile.SYMTYPE, "deep/er/soft"),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, target
            tar.addfile(info)
    contents |= {"deep/hard": b"{}", "deep/er/soft": b"", "chain": b""}
    on_progress: list[int] = []
    found = unpack(tmp_path / "a.tar", tmp_path / "to", on_progress=on_progress.append)
    assert list(found.items()) == [(name, len(content)) for name, content in sorted(contents.items())]
    read = {
        path.relative_to(tmp_path / "to").as_posix(): path.read_bytes()
        for path in (tmp_path / "to").rglob("*")
        if path.is_file()
    }
    assert read == contents
    assert not any(path.is_symlink() for path in (tmp_path / "to").rglob("*"))
    assert not (tmp_path / "to" / "empty").stat().st_mode & 0o7111
    assert sum(on_progress) == sum(len(content) for name, content in contents.items()) - len(b"{}")


def test_the_archive_of_a_directory_added_without_a_name_is_unpacked(tmp_path: Path) -> None:
    """`add(directory, arcname="")` of `tarfile` writes an entry `/` for the directory itself."""
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "adapter", arcname="")
    assert unpack(tmp_path / "a.tar.gz", tmp_path / "to") == {"adapter_config.json": 2}


def test_memory_stays_flat(tmp_path: Path) -> None:
    content = random.Random(1).randbytes(1_000_000) * 30
    archive = write(tmp_path / "a", member("f", content), compress=False)
    del content
    tracemalloc.start()
    try:
        unpack(archive, tmp_path / "to")
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def chain_of_links(size: int) -> list[bytes]:
    links = [member(f"l{n}", kind=b"2", link=f"l{n + 1}") for n in range(size - 1)]
    return [member("f", b"abc"), *links, member(f"l{size - 1}", kind=b"1", link="f")]


def test_a_chain_of_links_costs_no_more_for_each_link(tmp_path: Path) -> None:
    """10,000 links took a minute: each was followed as many steps as there are links."""

    def count_calls(size: int) -> int:
        archive, calls = write(tmp_path / f"a{size}", *chain_of_links(size)), 0

        def count(frame: FrameType, _event: str, _arg: object) -> None:
            nonlocal calls
            calls += frame.f_code.co_filename == unpack.__code__.co_filename

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            sizes = unpack(archive, tmp_path / f"to{size}")
        finally:
            sys.setprofile(before)
        assert set(sizes.values()) == {3}
        assert len(sizes) == size + 1
        return calls

    assert count_calls(400) < 2.5 * count_calls(200)


@pytest.mark.parametrize("size", [30_000, 60_000])
def test_copies_in_place_of_links_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """A small archive filled the disk where the file system has no hard links."""

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    links = [member(f"l{number}", kind=b"1", link="f") for number in range(2)]
    archive = write(tmp_path / "a", member("f", b"x" * size), *links)
    monkeypatch.setattr("os.link", no_links)
    if size < 50_000:
        assert unpack(archive, tmp_path / "to", limits=SMALL) == dict.fromkeys(["f", "l0", "l1"], size)
        return
    with pytest.raises(UnsafeArchiveError, match="grows to more than"):
        unpack(archive, tmp_path / "to", limits=SMALL)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("form", ["targets of links", "names"])
def test_long_texts_of_headers_take_little_memory(tmp_path: Path, form: str) -> None:
    """An archive of 2 MB took 900 MB: long targets of links stayed, and each name thirty times."""
    if form == "names":
        deep = "/".join("a" * 250 for _ in range(31))
        texts = [({"path": f"{number}/{deep}"}, f"l{number}") for number in range(100)]
    else:
        texts = [({"linkpath": "a/" * 30_000 + "f"}, f"l{number}") for number in range(100)]
    links = [part for text, name in texts for part in (pax(text), member(name, kind=b"2", link="f"))]
    archive = write(tmp_path / "a", *links)
    del texts, links
    tracemalloc.start()
    try:
        with pytest.raises(UnsafeArchiveError, match="no file of the archive"):
            unpack(archive, tmp_path / "to")
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()


def test_progress_callback_can_stop_it(tmp_path: Path) -> None:
    def stop(_: int) -> None:
        raise InterruptedError(4, "stopped")

    archive = write(tmp_path / "a", FINE)
    with pytest.raises(TransferError, match="stopped"):
        unpack(archive, tmp_path / "to", on_progress=stop)
    assert not (tmp_path / "to").exists()


def test_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    archive = write(tmp_path / "a", member("f", b"x" * 11))
    with pytest.raises(TransferError, match="too full"):
        unpack(archive, tmp_path / "to")


def test_archive_of_zeros_is_accepted(tmp_path: Path) -> None:
    """An archive that compresses very well may be a checkpoint: a new adapter is half zeros."""
    archive = write(
        tmp_path / "a", member("zeros", ZEROS * 30), member("rest", random.Random(1).randbytes(9000))
    )
    assert len(unpack(archive, tmp_path / "to")) == 2


def everything_below(place: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(place).as_posix(): path.read_bytes() if path.is_file() else None
        for path in place.rglob("*")
    }


# ---- A large archive over broken connections, from a server that dies, into a process that is killed
MEGABYTES = int(os.environ.get("DOWNLOAD_MB", "20"))
SIZE = MEGABYTES * 1_000_000
LIMIT_S = 60 + MEGABYTES
TESTS = Path(__file__).parents[1]

# The process that downloads prints the result and its peak memory.
CLIENT = """
import json, sys
import tinker_sync
from tinker_sync.transport.files import file

def peak_bytes():  # not getrusage: that counts the process this one was forked from
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

url, to, every_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
file.SAVE_EVERY_S = every_s
rest = tinker_sync.RestClient(base_url=url, api_key="tml-large")
got = rest.download_checkpoint("tinker://run/sampler_weights/large", to).result()
print(json.dumps({
    "files": [[file.name, file.size_bytes] for file in got.files],
    "bytes_resumed": got.bytes_resumed,
    "interruptions": got.interruptions,
    "peak_bytes": peak_bytes(),
}))
"""


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True, env=environ)
    with process:
        try:
            yield process
        finally:
            process.kill()


def server(port: int = 0, **behaviour: Any) -> Any:
    options = {
        "files": {"archive": SIZE},
        "cut": SIZE // 40,
        "life_s": 1.5,
        "uses": 12,
        "port": port,
        **behaviour,
    }
    return started("-m", "support.file_server", json.dumps(options))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_archive_survives_cuts_and_kills(tmp_path: Path) -> None:
    began_at = time.monotonic()
    to = tmp_path / "out"
    every_s = "0.02" if MEGABYTES < 100 else "1.0"  # a small download ends before the first save
    with server(dies_after=SIZE // 4) as first:
        port = int(first.stdout.readline())
        url = f"http://127.0.0.1:{port}"
        with started("-c", CLIENT, url, str(to), every_s) as client:
            assert first.wait(LIMIT_S) == 3
            with server(port, halts_after=SIZE // 4) as second:
                assert int(second.stdout.readline()) == port
                assert second.stdout.readline() == "halted\n"
                client.send_signal(signal.SIGKILL)
                assert client.wait(120) == -signal.SIGKILL
    assert os.listdir(tmp_path) == ["out.partial"]
    with server(port) as third:
        assert int(third.stdout.readline()) == port
        with started("-c", CLIENT, url, str(to), every_s) as client:
            output, _ = client.communicate(timeout=LIMIT_S)
            assert client.returncode == 0
    got = json.loads(output)
    took_s = time.monotonic() - began_at
    print(f"\n{MEGABYTES} MB in {took_s:.1f} s: {got}")  # noqa: T201  # the figures, shown with -s
    assert got["files"] == [["adapter_model.safetensors", SIZE]]
    assert got["bytes_resumed"] > SIZE // 5
    assert got["interruptions"] >= 10
    assert got["peak_bytes"] < 100_000_000
    assert sum_of(to / "adapter_model.safetensors") == Tar(SIZE).inner.sum("sha256")
    assert os.listdir(tmp_path) == ["out"]


def sum_of(path: Path) -> bytes:
    summed = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            summed.update(piece)
    return summed.digest()
